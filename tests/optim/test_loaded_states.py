"""A loaded state is checked as a whole: it is refused and changes nothing, or it works.

Every entry of `state_dict()`, whatever its key, is replaced in turn by something that it cannot or
should not be. A key that is added to a state later is covered by that without a change here.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    MAKERS,
    Make,
    assert_identical,
    contents,
    itself,
    network,
    snapshot,
    train,
    values_of,
    wrapped,
)
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, NAdam, Optimizer, RMSprop

import syngap
from syngap import SynGAP
from syngap.optim import Ballistic, checks
from syngap.optim.errors import NotFiniteError

# An option that is another in the loaded state is used, and named.
pytestmark = pytest.mark.filterwarnings("ignore:.* from now on, as in the run that is loaded")
NAN, INF, HUGE = math.nan, math.inf, 3e38


class Other(Optimizer):
    """An optimizer from elsewhere, with a state and an option that nobody knows."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "shift": -1.0, "pair": (0.5, None)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("trace", torch.zeros_like(param)).mul_(0.5).add_(param.grad)
                    state["rows"] = param.grad.flatten(1).sum(-1) if param.dim() > 1 else None
                    state["count"] = state.get("count", 0) + 1
                    param.sub_(state["trace"], alpha=group["lr"])


def protected(base: Any, rank: Any, **settings: Any) -> Make:
    """Return what makes a protected optimizer, whose importance is along directions."""

    def make(model: nn.Module, *args: Any, **options: Any) -> Any:
        known = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        protection = syngap.protect(model, known, rank=rank, teacher=False)
        return protection.optimizer(base(model.parameters(), **settings))

    return make


ALL: dict[str, Make] = {
    **MAKERS,
    "named": lambda model, *args, **options: itself(momentum=0.9)(
        model, list(model.named_parameters()), **options
    ),
    "compact-with-momentum": itself(compact=True, momentum=0.5),
    "empirical": itself(estimator="empirical"),
    "wrapped-amsgrad-compact": lambda model, *args, **options: wrapped(
        AdamW, lr=0.01, amsgrad=True
    )(model, *args, compact=True, **options),
    "wrapped-sgd-with-momentum": wrapped(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "wrapped-rmsprop": wrapped(RMSprop, lr=0.01, momentum=0.5),
    "wrapped-nadam": wrapped(NAdam, lr=0.01),
    "wrapped-adafactor": wrapped(Adafactor, lr=0.01),
    "wrapped-ballistic": wrapped(Ballistic, lr=0.01),
    "wrapped-other": wrapped(Other),
    "protected-adamw": protected(AdamW, "full", lr=0.01),
    "protected-sgd-of-low-rank": protected(SGD, 2, lr=0.1, momentum=0.9),
}
# What is in their states only they know: it is compared with what is there, if anything is.
UNKNOWN = ("wrapped-adafactor", "wrapped-other")


def learn(model: nn.Module, optimizer: SynGAP, steps: range) -> None:
    """Train, with labels for the one estimator that needs them."""
    if optimizer.gate.estimator.name != "empirical":
        train(model, optimizer, steps)
        return
    for step in steps:
        torch.manual_seed(step)
        logits, labels = model(torch.randn(8, 4)), torch.arange(8) % 3
        optimizer.zero_grad()
        optimizer.observe(logits, targets=labels)
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()


def made(make: Make, used: bool) -> tuple[nn.Module, SynGAP]:
    """A layer and its optimizer, after three steps or before the first."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model)
    learn(model, optimizer, range(3 if used else 0))
    return model, optimizer


# Every entry --------------------------------------------------------------------------------------

Path = tuple[Any, ...]


def entries(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Walk a state: containers and what is in them, with the way to each."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in inside:
        yield (*path, key), value
        if isinstance(value, dict | list | tuple):
            yield from entries(value, (*path, key))


def replaced(tree: Any, path: Path, value: Any) -> Any:
    """Return a state with another value in one place; the rest is shared, not copied."""
    if not path:
        return copy.deepcopy(value)
    key, rest = path[0], path[1:]
    if isinstance(tree, dict):
        return {**tree, key: replaced(tree[key], rest, value)}
    return type(tree)(replaced(v, rest, value) if k == key else v for k, v in enumerate(tree))


def with_one(tensor: Tensor, number: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = number
    return changed


def replacements(value: Any) -> dict[str, Any]:
    """What an entry is replaced by, with the name of each."""
    others: dict[str, Any] = {
        "text": "many",
        "nothing": None,
        "an empty list": [],
        "an empty dict": {},
        "two numbers": torch.tensor([0.5, 0.5]),
        "a complex number": torch.tensor(1j),
    }
    if isinstance(value, Tensor):
        others |= {
            "of more dimensions": value.unsqueeze(0).clone(),
            "longer": torch.cat([value.reshape(-1), value.reshape(-1)]),
            "of another type": value.double() if not value.is_floating_point() else value.long(),
            "true or false": value.bool(),
            "sparse": value.to_sparse() if value.dim() else value.unsqueeze(0).to_sparse(),
        }
        if value.dim():
            others |= {"one number": value.reshape(-1)[0].clone()}
        if value.is_floating_point():
            numbers = {"nan": NAN, "inf": INF, "minus inf": -INF, "negative": -1.0, "huge": HUGE}
            numbers["largest"] = torch.finfo(value.dtype).max
            others |= {name: with_one(value, number) for name, number in numbers.items()}
            others["all large"] = torch.full_like(value, 2e35)
        else:
            others["huge"] = torch.full_like(value, 2**62, dtype=torch.int64)
        return others
    numbers = {"nan": NAN, "inf": INF, "minus inf": -INF, "negative": -1, "huge": HUGE}
    return others | numbers | {"beyond float32": 1e300, "beyond float64": 10**400, "half": 0.5}


def word_of(path: Path) -> str:
    """What an error has to name: the option or the key of the state."""
    (*_, word) = [key for key in path if isinstance(key, str)]
    return "param" if word == "params" else word


def cases(state: dict[str, Any], used: bool) -> Iterator[tuple[Path, str, Any]]:
    """What to replace, with the name of what and by what.

    A key gets every replacement in the first place that has it. In further places, as those of
    the second parameter, it is the same code that looks: they get one replacement each, and not
    the same one. Options do not depend on whether steps were taken.
    """
    keys: set[Path] = set()
    for number, (path, value) in enumerate(entries(state)):
        if not used and path[0] != "state":
            continue
        key = tuple("*" if isinstance(part, int) else part for part in path)
        others = list(replacements(value).items())
        if key in keys:
            others = [others[number % len(others)]]
        keys.add(key)
        for kind, other in others:
            yield path, kind, other


def after_steps(model: nn.Module, optimizer: SynGAP) -> str:
    """Take three steps: "finite", "said" where an error says that they are not, or "lost"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learn(model, optimizer, range(3, 6))
    except NotFiniteError:
        return "said"
    finite = all(value.isfinite().all() for value in values_of(model).values())
    return "finite" if finite else "lost"


@pytest.mark.parametrize(
    ("name", "used"),
    [(name, used) for name in ALL for used in (True, False) if used or name not in UNKNOWN],
)
def test_whatever_is_replaced_in_a_state_is_refused_or_works(name: str, used: bool) -> None:
    make = ALL[name]
    saved = copy.deepcopy(made(make, used=True)[1].state_dict())
    given = copy.deepcopy(saved)
    model, optimizer = made(make, used)
    before = snapshot(model, optimizer)
    refused, accepted, unnamed = 0, [], []
    for path, kind, other in cases(saved, used):
        case, state = f"{kind} for {path}", replaced(given, path, other)
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            refused += 1
            if word_of(path) not in str(error):
                unnamed.append(f"{case}: {error}")
            assert_identical(contents(model, optimizer), before)
        else:
            outcome = after_steps(model, optimizer)
            given = copy.deepcopy(saved)  # steps may have changed what was given
            # A rate or a momentum may be large and finite, as a gradient may; an error says so.
            kept = ("importance", "mean", "turn", "left", "right")
            gate = path[0] == "state" and path[-1] in kept
            if outcome not in ({"finite"} if gate else {"finite", "said"}):
                accepted.append(f"{case}: {outcome}")
            model, optimizer = made(make, used)
            before = snapshot(model, optimizer)
    assert unnamed == []
    assert accepted == []
    assert refused > (100 if used else 10)

    twin, its = made(make, used)
    for subject, one in ((model, optimizer), (twin, its)):
        learn(subject, one, range(3, 5))
    assert_identical(values_of(model), values_of(twin))
    assert_identical(optimizer.state_dict(), its.state_dict())


# The attacks that were found ----------------------------------------------------------------------

BOTH = {"plain": ALL["plain"], "wrapped": ALL["wrapped-adamw"]}
both_kinds = pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)


@pytest.mark.parametrize("number", [NAN, INF, HUGE, -1e-9])
@both_kinds
def test_an_importance_that_no_run_has_is_refused_by_its_parameter(
    make: Make, number: float
) -> None:
    model = network()
    optimizer = make(model, model=model)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][2]["importance"][0, 0] = number
    with pytest.raises(ValueError, match=r"importance .*\(3, 6\) \(2\.weight\): its numbers must"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("estimator", ["sampled", "exact"])
def test_the_largest_importance_that_can_be_observed_is_loaded(
    dtype: torch.dtype, compact: bool, estimator: Any
) -> None:
    """Inputs grow until the importance overflows and is left out."""
    model = nn.Linear(3, 4).to(dtype)
    nn.init.zeros_(model.weight)
    optimizer = SynGAP(
        model.parameters(), 0.0, retention=0.0, estimator=estimator, compact=compact, model=model
    )
    largest = 0.0
    top = 156 if dtype == torch.float64 and not compact else 20
    for exponent in torch.linspace(top - 8, top, 60).tolist():
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.observe(
                model(torch.ones(2, 3, dtype=torch.float64).mul(10**exponent).to(dtype))
            )
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        largest = max(largest, *(value.max().item() for value in optimizer.importance().values()))  # type: ignore[union-attr]
    assert largest > (1e30 if top == 20 else 1e300)


def test_an_entry_that_overflowed_in_float16_is_loaded() -> None:
    """AdamW's squares do, of ordinary gradients; such entries stand still, and the run goes on."""
    model = network(torch.float16)
    optimizer = wrapped(AdamW, lr=0.01)(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["base.exp_avg_sq"].isinf().all()
    optimizer.load_state_dict(saved)
    saved["state"][0]["base.exp_avg"][0, 0] = INF
    with pytest.raises(ValueError, match=r"base\.exp_avg for a parameter of shape \(6, 4\) \(0\)"):
        optimizer.load_state_dict(saved)


def test_a_base_that_refuses_its_state_leaves_the_gate_as_it_was() -> None:
    class Strict(SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            raise RuntimeError("not this one")

    model = network()
    optimizer = wrapped(Strict, lr=0.1, momentum=0.9)(model)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 5))
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="not this one"):
        optimizer.load_state_dict(saved)
    assert_identical(snapshot(model, optimizer), before)
    train(model, optimizer, range(5, 7))


# Options that are changed later -------------------------------------------------------------------

BAD_OPTIONS = [
    ("retention", 1.5),
    ("consolidation", 7),
    ("damping", -1.0),
    ("ambient", NAN),
    ("scope", "layer"),
    ("bounded", "no"),
    ("lr", NAN),
    ("lr", torch.tensor(-0.1)),
    ("steps", -1),
    ("steps", "many"),
    ("skipped", 0.5),
]


@pytest.mark.parametrize("act", ["observe", "step", "plasticity", "summary", "consolidate"])
@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS)
@both_kinds
def test_a_bad_option_in_param_groups_is_refused_where_it_is_used(
    make: Make, option: str, value: Any, act: str
) -> None:
    model = network()
    optimizer = make(model, [{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    train(model, optimizer, range(2))
    logits = model(torch.randn(8, 4))
    before = values_of(model)
    good, optimizer.param_groups[1][option] = optimizer.param_groups[1][option], value
    acts = {
        "observe": lambda: optimizer.observe(logits),
        "consolidate": lambda: optimizer.consolidate(model, torch.randn(8, 4)),
        "step": optimizer.step,
        "plasticity": optimizer.plasticity,
        "summary": optimizer.summary,
    }
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(ValueError, match=rf"param_groups\[1\]: {option} must be .* got "):
            acts[act]()
    assert_identical(values_of(model), before)
    optimizer.param_groups[1][option] = good
    train(model, optimizer, range(2, 4))


def test_a_rate_that_is_changed_in_its_tensor_is_looked_at_again() -> None:
    model, rate = network(), torch.tensor(0.1)
    optimizer = itself()(model, lr=rate)
    train(model, optimizer, range(2))
    rate.fill_(NAN)
    with pytest.raises(ValueError, match="lr must be ≥ 0"):
        train(model, optimizer, [2])


def test_options_are_checked_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    check = checks._check_option
    monkeypatch.setattr(
        checks, "_check_option", lambda name, value: (looked.append(name), check(name, value))
    )
    model = network()
    optimizer = itself()(model)
    train(model, optimizer, range(2))
    looked.clear()
    train(model, optimizer, range(2, 4))
    assert looked == []
    optimizer.param_groups[0]["lr"] = 0.05
    train(model, optimizer, range(4, 6))
    assert looked == ["lr"]
