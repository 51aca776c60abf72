"""What tests of the optimizer's manners share: makers, a small task, and exact comparisons."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from syngap import SynGAP
from syngap.optim import Directions, GatedOptimizer

Make: TypeAlias = Callable[..., GatedOptimizer]
GATE = {"retention": 0.9, "consolidation": 0.5}


# Optimizers ---------------------------------------------------------------------------------------


def itself(**settings: Any) -> Make:
    """A maker of SynGAP; `params` default to the model's, options may be changed."""

    def make(model: nn.Module, params: Iterable[Any] | None = None, /, **more: Any) -> SynGAP:
        options = {"lr": 0.1, **GATE, **settings, **more}
        if options.get("estimator") == "exact":
            options["model"] = model
        return SynGAP(model.parameters() if params is None else params, **options)

    return make


def wrapped(base: Callable[..., Optimizer], **settings: Any) -> Make:
    """A maker of SynGAP around another optimizer."""

    def make(
        model: nn.Module, params: Iterable[Any] | None = None, /, *, lr: Any = None, **more: Any
    ) -> GatedOptimizer:
        options = settings if lr is None else settings | {"lr": lr}
        moved = base(model.parameters() if params is None else params, **options)
        return SynGAP.wrap(moved, **{**GATE, **more})

    return make


MAKERS: dict[str, Make] = {
    "plain": itself(),
    "momentum-and-decay": itself(momentum=0.9, weight_decay=0.01),
    "tensor-scope": itself(scope="tensor"),
    "exact": itself(estimator="exact"),
    "foreach": itself(foreach=True),
    "every-third": itself(every=3, warmup=0),
    "compact": itself(compact=True),
    "directions": itself(directions=Directions(refresh=3)),
    "wrapped-sgd": wrapped(SGD, lr=0.1),
    "wrapped-adamw": wrapped(AdamW, lr=0.01),
}
# Directions that follow a stream refuse `consolidate`, as test_directions.py has it.
CONSOLIDATING = {name: make for name, make in MAKERS.items() if name != "directions"}


def every_of(name: str) -> int:
    """How many steps of the maker of this name share one refresh of importance."""
    return 3 if name == "every-third" else 1


# The task -----------------------------------------------------------------------------------------


def network(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Sequential:
    """A small classifier, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model.to(device=device, dtype=dtype)


def batch(step: int, like: Tensor | None = None, rows: int = 8) -> tuple[Tensor, Tensor]:
    """The inputs and labels of a step, in the type and on the device of a tensor."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, 4, generator=generator)
    y = torch.randint(3, (rows,), generator=generator)
    return (x, y) if like is None else (x.to(like), y.to(like.device))


@contextmanager
def draws_of(step: int) -> Iterator[None]:
    """Let what is drawn inside depend on the step alone, and leave no trace."""
    with torch.random.fork_rng():
        # Without a GPU, `torch.manual_seed` keeps the seed and a trace of the stack for one.
        torch.default_generator.manual_seed(step)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(step)
        yield


def prepare(model: nn.Module, optimizer: GatedOptimizer, step: int) -> Tensor:
    """Everything of a training step up to `optimizer.step()`."""
    x, y = batch(step, next(model.parameters()))
    optimizer.zero_grad()
    logits = model(x)
    with draws_of(step):
        optimizer.observe(logits)
    loss = F.cross_entropy(logits, y)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def train(model: nn.Module, optimizer: GatedOptimizer, steps: Iterable[int]) -> None:
    for step in steps:
        prepare(model, optimizer, step)
        optimizer.step()


# Looking ------------------------------------------------------------------------------------------


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def as_list(found: dict[str, Tensor] | list[Tensor]) -> list[Tensor]:
    """`importance()` or `plasticity()` in parameter order, as copies."""
    return [value.clone() for value in (found.values() if isinstance(found, dict) else found)]


def snapshot(model: nn.Module, optimizer: GatedOptimizer) -> dict[str, Any]:
    """Copies of everything that a call which fails must leave alone."""
    return copy.deepcopy(contents(model, optimizer))


def contents(model: nn.Module, optimizer: GatedOptimizer) -> dict[str, Any]:
    """What `snapshot` copies, to be compared with a copy."""
    return {
        "values": values_of(model),
        "gradients": [param.grad for param in model.parameters()],
        "members": [id(param) for param in params_of(optimizer)],
        "optimizer": optimizer.state_dict(),
        "importance": as_list(optimizer.importance()),
    }


def has_forward_hooks(model: nn.Module) -> bool:
    """Whether anybody listens to a module of a model; torch has no public way to ask."""
    return any(module._forward_hooks for module in model.modules())


def is_compact(optimizer: GatedOptimizer) -> bool:
    return as_list(optimizer.importance())[0].dtype == torch.bfloat16


def defined_plasticity(optimizer: GatedOptimizer) -> list[Tensor]:
    """Ω in float64 from `importance()`, by its definition: μ is a mean over all that trains."""
    importance = [value.double().cpu() for value in as_list(optimizer.importance())]
    params = params_of(optimizer)
    options = [group for group in optimizer.param_groups for _ in group["params"]]
    if is_compact(optimizer):  # whose mean is not rounded
        kept = [optimizer.state.get(param, {}) for param in params]
        means = [state.get("mean", torch.zeros(())).double().cpu() for state in kept]
    else:
        means = [value.mean() for value in importance]
    trained = [(p.numel(), mean) for p, mean in zip(params, means, strict=True) if p.requires_grad]
    mean = sum(numel * mean for numel, mean in trained) / sum(numel for numel, _ in trained)
    result = []
    for value, own, group in zip(importance, means, options, strict=True):
        mu = own if group["scope"] == "tensor" else mean
        slope = math.atanh(group["consolidation"]) / (mu + group["damping"])
        result.append(1 - torch.tanh(slope * (value + group["damping"])) + group["ambient"])
    return result


def assert_identical(actual: Any, expected: Any, where: str = "") -> None:
    """Compare nested containers of tensors bit for bit."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), where
        assert actual.dtype == expected.dtype, where
        assert torch.equal(actual.cpu(), expected.cpu()), where
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_identical(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_identical(one, other, f"{where}[{index}]")
    else:
        assert actual == expected, f"{where}: {actual!r} is not {expected!r}"


def largest_difference(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return max((one.double() - other.double()).abs().max().item() for one, other in pairs)


def assert_go_on_alike(
    one: tuple[nn.Module, GatedOptimizer],
    other: tuple[nn.Module, GatedOptimizer],
    steps: Iterable[int],
) -> None:
    """Train two networks further and compare them and their optimizers bit for bit."""
    steps = list(steps)
    for model, optimizer in (one, other):
        train(model, optimizer, steps)
    assert_identical(values_of(one[0]), values_of(other[0]))
    assert_identical(one[1].state_dict(), other[1].state_dict())


def _all_tensors() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


class TensorsSince:
    """Lists the tensors that were made after this object and are still there.

    What other tests left behind may go at any moment. It is kept until then, so that no count
    falls, and no new tensor gets the address of an old one.
    """

    def __init__(self) -> None:
        self.before = _all_tensors()

    def __call__(self) -> list[Tensor]:
        before = {id(tensor) for tensor in self.before}
        return [tensor for tensor in _all_tensors() if id(tensor) not in before]
