"""Importance along directions that follow a stream: `SynGAP(params, directions=True)`."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from directions_oracle import DirectionsOracle, drawn_labels
from helpers import assert_identical
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap import SynGAP
from syngap.optim import Directions, basis
from syngap.optim import directions as directions_module
from syngap.optim.basis import Basis, filter_along
from syngap.optim.directions import (
    by_cholesky,
    check_group,
    first_state,
    follow_scores,
    orthonormal,
    refresh,
)

GATE = {"lr": 0.1, "retention": 0.9, "consolidation": 0.5}


class Tied(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(self.embedding(x)).tanh()
        return inner @ self.embedding.weight.T


def numbers(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(6, *shape, generator=generator, dtype=torch.float64)


def tokens(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(4, (6, *shape), generator=generator)


# Networks with their inputs. A bias is in all of them but the last.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)),
        numbers(4),
    ),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        numbers(2, 3, 3),
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)),
        numbers(1, 4),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 3)),
        tokens(2),
    ),
    "tied": (Tied, tokens()),
    "equal shapes": (
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)
        ),
        numbers(4),
    ),
    "no bias": (lambda: nn.Linear(4, 3, bias=False), numbers(4)),
}


def made(case: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CASES[case][0]().double()


def batch(case: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = CASES[case][1](generator)
    return x, torch.randint(3, (6,), generator=generator)


def train(
    model: nn.Module, optimizer: SynGAP, case: str, steps: range, observations: int = 1
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for part in range(observations):
            x, y = batch(case, 100 * part + step)
            logits = model(x[: 6 - part])
            optimizer.observe(logits)
            loss = loss + cross_entropy(logits, y[: 6 - part])
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("own", "largest", "observations"),
    [
        ({}, 2048, 1),
        ({"foreach": True}, 2048, 1),
        ({"momentum": 0.5}, 2048, 1),
        ({}, 4, 1),  # of most weights here one side, of some none, has directions
        ({}, 2048, 2),
    ],
    ids=["plain", "foreach", "momentum", "largest", "twice"],
)
def test_steps_are_those_of_the_rule_in_plain_loops(
    case: str, own: dict[str, Any], largest: int, observations: int
) -> None:
    slow = made(case)
    fast = copy.deepcopy(slow)
    labels = [torch.Generator().manual_seed(7) for _ in range(2)]
    momentum = own.get("momentum", 0.0)
    rule = DirectionsOracle(slow, refresh=2, largest=largest, momentum=momentum, **GATE)
    optimizer = SynGAP(
        fast.parameters(),
        directions=Directions(refresh=2, largest=largest),
        generator=labels[1],
        **GATE,
        **own,
    )
    for step in range(6):
        batches = []
        loss = torch.zeros((), dtype=torch.float64)
        for part in range(observations):
            x, y = batch(case, 100 * part + step)
            logits = slow(x[: 6 - part])
            batches.append((logits, drawn_labels(logits, labels[0])))
            loss = loss + cross_entropy(logits, y[: 6 - part])
        rule.step(batches, loss)
        train(fast, optimizer, case, range(step, step + 1), observations)
        for param, expected in zip(fast.parameters(), slow.parameters(), strict=True):
            torch.testing.assert_close(param, expected, rtol=1e-10, atol=1e-10)
    found = optimizer.importance()
    assert isinstance(found, list)
    for importance, expected_f in zip(found, rule.importance(), strict=True):
        torch.testing.assert_close(
            importance.reshape(expected_f.shape), expected_f, rtol=1e-8, atol=1e-12
        )


@pytest.mark.parametrize("largest", [2048, 4])
@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_multiplied_together_follow_the_rule(
    case: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where those of equal shape are."""
    monkeypatch.setattr(basis, "is_stacked", lambda weight: True)
    test_steps_are_those_of_the_rule_in_plain_loops(case, {"foreach": True}, largest, 1)


def test_an_update_through_a_stack_is_that_of_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where weights lie in memory as channels last, and where only one has directions."""
    monkeypatch.setattr(basis, "is_stacked", lambda weight: True)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    updates = [drawn(3, 2, 2, 2) for _ in range(3)] + [drawn(5, 4), drawn(3), drawn(5, 4)]
    updates[1] = updates[1].contiguous(memory_format=torch.channels_last)
    before = [update.clone() for update in updates]
    sides = [Basis(orthonormal(drawn(3, 3)), orthonormal(drawn(8, 8))) for _ in range(3)]
    bases = [*sides, Basis(None, orthonormal(drawn(4, 4))), None, None]
    masks = [
        torch.rand(update.flatten(1).shape if basis else update.shape).double()
        for update, basis in zip(updates, bases, strict=True)
    ]
    found = filter_along(updates, masks, bases)
    for each, update, mask, own, old in zip(found, updates, masks, bases, before, strict=True):
        torch.testing.assert_close(each, update * mask if own is None else own.filter(update, mask))
        assert_identical(update, old)


@pytest.mark.parametrize("shape", [(4, 6), (0, 4)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
def test_a_stack_gives_each_update_back_in_its_type(
    shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of weights without numbers, and of equal ones that have directions of other sides."""
    monkeypatch.setattr(basis, "is_stacked", lambda weight: True)
    updates = [torch.randn(shape).to(dtypes[0]) for _ in range(4)]
    left, right = (torch.eye(size).to(dtypes[1]) for size in shape)
    bases = [Basis(left, right), Basis(left, right), Basis(None, right), Basis(left, None)]
    masks = [torch.full(shape, 0.5) for _ in updates]
    for found, update in zip(filter_along(updates, masks, bases), updates, strict=True):
        torch.testing.assert_close(found, update / 2, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("stacked", [False, True])
def test_updates_through_directions_compile_into_one_graph(
    stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(basis, "is_stacked", lambda weight: stacked)
    updates = [torch.randn(4, 3) for _ in range(3)]
    bases = [Basis(torch.eye(4), torch.eye(3)), None, Basis(torch.eye(4), torch.eye(3))]
    masks = [torch.rand(4, 3) for _ in updates]
    compiled = torch.compile(filter_along, fullgraph=True, backend="eager")
    expected = filter_along(updates, masks, bases)
    for found, one in zip(compiled(updates, masks, bases), expected, strict=True):
        torch.testing.assert_close(found, one)


@pytest.mark.parametrize("case", CASES)
def test_before_the_first_refresh_steps_are_those_of_entries(case: str) -> None:
    models = [made(case) for _ in range(2)]
    for model, directions in zip(models, (False, Directions(refresh=1000)), strict=True):
        labels = torch.Generator().manual_seed(7)
        optimizer = SynGAP(model.parameters(), directions=directions, generator=labels, **GATE)
        train(model, optimizer, case, range(10))
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_under_autocast_moments_and_importance_are_in_full_precision() -> None:
    """The traces of both moments are the sum of importance: in bfloat16 some 0.3 % off."""
    model = made("linear").float()
    optimizer = SynGAP(model.parameters(), directions=Directions(refresh=2), **GATE)
    for step in range(5):
        x, y = batch("linear", step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x.float())
            optimizer.observe(logits)
            loss = cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
    weights = [state for state in optimizer.state.values() if "left" in state]
    assert len(weights) == 2
    for state in weights:
        total = state["importance"].sum()
        assert total > 0
        for name in ("left_moment", "right_moment"):
            torch.testing.assert_close(state[name].trace(), total, rtol=1e-5, atol=0)


def random_state(seed: int, shape: tuple[int, int], largest: int = 2048) -> dict[str, Any]:
    """What is kept of a weight after some scores, at directions of other scores."""
    generator = torch.Generator().manual_seed(seed)
    state = first_state(torch.zeros(shape, dtype=torch.float64), Directions(largest=largest))
    for _ in range(2):
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        g *= torch.logspace(0, -2, shape[1], dtype=torch.float64)
        follow_scores(state, {"left_moment": g @ g.T, "right_moment": g.T @ g}, 0.5)
        refresh(state)
    state["importance"] = torch.rand(shape, generator=generator, dtype=torch.float64)
    return state


def test_a_refresh_changes_tensors_where_they_are() -> None:
    """A CUDA graph reads them there."""
    state = random_state(0, (3, 7))
    before = {name: (value.data_ptr(), value.clone()) for name, value in state.items()}
    refresh(state)
    for name in ("left", "right", "importance"):
        address, value = before[name]
        assert state[name].data_ptr() == address
        assert not torch.equal(state[name], value)


def test_a_replayed_step_that_should_have_refreshed_directions_is_refused() -> None:
    model = made("linear")
    optimizer = SynGAP(model.parameters(), lr=0.1, directions=Directions(refresh=3))
    for _ in range(2):
        assert not optimizer.refreshes_directions()
        optimizer.count()
    assert optimizer.refreshes_directions()
    with pytest.raises(RuntimeError, match="should have refreshed directions"):
        optimizer.count()


@pytest.mark.parametrize("largest", [2048, 5])
@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5), (1, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_a_refresh_keeps_the_total_importance(
    seed: int, shape: tuple[int, int], largest: int
) -> None:
    state = random_state(seed, shape, largest)
    before = state["importance"].clone()
    generator = torch.Generator().manual_seed(seed + 100)
    g = torch.randn(shape, generator=generator, dtype=torch.float64)
    follow_scores(state, {"left_moment": g @ g.T, "right_moment": g.T @ g}, 0.5)
    refresh(state)
    torch.testing.assert_close(state["importance"].sum(), before.sum(), rtol=1e-12, atol=0)
    assert state["importance"].min() >= 0
    assert shape == (1, 4) or (state["importance"] - before).abs().max() > 1e-3  # it was refreshed
    for name in ("left", "right"):
        if name in state:
            side = state[name]
            torch.testing.assert_close(side.T @ side, torch.eye(len(side)).double())


def test_refreshes_bring_directions_to_the_eigenvectors() -> None:
    state = random_state(0, (4, 6))
    moment = state["right_moment"]
    for _ in range(300):
        refresh(state)
    found = state["right"].T @ moment @ state["right"]
    expected = torch.linalg.eigvalsh(moment).flip(0)
    torch.testing.assert_close(found, torch.diag(expected), rtol=1e-3, atol=1e-3)


def columns_of_condition(condition: float, size: int = 60) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, size, size, generator=generator, dtype=torch.float64)
    left, right = torch.linalg.qr(rows).Q
    sizes = torch.logspace(0, -math.log10(condition), size, dtype=torch.float64)
    return (left * sizes) @ right


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_directions_by_cholesky_are_those_of_a_qr_decomposition(condition: float) -> None:
    """A million is what a refresh may meet: eigenvalues of up to 2,048 means and of 0.001."""
    columns = columns_of_condition(condition).float()
    found, expected = by_cholesky(columns), torch.linalg.qr(columns.double()).Q.float()
    assert found is not None
    signs = (found * expected).sum(0).sign()
    torch.testing.assert_close(found, expected * signs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_directions_by_cholesky_are_orthonormal_or_none(dtype: torch.dtype, off: float) -> None:
    """Whatever the condition: below 1e7 in float32 there are some, above 1e8 there are none."""
    found = {10**k: by_cholesky(columns_of_condition(10.0**k).to(dtype)) for k in range(11)}
    found[0] = by_cholesky(torch.zeros(3, 3, dtype=dtype))
    for side in found.values():
        if side is not None:
            assert (side.mT @ side - torch.eye(len(side), dtype=dtype)).abs().max() < off
    assert found[0] is None
    assert found[10**10] is None
    assert found[10] is not None


class OnGPU(Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("fails", [True, False])
def test_where_cholesky_gives_none_a_qr_decomposition_is_taken(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = None if fails else torch.eye(4)
    monkeypatch.setattr(directions_module, "by_cholesky", lambda columns: answer)
    columns = torch.randn(4, 4)
    assert orthonormal(columns) is not answer, "on a CPU nothing but QR is asked"
    found = orthonormal(columns.as_subclass(OnGPU)).as_subclass(Tensor)
    torch.testing.assert_close(found, torch.linalg.qr(columns).Q if fails else torch.eye(4))


def test_importance_that_is_not_observed_stays_along_its_directions() -> None:
    """Directions of a weight without scores have no reason to move."""
    state = random_state(1, (4, 6))
    before = copy.deepcopy(state)
    for name in ("left_moment", "right_moment"):
        state[name].zero_()
    refresh(state)
    torch.testing.assert_close(state["importance"], before["importance"])


def resumed(state_dict: dict[str, Any], how: str) -> dict[str, Any]:
    """Return a state that went through a file."""
    file = io.BytesIO()
    if how == "torch":
        torch.save(state_dict, file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file)
        return loaded
    tensors = {
        f"{index}.{key}": value
        for index, state in state_dict["state"].items()
        for key, value in state.items()
    }
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in load(save(tensors)).items():
        index, _, key = name.partition(".")
        states.setdefault(int(index), {})[key] = value
    return {"state": states, "param_groups": copy.deepcopy(state_dict["param_groups"])}


@pytest.mark.parametrize("how", ["torch", "safetensors"])
@pytest.mark.parametrize("case", ["linear", "conv2d", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_run_resumes_bit_for_bit(case: str, dtype: torch.dtype, how: str) -> None:
    def run(steps: range, begun: tuple[Any, Any, Tensor] | None = None) -> tuple[Any, Any, Tensor]:
        model = made(case).to(dtype)
        labels = torch.Generator().manual_seed(7)
        optimizer = SynGAP(
            model.parameters(),
            directions=Directions(refresh=3),
            every=2,
            warmup=4,
            generator=labels,
            **GATE,
        )
        if begun is not None:
            model.load_state_dict(begun[0])
            optimizer.load_state_dict(resumed(begun[1], how))
            labels.set_state(begun[2])
        for step in steps:
            x, y = batch(case, step)
            logits = model(x.to(dtype) if x.is_floating_point() else x)
            optimizer.zero_grad()
            optimizer.observe(logits)
            cross_entropy(logits, y).backward()
            optimizer.step()
        return model.state_dict(), optimizer.state_dict(), labels.get_state()

    whole = run(range(25))
    half = run(range(13))
    assert not torch.equal(half[1]["state"][0]["right"], whole[1]["state"][0]["right"])
    assert_identical(run(range(13, 25), half), whole)


# What does not go together ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"directions": 1}, "True, False or a Directions"),
        ({"estimator": "exact"}, "estimator='sampled'"),
        ({"compact": True}, "compact=True excludes directions"),
        ({"directions": Directions(largest=2)}, r"Directions\(largest="),
    ],
)
def test_what_excludes_directions_is_refused_at_construction(
    options: dict[str, Any], says: str
) -> None:
    model = made("linear")
    with pytest.raises(ValueError, match=says):
        SynGAP(model.parameters(), lr=0.1, model=model, **{"directions": True, **options})


def test_what_excludes_directions_is_refused_in_groups_and_states() -> None:
    model = made("linear")
    with pytest.raises(ValueError, match="fused=True excludes directions"):
        check_group({"fused": True}, Directions())  # SynGAP asks for Triton first
    optimizer = SynGAP(model.parameters(), lr=0.1, directions=True)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["fused"] = True
    with pytest.raises(ValueError, match=r"fused=True"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", ["refresh", "largest"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10"])
def test_options_of_directions_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        Directions(**{name: value})


def test_parameters_of_one_dimension_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="two or more dimensions"):
        SynGAP([nn.Parameter(torch.zeros(5))], lr=0.1, directions=True)


def test_a_group_of_biases_beside_one_of_weights_is_not() -> None:
    model = made("linear")
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = SynGAP([{"params": biases}, {"params": weights}], lr=0.1, directions=True)
    train(model, optimizer, "linear", range(2))
    assert "left" in optimizer.state[weights[0]]
    assert "left" not in optimizer.state[biases[0]]


def test_consolidate_is_refused_and_names_what_does_it() -> None:
    model = made("linear")
    optimizer = SynGAP(model.parameters(), lr=0.1, directions=True)
    with pytest.raises(RuntimeError, match=r"syngap.protect\(model, inputs\)"):
        optimizer.consolidate(model, torch.randn(8, 4).double())


# States -------------------------------------------------------------------------------------------


def trained(**options: Any) -> SynGAP:
    model = made("linear")
    optimizer = SynGAP(model.parameters(), **GATE, **options)
    train(model, optimizer, "linear", range(3))
    return optimizer


@pytest.mark.parametrize(
    ("saved", "own", "says"),
    [
        (True, False, r"it is of SynGAP\(\.\.\., directions=True\), and this optimizer is not"),
        (False, True, "no left .* and this optimizer has left and left_moment"),
        (True, Directions(largest=4), "left and left_moment .* and this optimizer has no left"),
    ],
)
def test_a_state_of_other_directions_is_refused(saved: Any, own: Any, says: str) -> None:
    state = trained(directions=saved).state_dict()
    other = trained(directions=own)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=says):
        other.load_state_dict(state)
    assert_identical(other.state_dict(), before)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_state_of_a_run_that_took_no_step_loads(fresh: bool) -> None:
    other = SynGAP(made("linear").parameters(), directions=True, **GATE)
    optimizer = (
        SynGAP(made("linear").parameters(), directions=True, **GATE)
        if fresh
        else trained(directions=True)
    )
    optimizer.load_state_dict(other.state_dict())
    assert_identical(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("key", "change", "says"),
    [
        ("left", lambda side: side * 1.01, "orthonormal"),
        ("right", lambda side: side * torch.nan, "orthonormal"),
        ("left", lambda side: side[:, :-1], "of shape"),
        ("right", lambda side: 3.0, "must be a tensor"),
        ("left_moment", lambda moment: moment * torch.nan, "symmetric and finite"),
        ("left_moment", lambda moment: -moment, "symmetric and finite"),
        ("left_moment", lambda moment: moment - moment.diagonal().min() * 2 * torch.eye(5), "sym"),
        ("right_moment", lambda moment: moment.triu(), "symmetric and finite"),
        ("right_moment", lambda moment: moment[:-1], "of shape"),
        ("right_moment", lambda moment: moment.long(), "floating-point"),
        ("left_moment", None, "has left for a parameter"),
        ("right", None, "has right_moment for a parameter"),
        ("importance", None, "no importance"),
        ("importance", lambda importance: importance.T, "of shape"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    key: str, change: Callable[[Tensor], Any] | None, says: str
) -> None:
    optimizer = trained(directions=Directions(refresh=1))
    before = copy.deepcopy(optimizer.state_dict())
    damaged = copy.deepcopy(before)
    if change is None:
        del damaged["state"][0][key]
    else:
        damaged["state"][0][key] = change(damaged["state"][0][key])
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(damaged)
    assert_identical(optimizer.state_dict(), before)


@pytest.mark.parametrize("case", ["linear", "conv2d"])
def test_a_parameter_that_grows_keeps_its_directions_and_moments(case: str) -> None:
    model = made(case)
    optimizer = SynGAP(model.parameters(), directions=Directions(refresh=1), **GATE)
    train(model, optimizer, case, range(3))
    assert isinstance(model, nn.Sequential)
    old = model[-1]
    assert isinstance(old, nn.Linear)
    new = nn.Linear(old.in_features, 5).double()
    before = dict(optimizer.state[old.weight])
    model[-1] = new
    optimizer.grow(old.weight, new.weight)
    optimizer.grow(old.bias, new.bias)
    state = optimizer.state[new.weight]
    assert torch.equal(state["right"], before["right"])
    assert torch.equal(state["right_moment"], before["right_moment"])
    assert torch.equal(state["left"][:3, :3], before["left"])
    assert torch.equal(state["left"][3:, 3:], torch.eye(2).double())
    assert torch.equal(state["left_moment"][:3, :3], before["left_moment"])
    assert state["left_moment"][3:].abs().sum() == 0
    assert torch.equal(state["importance"][:3], before["importance"])
    assert state["importance"][3:].abs().sum() == 0
    train(model, optimizer, case, range(3, 6))  # and learns on, with five classes
    assert state["left_moment"][3:].abs().sum() > 0


@pytest.mark.parametrize("apart", [1, 2, 5])
def test_directions_are_refreshed_at_each_kth_observation_however_far_apart(apart: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    optimizer = SynGAP(layer.parameters(), lr=0.01, directions=Directions(refresh=3))
    changes, before = [], None
    for step in range(9 * apart):
        logits = layer(torch.randn(8, 6))
        optimizer.zero_grad()
        if step % apart == 0:
            optimizer.observe(logits)
        nn.functional.cross_entropy(logits, torch.randint(4, (8,))).backward()
        optimizer.step()
        now = optimizer.state[layer.weight]["left"].clone()
        changes += [step] if before is not None and not torch.equal(now, before) else []
        before = now
    assert changes == [2 * apart, 5 * apart, 8 * apart]
