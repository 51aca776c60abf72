"""What a protected run saves: the same bits after loading, and nothing of another run."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_identical, snapshot, values_of
from protect_cases import CASES, Case, SeededNormal, random_gradients
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import syngap
from syngap.optim import direction_checks, gate_changes
from syngap.optim.basis import Basis
from syngap.optim.fisher import Estimator, Schedule
from syngap.optim.parameter_state import RECORD, basis_in, grown
from syngap.optim.wrapped import WrappedSynGAP
from syngap.protection import Protection

MAKE_BASE: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=0.02, weight_decay=0.1),
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9),
}
FORMS: dict[str, dict[str, Any]] = {
    "rotated": {"rank": "full", "rotate": True},
    "filtered": {"rank": "full", "rotate": False},
    "low-rank": {"rank": 2, "rotate": False},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
every_base = pytest.mark.parametrize("base", MAKE_BASE)
some_cases = pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name in ("mlp", "conv2d", "gpt_padded", "experts_bmm", "normal_regression")
    ],
    ids=lambda case: case.name,
)
Run = tuple[nn.Module, Protection, WrappedSynGAP]
AnyRun = tuple[nn.Module, Protection, Optimizer]


class Branches(nn.Module):
    """Two layers with the same inputs, which share directions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.one(x)) * self.two(x))
        return out


def known_inputs(rows: int = 40) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(3))


def branches(base: str = "adamw", **options: Any) -> Run:
    """Return a new model, protected, and its optimizer: the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Branches()
    protection = syngap.protect(model, known_inputs(), **options)
    return model, protection, gated(protection, model, base)


def gated(protection: Protection, model: nn.Module, base: str = "adamw") -> WrappedSynGAP:
    optimizer = protection.optimizer(MAKE_BASE[base](model.parameters()))
    assert isinstance(optimizer, WrappedSynGAP)
    return optimizer


def of_case(case: Case, base: str, **options: Any) -> Run:
    model, known = case.make()
    SeededNormal.restart()
    protection = syngap.protect(model, known, batch_size=case.batch_size, **options)
    return model, protection, gated(protection, model, base)


def learn(run: AnyRun, steps: range) -> None:
    """A loop of one's own, whose task is the same numbers at each step."""
    model, protection, optimizer = run
    gradients = random_gradients(model, steps.stop)
    for step in steps:
        optimizer.zero_grad()
        loss = protection.loss()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        for name, param in model.named_parameters():
            if param.requires_grad:
                own = torch.zeros_like(param) if param.grad is None else param.grad
                param.grad = own + 0.1 * gradients[step][name]
        optimizer.step()


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Saving and loading -------------------------------------------------------------------------------


def test_a_state_without_moments_is_refused() -> None:
    """As torch.distributed.checkpoint.load leaves it, for an optimizer that has made no step."""
    run = branches()
    before = through_file(run[2].state_dict())
    learn(run, range(2))
    saved = through_file(run[2].state_dict())
    for state in saved["state"].values():
        for key in [key for key in state if key.startswith("base.")]:
            del state[key]
    fresh = branches()[2]
    with pytest.raises(ValueError, match="nothing of AdamW's own"):
        fresh.load_state_dict(saved)
    fresh.load_state_dict(before)  # made no step, so there is nothing to miss


@some_cases
@every_base
@every_form
def test_resume_after_kill_is_bitwise(case: Case, base: str, form: dict[str, Any]) -> None:
    options = {"anchors": 4, "every": 2, **form}
    whole = of_case(case, base, **options)
    learn(whole, range(7))

    first = of_case(case, base, **options)
    learn(first, range(3))
    saved = through_file({"model": first[0].state_dict(), "optimizer": first[2].state_dict()})
    del first

    resumed = of_case(case, base, **options)
    resumed[0].load_state_dict(saved["model"])
    resumed[2].load_state_dict(saved["optimizer"])
    learn(resumed, range(3, 7))
    assert resumed[2].param_groups[0]["drawn"] == 7
    assert_identical(values_of(resumed[0]), values_of(whole[0]))
    assert_identical(resumed[2].state_dict(), whole[2].state_dict())
    assert str(resumed[1].report()) == str(whole[1].report())


def test_resume_of_weights_in_other_order_of_memory_is_bitwise() -> None:
    """Directions of a square weight have its shape, and not its order of memory."""

    def make() -> Run:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        layer = model[0]
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
        protection = syngap.protect(model, known_inputs())
        return model, protection, gated(protection, model)

    whole, first, resumed = make(), make(), make()
    learn(whole, range(4))
    learn(first, range(2))
    resumed[0].load_state_dict(first[0].state_dict())
    resumed[2].load_state_dict(through_file(first[2].state_dict()))
    learn(resumed, range(2, 4))
    assert_identical(values_of(resumed[0]), values_of(whole[0]))


@every_form
def test_a_saved_state_is_tensors_numbers_and_short_texts_in_memory_of_their_own(
    form: dict[str, Any],
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    run = branches(**form)
    one, two = (run[2].state[layer.weight] for layer in (run[0].one, run[0].two))
    assert one["right"] is two["right"]
    learn(run, range(2))
    state = run[2].state_dict()
    for group in state["param_groups"]:
        plain = [value for key, value in group.items() if key != "params"]
        assert all(
            isinstance(value, int | float | str | tuple | type(None)) and len(str(value)) < 100
            for value in plain
        )
    flat = {
        f"{index}/{key}": value
        for index, entries in state["state"].items()
        for key, value in entries.items()
    }
    assert all(isinstance(value, Tensor) for value in flat.values())
    loaded = safetensors.load(safetensors.save(flat))
    back: dict[int, dict[str, Tensor]] = {}
    for name, value in loaded.items():
        index, key = name.split("/")
        back.setdefault(int(index), {})[key] = value
    again = branches(**form)
    again[0].load_state_dict(run[0].state_dict())
    again[2].load_state_dict({**state, "state": back})
    assert_identical(again[2].state_dict(), state)
    sides = [again[2].state[layer.weight]["right"] for layer in (again[0].one, again[0].two)]
    assert sides[0] is sides[1]  # in memory once, as before
    for each in (run, again):
        learn(each, range(2, 4))
    assert_identical(values_of(again[0]), values_of(run[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_directions_keep_their_own_type(dtype: torch.dtype) -> None:
    """On a GPU they are bfloat16, where the weights are float32."""
    run = branches(rank=2, rotate=False)
    for known in run[1].known.values():
        if known.basis is not None:
            sides = (known.basis.left, known.basis.right)
            known.basis = Basis(*(None if side is None else side.to(dtype) for side in sides))
    optimizer = gated(run[1], run[0])
    saved = copy.deepcopy(optimizer.state_dict())
    other = branches(rank=2, rotate=False)
    other[2].load_state_dict(saved)
    assert_identical(other[2].state_dict(), saved)
    assert other[2].state[other[0].one.weight]["right"].dtype == dtype
    shared = [other[2].state[layer.weight]["right"] for layer in (other[0].one, other[0].two)]
    assert all(side.is_contiguous() for side in shared)


@every_form
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_the_optimizer_go_on_alike(form: dict[str, Any], how: str) -> None:
    model, _, optimizer = run = branches(**form)
    learn(run, range(2))
    twins = (model, optimizer)
    copies = copy.deepcopy(twins) if how == "deepcopy" else pickle.loads(pickle.dumps(twins))
    gradients = random_gradients(model, 3)
    for subject, one in (twins, copies):
        for step in gradients:
            for name, param in subject.named_parameters():
                param.grad = step[name].clone()
            one.step()
    assert_identical(values_of(copies[0]), values_of(model))
    assert_identical(copies[1].state_dict(), optimizer.state_dict())
    assert len(copies[1].gate.knowledge.by_param) == len(optimizer.gate.knowledge.by_param) > 0


@every_form
def test_observing_moves_importance_a_little_along_the_same_directions(
    form: dict[str, Any],
) -> None:
    model, protection, optimizer = branches(**form)
    before = copy.deepcopy(optimizer.state_dict())
    kept = {param: known.importance.clone() for param, known in protection.known.items()}
    optimizer.zero_grad()
    torch.manual_seed(1)
    logits = model(known_inputs())
    optimizer.observe(logits)
    logits.logsumexp(1).mean().backward()
    optimizer.step()
    for index, state in optimizer.state_dict()["state"].items():
        was, now = before["state"][index], state["importance"]
        assert now.shape == was["importance"].shape
        assert not torch.equal(now, was["importance"])
        # 0.1 % of it is new
        assert (now >= 0.998 * was["importance"]).all()
        assert torch.allclose(now, was["importance"], rtol=0.5, atol=0.01 * float(now.max()))
        for key in ("left", "right"):
            if key in was:
                assert torch.equal(state[key], was[key])
    for param, importance in kept.items():  # what protect() took stays, for another optimizer
        assert torch.equal(protection.known[param].importance, importance)
    again = branches(**form)
    again[2].load_state_dict(through_file(optimizer.state_dict()))
    assert_identical(again[2].state_dict(), optimizer.state_dict())


def test_consolidating_again_replaces_importance_along_the_same_directions() -> None:
    model, _, optimizer = branches(rank=2)
    shapes = [state["importance"].shape for state in optimizer.state_dict()["state"].values()]
    optimizer.consolidate(model, known_inputs())
    now = optimizer.state_dict()["state"].values()
    assert [state["importance"].shape for state in now] == shapes


# A teacher without a gate -------------------------------------------------------------------------


def taught(
    base: str = "adamw", *, known: Tensor | None = None, every: int = 2, seed: int = 0
) -> AnyRun:
    """Return a new model with a teacher alone, and its optimizer: the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Branches()
    known = known_inputs() if known is None else known
    protection = syngap.protect(model, known, gate=False, anchors=4, every=every, seed=seed)
    plain = MAKE_BASE[base](model.parameters())
    assert protection.optimizer(plain) is plain
    return model, protection, plain


@every_base
def test_resume_of_a_teacher_without_a_gate_is_bitwise(base: str) -> None:
    whole, first, resumed = taught(base), taught(base), taught(base)
    learn(whole, range(7))
    learn(first, range(3))
    resumed[0].load_state_dict(first[0].state_dict())
    resumed[2].load_state_dict(through_file(first[2].state_dict()))
    assert resumed[1].calls == 3
    learn(resumed, range(3, 7))
    assert_identical(values_of(resumed[0]), values_of(whole[0]))
    assert_identical(resumed[2].state_dict(), whole[2].state_dict())
    assert str(resumed[1].report()) == str(whole[1].report())


def test_a_state_of_another_teacher_is_refused() -> None:
    saved = copy.deepcopy(taught()[2].state_dict())
    plain = copy.deepcopy(AdamW(Branches().parameters()).state_dict())
    refused: list[tuple[AnyRun, dict[str, Any], str]] = [
        (taught(known=known_inputs() + 0.1), saved, rf"{OTHERS}.*protection"),
        (taught(every=3), saved, "teacher_every is '2', and here 3"),
        (branches(every=3), saved_by(branches(every=2)), "teacher_every is '2', and here 3"),
        (taught(seed=1), saved, "teacher_seed is '0', and here 1"),
        (branches(seed=1), saved_by(branches()), "teacher_seed is '0', and here 1"),
        (branches(strength=2), saved_by(branches()), "teacher_strength is '1.0', and here 2.0"),
        (branches(), plain, r"without a gate.*before protection\.optimizer\(base\)"),
        (taught(), saved_by(branches(anchors=4, every=2)), r"'rotated'.*\(gate=\)"),
        (branches(), saved, r"without a gate.*before protection\.optimizer\(base\)"),
    ]
    for run, state, message in refused:
        learn(run, range(2))
        before = copy.deepcopy((run[0].state_dict(), run[2].state_dict()))
        with pytest.raises(ValueError, match=message):
            run[2].load_state_dict(state)
        assert_identical((run[0].state_dict(), run[2].state_dict()), before)


@pytest.mark.parametrize("option", ["consolidation", "ambient"])
def test_an_option_that_a_loaded_state_replaces_is_warned_of(option: str) -> None:
    saved = saved_by(branches(**{option: 0.2}))
    run = branches(**{option: 0.3})
    with pytest.warns(UserWarning, match=f"{option} is 0.2 from now on.*given 0.3"):
        run[2].load_state_dict(saved)
    assert run[2].param_groups[0][option] == 0.2


def test_a_state_from_before_every_was_saved_is_loaded() -> None:
    saved = saved_by(branches(every=2))
    for group in saved["param_groups"]:
        del group["teacher_every"], group["teacher_seed"]
    run = branches(every=2)
    run[2].load_state_dict(saved)
    assert run[2].param_groups[0]["teacher_every"] == 2


def test_a_plain_state_is_loaded_with_a_warning_that_the_teacher_is_new() -> None:
    """As those of a teacher alone were before their states said so."""
    first = taught()
    learn(first, range(3))
    saved = through_file(first[2].state_dict())
    for name in RECORD:
        del saved["param_groups"][0][name]
    run = taught()
    learn(run, range(2))
    with pytest.warns(UserWarning, match="an optimizer without a teacher"):
        run[2].load_state_dict(saved)
    assert run[1].calls == 2
    assert_identical(run[2].state_dict()["state"], first[2].state_dict()["state"])
    learn(run, range(2, 4))
    assert run[2].param_groups[0]["drawn"] == 4


@pytest.mark.parametrize("teacher", [False, True])
def test_a_state_says_nothing_of_a_seed_where_each_process_has_its_own(teacher: bool) -> None:
    """As DDP's in one process, or one without a teacher."""
    saved = saved_by(branches(every=2))
    for group in saved["param_groups"]:
        group["teacher_seed"] = None
        group["teacher_every"] = 2 if teacher else None
    run = branches(every=2)
    run[2].load_state_dict(saved)
    learn(run, range(2))


def test_a_state_without_groups_is_refused_by_torch() -> None:
    with pytest.raises(ValueError, match="parameter groups"):
        taught()[2].load_state_dict({"state": {}, "param_groups": []})


def test_a_state_may_be_loaded_before_the_teacher_is_known() -> None:
    first = taught()
    learn(first, range(3))
    model, protection, _ = taught()
    base = MAKE_BASE["adamw"](model.parameters())
    base.load_state_dict(through_file(first[2].state_dict()))
    protection.optimizer(base)
    assert protection.calls == 3


@pytest.mark.parametrize("gate", [True, False])
def test_of_several_optimizers_each_state_has_the_place(gate: bool) -> None:
    """In whichever order they are made and loaded."""

    def make(*, reverse: bool = False) -> tuple[Branches, Protection, dict[str, Optimizer]]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Branches()
        protection = syngap.protect(model, known_inputs(), gate=gate)
        parts = {"one": model.one, "head": model.head}
        names = sorted(parts, reverse=reverse)
        bases = {name: MAKE_BASE["adamw"](parts[name].parameters()) for name in names}
        return model, protection, {name: protection.optimizer(bases[name]) for name in names}

    _, protection, optimizers = make()
    for _ in range(5):
        protection.loss()
    saved = {name: through_file(each.state_dict()) for name, each in optimizers.items()}
    _, protection, optimizers = make(reverse=True)
    for name, each in optimizers.items():
        each.load_state_dict(saved[name])
    assert protection.calls == 5
    protection.loss()
    assert {each.param_groups[0]["drawn"] for each in optimizers.values()} == {6}


def test_two_teachers_of_one_optimizer_count_for_themselves() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Branches()
    base = MAKE_BASE["adamw"](model.parameters())
    first = syngap.protect(model, known_inputs(), gate=False)
    first.optimizer(base)
    first.loss()
    second = syngap.protect(model, known_inputs() + 0.1, gate=False)
    second.optimizer(base)
    for _ in range(2):
        second.loss()
    assert (first.calls, second.calls) == (1, 2)
    first.loss()
    assert (first.calls, second.calls) == (2, 2)


def test_a_teacher_over_an_optimizer_with_a_gate_leaves_its_record() -> None:
    model, _, optimizer = branches()
    before = copy.deepcopy(optimizer.state_dict())
    other = syngap.protect(model, known_inputs() + 0.1, gate=False)
    with pytest.warns(UserWarning, match=r"save protection\.calls"):
        assert other.optimizer(optimizer) is optimizer
    other.loss()
    assert other.calls == 1
    assert_identical(optimizer.state_dict(), before)


def test_another_every_is_refused_also_where_the_state_was_loaded_before() -> None:
    first = taught()
    learn(first, range(3))
    model, protection, _ = taught(every=3)
    base = MAKE_BASE["adamw"](model.parameters())
    base.load_state_dict(through_file(first[2].state_dict()))
    with pytest.raises(ValueError, match="teacher_every is '2', and here 3"):
        protection.optimizer(base)


def test_without_a_teacher_every_is_of_no_importance() -> None:
    saved = saved_by(branches(teacher=False, every=1))
    branches(teacher=False, every=2)[2].load_state_dict(saved)


def test_the_last_optimizer_counts_where_nobody_else_has_it() -> None:
    def train() -> Protection:
        run = branches()
        learn(run, range(3))
        return run[1]

    assert train().report().parts == ("gate", "teacher")


def test_steps_of_an_optimizer_that_is_gone_count_in_the_report() -> None:
    model, protection, optimizer = run = branches()
    learn(run, range(3))
    del run, optimizer
    again = protection.optimizer(SGD(model.parameters(), lr=0.1))
    assert protection.report().parts == ("gate", "teacher")
    assert again.param_groups


@pytest.mark.parametrize("gate", [True, False])
def test_a_protection_goes_with_its_last_reference(gate: bool) -> None:
    """Its start and answers are as large as the model: nobody waits for the garbage collector."""
    run = branches(every=2) if gate else taught()
    learn(run, range(3))
    model, protection, optimizer = run
    del run
    gone = weakref.ref(protection)
    gc.disable()
    try:
        del protection
        assert gone() is None
        learn_without_a_teacher(model, optimizer)
    finally:
        gc.enable()


def learn_without_a_teacher(model: nn.Module, optimizer: Optimizer) -> None:
    for step in random_gradients(model, 20):
        for name, param in model.named_parameters():
            param.grad = step[name]
        optimizer.step()


@every_form
def test_parameters_that_are_added_later_are_protected_as_from_the_start(
    form: dict[str, Any],
) -> None:
    def make(*, later: bool) -> Run:
        model, protection, _ = branches(**form)
        params = [{"params": [*each.parameters()]} for each in (model.one, model.two, model.head)]
        base = AdamW(params[: 1 if later else 3], lr=0.02)
        optimizer = protection.optimizer(base)
        assert isinstance(optimizer, WrappedSynGAP)
        for group in params[1:] if later else []:
            optimizer.add_param_group(group)
        return model, protection, optimizer

    whole, added = make(later=False), make(later=True)
    for run in (whole, added):
        learn(run, range(3))
    assert_identical(values_of(added[0]), values_of(whole[0]))
    other = make(later=False)
    other[2].load_state_dict(through_file(added[2].state_dict()))
    assert_identical(other[2].state_dict(), whole[2].state_dict())


def test_a_protection_is_not_copied() -> None:
    model, protection, _ = branches()
    with pytest.raises(TypeError, match=r"copy the model, and protect\(\) the copy"):
        copy.deepcopy((model, protection))


def test_interpolation_leaves_what_was_added_as_it_is() -> None:
    model = Branches()
    protection = syngap.protect(model, known_inputs())
    start = values_of(model)
    model.second = nn.Linear(6, 2)
    added = model.second.weight.detach().clone()
    with torch.no_grad():
        model.one.weight.add_(1.0)
    protection.interpolate(0.5)
    assert torch.equal(model.second.weight, added)
    assert torch.allclose(model.one.weight, start["one.weight"] + 0.5)
    protection.interpolate(0.0)
    assert torch.equal(model.one.weight, start["one.weight"])


def test_an_optimizer_without_gate_and_teacher_has_no_record() -> None:
    model = Branches()
    protection = syngap.protect(model, known_inputs(), gate=False, teacher=False)
    base = AdamW(model.parameters())
    names = set(base.param_groups[0])
    assert set(protection.optimizer(base).param_groups[0]) == names


# States of other runs -----------------------------------------------------------------------------


def assert_refused(run: Run, saved: dict[str, Any], message: str) -> None:
    learn(run, range(2))
    before = snapshot(run[0], run[2])
    with pytest.raises(ValueError, match=message):
        run[2].load_state_dict(saved)
    assert_identical(snapshot(run[0], run[2]), before)
    learn(run, range(2, 3))


def saved_by(run: Run) -> dict[str, Any]:
    learn(run, range(2))
    return copy.deepcopy(run[2].state_dict())


OTHERS = (
    r"other known inputs .*, another start model or other options.*call protect\(\) with the same"
)


@every_base
def test_a_state_of_the_other_form_is_refused(base: str) -> None:
    rotated, filtered = (branches(base, rank="full", rotate=rotate) for rotate in (True, False))
    assert_refused(filtered, saved_by(rotated), rf"{OTHERS}.*'rotated'.*there it is 'True'")
    assert_refused(rotated, saved_by(filtered), rf"{OTHERS}.*'rotated'.*there it is 'False'")


def test_a_state_of_another_rank_is_refused() -> None:
    saved = saved_by(branches(rank=2, rotate=False))
    assert_refused(branches(rank=3, rotate=False), saved, r"right of shape \(4, 2\).*\(4, 3\)")
    assert_refused(
        branches(rank="full", rotate=False), saved, r"no left .*one.weight.*call protect"
    )
    full = saved_by(branches(rank="full", rotate=False))
    assert_refused(branches(rank=2, rotate=False), full, r"directions left .*one.weight")


def test_a_state_with_other_known_inputs_or_another_start_is_refused() -> None:
    saved = saved_by(branches())
    model = branches()[0]
    protection = syngap.protect(model, known_inputs() + 0.1)
    assert_refused((model, protection, gated(protection, model)), saved, rf"{OTHERS}.*protection")
    model = branches()[0]
    with torch.no_grad():
        model.one.weight.mul_(1.5)
    protection = syngap.protect(model, known_inputs())
    assert_refused((model, protection, gated(protection, model)), saved, rf"{OTHERS}.*protection")


def test_protected_and_plain_states_do_not_mix() -> None:
    run = branches()
    model = branches()[0]
    plain = syngap.SynGAP.wrap(MAKE_BASE["adamw"](model.parameters()))
    assert_refused(
        run, copy.deepcopy(plain.state_dict()), "is not of an optimizer of syngap.protect"
    )
    before = copy.deepcopy(plain.state_dict())
    with pytest.raises(ValueError, match=r"is of an optimizer of syngap.protect.*call protect\(\)"):
        plain.load_state_dict(saved_by(run))
    assert_identical(plain.state_dict(), before)
    # Also where somebody took the group's word away.
    saved = saved_by(run)
    for group in saved["param_groups"]:
        for key in ("protection", "rotated", "drawn"):
            del group[key]
    with pytest.raises(ValueError, match=r"directions left .*entries"):
        plain.load_state_dict(saved)
    assert_identical(plain.state_dict(), before)


@pytest.mark.parametrize("drawn", [-1, 0.5, True, "3", None, 1 << 60])
def test_a_number_of_calls_that_cannot_be_is_refused(drawn: Any) -> None:
    run = branches()
    saved = saved_by(run)
    saved["param_groups"][0]["drawn"] = drawn
    assert_refused(run, saved, r"param_groups\[0\] .*drawn must be a whole number ≥ 0")


def with_entry(value: Tensor, number: float) -> Tensor:
    changed = value.clone()
    changed[-1, -1] = number
    return changed


DAMAGE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nan": (lambda side: with_entry(side, torch.nan), "must be orthonormal"),
    "inf": (lambda side: with_entry(side, torch.inf), "must be orthonormal"),
    "another number": (lambda side: with_entry(side, 0.5), "must be orthonormal"),
    "longer": (lambda side: 1.01 * side, "must be orthonormal"),
    "one twice": (lambda side: torch.cat([side[:, :1], side[:, :-1]], 1), "must be orthonormal"),
    "zeros": (torch.zeros_like, "must be orthonormal"),
    "more rows": (lambda side: torch.cat([side, side[:1]]), "here it is"),
    "a stack": (lambda side: side[None], "here it is"),
    "fewer": (lambda side: side[:, :1], "here it is"),
    "whole numbers": (lambda side: side.long(), "floating-point"),
    "bytes": (lambda side: side.to(torch.float8_e4m3fn), "floating-point"),
    "sparse": (lambda side: side.to_sparse(), "dense"),
    "a text": (lambda side: "many", "must be a tensor"),
    "nothing": (lambda side: None, "must be a tensor"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("rank", ["full", 2])
def test_directions_that_are_none_are_refused(damage: str, rank: Any) -> None:
    change, message = DAMAGE[damage]
    run = branches(rank=rank, rotate=False)
    saved = saved_by(run)
    saved["state"][0]["right"] = change(saved["state"][0]["right"])
    assert_refused(run, saved, rf"right .*\(one.weight\).*{message}")


@pytest.mark.parametrize("key", ["left", "right", "importance"])
def test_a_state_that_lost_a_part_is_refused(key: str) -> None:
    run = branches(rank="full")
    saved = saved_by(run)
    del saved["state"][0][key]
    assert_refused(run, saved, f"{key}.*one.weight")
    saved = saved_by(run)
    del saved["state"][1]  # of a bias, whose coordinates are entries
    assert_refused(run, saved, "no importance.*one.bias")


def test_an_importance_in_other_coordinates_is_refused() -> None:
    run = branches(rank=2, rotate=False)
    saved = saved_by(run)
    saved["state"][0]["importance"] = torch.ones(6, 4)
    assert_refused(run, saved, r"importance of shape \(6, 4\).*must be \(6, 2\)")


def test_rounding_of_directions_is_not_refused() -> None:
    """The largest in use, in each type they may be in."""
    generator = torch.Generator().manual_seed(0)
    square = torch.linalg.qr(torch.randn(700, 700, generator=generator, dtype=torch.float64)).Q
    for dtype, tolerance in direction_checks._TOLERANCE.items():
        for count in (700, 60):
            error = direction_checks._distance_from_orthonormal(square[:, :count].to(dtype))
            assert error < 0.7 * tolerance


def test_the_mean_of_all_directions_stays_where_the_basis_leaves_some_out() -> None:
    run = branches(rank=1, rotate=False)
    state = run[2].state[run[0].one.weight]
    share = float(state["importance"].sum() / run[0].one.weight.numel() / state["mean"])
    assert share < 0.9  # or this would show nothing
    again = branches(rank=1, rotate=False)
    again[2].load_state_dict(through_file(run[2].state_dict()))
    assert torch.equal(again[2].state[again[0].one.weight]["mean"], state["mean"])


# Growing ------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "rows": ((3, 4), (5, 4)),
    "columns": ((3, 4), (3, 6)),
    "both": ((3, 4), (4, 7)),
    "neither": ((3, 4), (3, 4)),
    "filters": ((3, 2, 2, 2), (5, 3, 2, 2)),
    "places": ((3, 2, 2, 2), (3, 2, 3, 3)),
    "series": ((3, 2, 2), (4, 3, 4)),
    "stack": ((2, 3, 4), (4, 3, 4)),
    "stack and rows": ((2, 3, 4), (3, 5, 6)),
}


def orthonormal(*shape: int, count: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*shape, shape[-1], dtype=torch.float64)).Q[..., :count]


def padded(value: Tensor, like: Tensor) -> Tensor:
    larger = torch.zeros_like(like)
    larger[tuple(slice(size) for size in value.shape)] = value
    return larger


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("counts", [(9, 9), (None, 9), (9, None), (None, 2), (2, None), (2, 2)])
def test_a_larger_weight_moves_as_the_smaller_did(
    kind: str, counts: tuple[int | None, int | None]
) -> None:
    """An update of the old entries is filtered as before, and one of new entries not at all."""
    torch.manual_seed(0)
    before, after = SHAPES[kind]
    old, new = (torch.zeros(shape, dtype=torch.float64) for shape in (before, after))
    stack = before[:1] if "stack" in kind else ()
    matrix = before[1:] if stack else (before[0], old[0].numel())
    sides = [
        None if count is None else orthonormal(*stack, size, count=min(count, size))
        for count, size in zip(counts, matrix, strict=True)
    ]
    basis = Basis(*sides)
    importance = torch.rand(basis.shape(old), dtype=torch.float64)
    names = ("left", "right")
    state = {name: side for name, side in zip(names, sides, strict=True) if side is not None}
    state |= {"importance": importance, "mean": importance.sum() / old.numel()}
    larger = grown(state, old, new)
    found = basis_in(larger)
    assert found is not None
    assert found.is_complete == basis.is_complete
    assert tuple(larger["importance"].shape) == found.shape(new)
    assert torch.isclose(larger["importance"].sum(), importance.sum())
    assert torch.isclose(larger["mean"] * new.numel(), state["mean"] * old.numel())
    for side in (found.left, found.right):
        if side is not None:
            eye = torch.eye(side.shape[-1], dtype=side.dtype).expand(*side.shape[:-2], -1, -1)
            assert torch.allclose(side.mT @ side, eye)

    update = torch.randn_like(old)
    filtered = found.filter(padded(update, new), 1.0 - larger["importance"])
    assert torch.allclose(filtered, padded(basis.filter(update, 1.0 - importance), new))
    added = torch.randn_like(new)
    added[tuple(slice(size) for size in before)] = 0.0
    if stack:  # rows of an old matrix share directions with its new ones where one side has few
        added[: before[0]] = 0.0
    if stack or kind == "rows" or counts == (9, 9):
        assert torch.allclose(found.filter(added, 1.0 - larger["importance"]), added)

    if basis.is_complete:  # in the rotated form momentum is in these coordinates too
        momentum = torch.randn_like(old)
        there = basis.into(momentum).reshape(old.shape)
        base = grown({"exp_avg": there, "step": torch.tensor(3.0)}, old, new, basis)
        assert base["exp_avg"].shape == new.shape
        assert torch.allclose(
            found.back(base["exp_avg"].view(found.shape(new)), new), padded(momentum, new)
        )


def grow_head(run: Run, classes: int = 5) -> None:
    model, protection, _ = run
    old = model.head
    with torch.random.fork_rng():
        torch.manual_seed(9)
        new = nn.Linear(6, classes)
    with torch.no_grad():
        new.weight[: old.out_features] = old.weight
        new.bias[: old.out_features] = old.bias
    model.head = new
    protection.grow(old.weight, new.weight)
    protection.grow(old.bias, new.bias)


@every_form
@every_base
def test_a_head_that_grew_is_protected_as_before_and_its_new_rows_learn(
    base: str, form: dict[str, Any]
) -> None:
    model, protection, optimizer = run = branches(base, **form)
    learn(run, range(2))
    before = protection.report()
    grow_head(run)
    after = protection.report()
    # The probabilities of former classes, given that it is one of them, are what they were.
    assert after.kl == pytest.approx(before.kl, abs=1e-6)
    assert after.loss_now == pytest.approx(before.loss_now, abs=1e-6)
    assert after.agreement == before.agreement
    assert {one.how for one in after.coverage} == {"directions", "entries"}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert [id(param) for param in held] == [id(param) for param in model.parameters()]
    start = values_of(model)
    learn(run, range(2, 5))
    for name, param in model.named_parameters():
        assert param.isfinite().all()
        if name.startswith("head"):
            assert (param[3:] != start[name][3:]).all()
    assert float(protection.loss().detach()) >= 0

    resumed = branches(base, **form)
    learn(resumed, range(2))
    grow_head(resumed)
    resumed[0].load_state_dict(model.state_dict())
    resumed[2].load_state_dict(through_file(optimizer.state_dict()))
    for each in (run, resumed):
        learn(each, range(5, 8))
    assert_identical(values_of(resumed[0]), values_of(model))
    assert_identical(resumed[2].state_dict(), optimizer.state_dict())


def test_new_classes_start_where_they_were_put() -> None:
    run = branches()
    start = values_of(run[0])
    learn(run, range(2))
    grow_head(run)
    put = run[0].head.weight[3:].detach().clone()
    learn(run, range(2, 4))
    run[1].interpolate(0.0)
    assert torch.equal(run[0].head.weight[3:], put)
    assert torch.equal(run[0].head.weight[:3], start["head.weight"])
    assert torch.equal(run[0].one.weight, start["one.weight"])
    assert run[1].report().moved == 0


def test_the_report_says_what_new_classes_took_away() -> None:
    run = branches()
    assert run[1].report().agreement_with_new is None
    assert "among" not in str(run[1].report())
    grow_head(run)
    with torch.no_grad():
        run[0].head.bias[4] += 100.0  # a new class is likelier than all old ones
    report = run[1].report()
    assert (report.agreement, report.agreement_with_new) == (1.0, 0.0)
    assert "same first answer 100.0% among former classes and 0.0% among all" in str(report)


def test_a_hidden_layer_that_grew_has_no_new_classes() -> None:
    model, protection, _ = branches()
    old, new = model.one, nn.Linear(4, 6)
    with torch.no_grad():
        new.weight.copy_(old.weight)
        new.bias.copy_(old.bias)
    model.one = new
    protection.grow(old.weight, new.weight)
    protection.grow(old.bias, new.bias)
    assert protection.report().agreement_with_new is None


def test_growing_before_there_is_an_optimizer_is_growing_after() -> None:
    first, second = branches(), branches()
    model = second[0]
    protection = syngap.protect(model, known_inputs())
    grow_head((model, protection, second[2]))
    later = gated(protection, model)
    grow_head(first)
    assert_identical(later.state_dict()["state"], first[2].state_dict()["state"])


@pytest.mark.parametrize("classes", [1500, 1024])
def test_the_teacher_of_many_classes_leaves_new_ones_out(classes: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, classes))
        larger = nn.Linear(8, classes + 9)
    protection = syngap.protect(model, known_inputs(), gate=False)
    with torch.no_grad():
        larger.weight[:classes], larger.bias[:classes] = model[2].weight, model[2].bias
        larger.bias[classes:] = 8.0  # likelier than all others together
    old, model[2] = model[2], larger
    with pytest.raises(ValueError, match=rf"\(8, {classes + 9}\).*before .*\(8, {classes}\).*grow"):
        protection.loss()
    protection.grow(old.weight, larger.weight)
    protection.grow(old.bias, larger.bias)
    assert abs(float(protection.loss().detach())) < 1e-5
    assert protection.report().agreement == 1.0


def test_a_categorical_that_grew_is_compared_on_former_classes() -> None:
    model = branches()[0]
    predict = lambda x: torch.distributions.Categorical(logits=model(x))  # noqa: E731
    protection = syngap.protect(model, known_inputs(), predict=predict)
    run = (model, protection, gated(protection, model, "sgd"))
    grow_head(run)
    assert abs(float(protection.loss().detach())) < 1e-6


def test_a_growth_that_does_not_fit_changes_nothing() -> None:
    model, protection, optimizer = run = branches()
    learn(run, range(2))
    old, new = model.head, nn.Linear(6, 5)
    before = snapshot(model, optimizer)
    faults: list[tuple[Any, Any, type[Exception], str]] = [
        (old, new, TypeError, "takes two parameters"),
        (old.weight, new.weight, ValueError, "not a parameter of the model"),
        (new.weight, old.weight, ValueError, "at least as large"),
        (old.weight, old.weight, ValueError, "is not what the model had"),
        (old.bias, model.one.bias, ValueError, "is not what the model had"),
    ]
    for one, other, error, message in faults:
        with pytest.raises(error, match=message):
            protection.grow(one, other)
        assert_identical(snapshot(model, optimizer), before)
    grow_head(run)
    with pytest.raises(ValueError, match="is not what the model had"):
        protection.grow(old.weight, model.head.weight)


def test_a_second_optimizer_takes_over_the_count_of_calls() -> None:
    run = branches()
    learn(run, range(3))
    assert gated(run[1], run[0]).param_groups[0]["drawn"] == 3


def test_adam_and_groups_of_several_rates_load() -> None:
    def make() -> Run:
        model, protection, _ = branches()
        params = list(model.parameters())
        base = Adam([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}], lr=0.01)
        optimizer = protection.optimizer(base)
        assert isinstance(optimizer, WrappedSynGAP)
        return model, protection, optimizer

    first, second = make(), make()
    learn(first, range(3))
    second[0].load_state_dict(first[0].state_dict())
    second[2].load_state_dict(through_file(first[2].state_dict()))
    for run in (first, second):
        learn(run, range(3, 5))
    assert_identical(values_of(first[0]), values_of(second[0]))


# As on a GPU --------------------------------------------------------------------------------------


@every_form
def test_a_compact_state_along_directions_goes_on_bitwise(form: dict[str, Any]) -> None:
    """On a GPU importance is in bfloat16, with one place of rounding for all."""

    def make() -> Run:
        model, protection, plain = branches(**form)
        names = ("retention", "consolidation", "damping", "ambient", "scope", "bounded")
        names += ("rotated", "protection", "drawn")
        options = {name: plain.param_groups[0][name] for name in names}
        estimator = Estimator("sampled", None, model, "auto")
        base = MAKE_BASE["adamw"](model.parameters())
        optimizer = WrappedSynGAP(base, estimator, Schedule(1, 0), True, "raise", options)
        gate_changes.adopt(optimizer.gate, protection.knowledge)
        return model, protection, optimizer

    def observe(run: Run, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            run[2].zero_grad()
            logits = run[0](torch.randn(8, 4))
            run[2].observe(logits)
            logits.logsumexp(1).mean().backward()
            run[2].step()

    whole, first, resumed = make(), make(), make()
    observe(whole, range(5))
    observe(first, range(3))
    saved = through_file(first[2].state_dict())
    assert saved["state"][0]["importance"].dtype == torch.bfloat16
    places = [state["turn"].data_ptr() for state in saved["state"].values()]
    assert len(set(places)) == len(places)
    resumed[0].load_state_dict(first[0].state_dict())
    resumed[2].load_state_dict(saved)
    observe(resumed, range(3, 5))
    assert_identical(values_of(resumed[0]), values_of(whole[0]))
    assert_identical(resumed[2].state_dict(), whole[2].state_dict())


class Filters(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, size, padding=size // 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.conv(x)).mean((2, 3)))
        return out


@pytest.mark.parametrize("how", ["grow", "inherit"])
def test_momentum_along_directions_stays_that_of_the_old_places(how: str) -> None:
    torch.manual_seed(0)
    model = Filters(1)
    protection = syngap.protect(model, torch.randn(40, 2, 5, 5), rank="full", rotate=True)
    run = (model, protection, gated(protection, model))
    learn(run, range(2))
    optimizer, old, new = run[2], model.conv.weight, nn.Parameter(torch.zeros(3, 2, 3, 3))
    with torch.no_grad():
        new[..., :1, :1] = old
    before = basis_in(optimizer.state[old])
    assert before is not None
    moving = before.back(optimizer.base.state[old]["exp_avg"], old)
    model.conv.weight = new
    if how == "grow":
        protection.grow(old, new)
    else:
        known = optimizer.snapshot()
        group = optimizer.param_groups[0]["params"]
        group[next(place for place, param in enumerate(group) if param is old)] = new
        optimizer.inherit(known, [(old, new)])
    after = basis_in(optimizer.state[new])
    assert after is not None
    found = after.back(optimizer.base.state[new]["exp_avg"], new)
    assert torch.allclose(found, padded(moving, found), atol=1e-6)
    assert float(moving.abs().max()) > 1e-3
    learn(run, range(2, 4))
    assert new.isfinite().all()


def _swap(known: Tensor) -> Tensor:
    changed = known.clone()
    changed[[0, -1]] = changed[[-1, 0]]
    return changed


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": torch.neg,
    "features in another order": lambda known: known.flip(1),
    "rows in another order": lambda known: known.flip(0),
    "two rows exchanged": _swap,
    "one number changed": lambda known: known.index_fill(0, torch.tensor([7]), 0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("of", ["inputs", "weights"])
def test_a_state_is_refused_with_any_other_known_inputs_or_start(
    of: str, change: Callable[[Tensor], Tensor]
) -> None:
    def make(of: str | None = None) -> WrappedSynGAP:
        torch.manual_seed(0)
        model, known = nn.Linear(6, 8), torch.randn(64, 6)
        with torch.no_grad():
            if of == "weights":
                model.weight.copy_(change(model.weight))
            known = change(known) if of == "inputs" else known
        return syngap.protect(model, known).optimizer(AdamW(model.parameters()))

    optimizer = make()
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    make().load_state_dict(state)
    with pytest.raises(ValueError, match=r"other known inputs .*, another start"):
        make(of).load_state_dict(state)


LOOP = """
import os, signal, sys, torch, syngap
from pathlib import Path
folder, how = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
protection = syngap.protect(model, torch.randn(32, 4), anchors=4)
optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
first = 0
if how == "resume":
    saved = torch.load(folder / "saved.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 9):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss = protection.loss() + model(x).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 3:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states | {"step": step + 1}, folder / "saved.pt")
    if step == 5 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
protection.interpolate(0.9)
torch.save((model.state_dict(), str(protection.report())), folder / "end.pt")
"""


def test_a_killed_loop_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """From what was saved before, in a new process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def run(folder: str, how: str) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, "-c", LOOP, str(tmp_path / folder), how]
        return subprocess.run(command, env=environment, check=False).returncode

    assert run("whole", "through") == 0
    assert run("killed", "kill") == -signal.SIGKILL
    assert not (tmp_path / "killed" / "end.pt").exists()
    assert run("killed", "resume") == 0
    whole, killed = (torch.load(tmp_path / folder / "end.pt") for folder in ("whole", "killed"))
    assert_identical(killed, whole)
