"""The kernel for large tensors does what the plain arithmetic does, in Triton's interpreter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")

from syngap.optim import fused
from syngap.optim.update import Work, _update_each, update

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.01},
    "unbounded, climbing": {"bounded": False, "maximize": True},
    "rate as a tensor": {"lr": torch.tensor(0.1, dtype=torch.float64)},
}
OBSERVED = ("nothing", "scores", "squares", "elsewhere")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fused._kernel.cache_clear()
    yield
    fused._kernel.cache_clear()


def work_of(observed: str, layout: torch.memory_format, **options: Any) -> Work:
    torch.manual_seed(0)
    shapes = [(64, 32, 5, 5), (7,), (48, 32, 5, 5), (40000,)]
    params = [torch.randn(shape) for shape in shapes]
    params = [p.contiguous(memory_format=layout) if p.dim() == 4 else p for p in params]
    like = {name: [torch.rand_like(p) for p in params] for name in ("F", "g", "m", "v")}
    given = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "maximize": False, **options}
    given |= {"foreach": None, "differentiable": False, "ambient": 0.01}
    given.setdefault("bounded", True)
    work = Work(given, torch.tensor([-0.7, -0.2, -1.5, -3.0]), 1e-16)
    work.params, work.importances = params, like["F"]
    work.grads = [like["g"][0], like["g"][1], None, like["g"][3]]
    work.buffers = like["m"] if given["momentum"] else []
    if observed != "nothing":
        work.values = [None if observed == "elsewhere" else v for v in like["v"]]
    work.squared, work.weight, work.keep = observed == "squares", 3.0, 0.9
    return work


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("observed", OBSERVED)
@pytest.mark.parametrize("case", CASES)
def test_a_fused_step_is_the_plain_one(
    case: str, observed: str, layout: torch.memory_format
) -> None:
    work = work_of(observed, layout, **CASES[case])
    plain = copy.deepcopy(work)
    _update_each(plain)
    work.options["fused"] = True
    update(work)
    for name in ("params", "importances", "buffers"):
        for ours, theirs in zip(getattr(work, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_large_tensors_with_a_gradient_go_through_the_kernel() -> None:
    work = work_of("scores", torch.contiguous_format)
    assert [fused.fits(work, index) for index in range(4)] == [True, False, False, True]
    left = fused.update_large(work)
    assert [param.shape for param in left.params] == [(7,), (48, 32, 5, 5)]
    assert left.slope.tolist() == pytest.approx([-0.2, -1.5])


def test_other_strides_and_types_are_left_to_the_plain_step() -> None:
    work = work_of("scores", torch.channels_last)
    work.importances[0] = work.importances[0].contiguous()
    work.params[3] = work.params[3].double()
    assert not fused.fits(work, 0)
    assert not fused.fits(work, 3)


def test_on_a_cpu_nobody_takes_it_unasked() -> None:
    assert not fused.applies(work_of("scores", torch.contiguous_format))


def test_where_triton_cannot_compile_the_step_goes_on_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(work: Work, index: int) -> None:
        if index:
            raise RuntimeError("no compiler")
        kernel(work, index)

    kernel = fused.update_one
    monkeypatch.setattr(fused, "update_one", fails)
    monkeypatch.setattr(fused, "_broken", [])
    work = work_of("scores", torch.contiguous_format)
    with pytest.warns(UserWarning, match="not fused, Triton says: no compiler"):
        left = fused.update_large(work)
    assert [param.shape for param in left.params] == [(7,), (48, 32, 5, 5), (40000,)]
    assert fused._broken == ["no compiler"]
    work.options["fused"] = True
    with pytest.raises(RuntimeError, match="no compiler"):
        fused.update_large(work)


def test_options_on_a_device_are_left_to_the_plain_step() -> None:
    work = work_of("scores", torch.contiguous_format, weight_decay=torch.tensor(0.1))
    work.options["fused"] = True
    assert not fused.applies(work)
