"""What `protect` will take of memory, from shapes alone: no weight is read, nothing is calculated.

The model runs once on tensors that have a shape and no numbers (torch's `FakeTensorMode`), by the
code that `protect` runs: it finds the uses of weights, their moments and the shapes of directions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call

from syngap.messages import count_of, names_arguments
from syngap.optim.basis import Basis
from syngap.optim.moments import (
    Moments,
    Rank,
    add_moments,
    affordable_rank,
    are_on_gpu,
    basis_dtype,
    find_bases,
)
from syngap.optim.predictions import Predict, as_it_was
from syngap.optim.tensors import accumulator, kept_in
from syngap.optim.update_forms import FEW
from syngap.optim.uses import Key, Recorder
from syngap.protection import anchors as known_inputs
from syngap.protection.answers import Answers, check_prediction
from syngap.protection.hints import check_known
from syngap.protection.last_product import LastProduct
from syngap.protection.recomputed import blocks_of_large
from syngap.protection.refusals import check_arguments, predicting, require_module
from syngap.protection.teacher import byte_limit, what_to_store

__all__ = ["MemoryPlan", "PlannedParameter", "plan_memory"]


@dataclass(frozen=True)
class Form:
    """The shape and the type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def shard(self, processes: int) -> int:
        """Return how much of it FSDP2 leaves in the first process: rows, rounded up."""
        if not self.shape:
            return self.nbytes
        rows = -(-self.shape[0] // processes)
        return rows * math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedParameter:
    """What will be in memory of one parameter.

    Attributes:
        name: of the parameter.
        weight: itself; its gradient and each of Adam's moments are like it.
        importance: of its coordinates, None where it is frozen or there is no gate.
        sides: directions of its first dimension and of the others, None for entries.
        mask: which the optimizer keeps between steps; None where importance is of many entries.
    """

    name: str
    weight: Form
    is_frozen: bool
    importance: Form | None = None
    sides: tuple[Form | None, Form | None] = (None, None)
    mask: Form | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """What `protect` and an AdamW behind it will take, in bytes of one process.

    Activations and known inputs are not in it. Single numbers, such as means, are left out.

    Attributes:
        parameters: what is kept of each.
        rank: of the bases.
        device: the type of device.
        processes: over which FSDP2 shards the model.
        buffers: bytes of buffers that are averages.
        moments: bytes of second moments, for a while in `protect`.
        answers: bytes that are stored of the former answers.
        stored: "answers", "features" (and the last layer), or "start": nothing but the start.
        gradient: whether the teacher makes a gradient of its own: not that of a large model.
    """

    parameters: tuple[PlannedParameter, ...]
    rank: Rank
    device: str
    processes: int
    buffers: int
    moments: int
    answers: int
    stored: str
    gradient: bool

    @property
    def numel(self) -> int:
        """How many numbers the model has."""
        return sum(math.prod(one.weight.shape) for one in self.parameters)

    def on_device(self) -> dict[str, int]:
        """Return the bytes that stay on the model's device while it is trained, by what for."""
        weights = sum(one.weight.shard(self.processes) for one in self.parameters)
        learned = [one for one in self.parameters if not one.is_frozen]
        gradients = sum(one.weight.shard(self.processes) for one in learned)
        own = gradients if self.gradient else 0
        again = gradients if self.stored == "start" and self.device != "cpu" else 0
        return {
            "weights": weights + self.buffers,
            "gradients": gradients,
            "AdamW's moments": 2 * gradients,
            "importance": self._importance(),
            "masks": sum(
                one.mask.nbytes if any(one.sides) else one.mask.shard(self.processes)
                for one in learned
                if one.mask
            ),
            "directions": sum(side.nbytes for one in learned for side in one.sides if side),
            "teacher": self.answers + own + again,
        }

    def on_cpu(self) -> dict[str, int]:
        """Return the bytes that stay in the memory of the CPU besides."""
        start = sum(one.weight.shard(self.processes) for one in self.parameters) + self.buffers
        copied = sum(one.importance.nbytes for one in self.parameters if one.importance)
        return {"start": start, "copy of importance": copied}

    def _importance(self) -> int:
        """Return the bytes of importance: along directions it is whole in every process."""
        return sum(
            one.importance.nbytes if any(one.sides) else one.importance.shard(self.processes)
            for one in self.parameters
            if one.importance
        )

    def __str__(self) -> str:
        """Return the plan as a table."""
        count = max(1, self.numel)
        among = "" if self.processes == 1 else f", over {count_of(self.processes, 'process')}"
        lines = [
            f"{count:,} parameters, rank {self.rank}, on {self.device}{among}",
            f"{'':28}      GB   bytes a parameter{', all processes' if among else ''}",
        ]

        def line(name: str, size: int) -> str:
            return f"{name:28}{size / 1e9:8.2f}{size * self.processes / count:20.2f}"

        there = self.on_device()
        lines += [line(name, size) for name, size in there.items()]
        lines.append(line("together, no activations", sum(there.values())))
        lines += [line(f"CPU: {name}", size) for name, size in self.on_cpu().items()]
        lines.append(line("in protect: second moments", self.moments))
        return "\n".join(lines)


@names_arguments()
def plan_memory(
    model: nn.Module,
    known: Any,
    *,
    gate: bool = True,
    teacher: bool = True,
    predict: Predict | None = None,
    rank: Rank | None = None,
    batch_size: int = 16,
    anchors: int = 16,
    device: str | None = None,
    processes: int = 1,
) -> MemoryPlan:
    """Return what `protect` with the same arguments will take of memory, before it does.

    The model may be on the meta device, where it has shapes and no weights. Layers that have the
    same inputs may share directions on a CPU and under FSDP2, which takes less; a weight that is
    also used in a way that is not recognised keeps its entries.

    Args:
        model: the model.
        known: inputs, as for `protect`; only their shapes count.
        gate: as for `protect`, as are the next ones.
        teacher: whether `loss()` will be called.
        predict: computes logits or a distribution from a batch.
        rank: None chooses by memory.
        batch_size: so many inputs at a time.
        anchors: so many inputs a call of `loss`.
        device: the type of device to train on, such as "cuda"; None is the model's, and for a
            model on the meta device a GPU.
        processes: over how many FSDP2 will shard the model.

    Examples:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))
        >>> plan = plan_memory(model, torch.zeros(256, 4096), rank=0.25)
        >>> {name: f"{size / 1e6:.1f} MB" for name, size in plan.on_device().items()}["directions"]
        '16.8 MB'
    """
    require_module(model, "plan_memory")
    check_arguments(0.5, 0.0, 1.0, anchors, None, batch_size, rank)
    params = dict(model.named_parameters())
    trained: list[Tensor] = [param for param in params.values() if param.requires_grad]
    if device is None:
        device = next(iter(params.values())).device.type
        device = "cuda" if device == "meta" else device
    device = torch.device(device).type
    check_known(known)
    batches, taught = known_inputs.batches_of(known, batch_size, anchors, own=False)
    run = _Run(model, predicting(model, predict))
    rank = affordable_rank(trained, device) if rank is None else rank
    compact = are_on_gpu(trained, device)
    sides = run.moments(batches[0]) if gate else {}
    bases = find_bases(sides, rank, basis_dtype(trained, device), _any_directions)
    entries = [p.numel() for name, p in params.items() if run.fakes[name] not in bases]
    keeps_masks = bool(bases) and sum(entries) // processes <= FEW
    planned = [
        _planned(name, param, run.fakes[name], bases, compact, gate, keeps_masks)
        for name, param in params.items()
    ]
    answers, stored = run.answers(taught, may_have_features=processes == 1)
    return MemoryPlan(
        parameters=tuple(planned),
        rank=rank,
        device=device,
        processes=processes,
        buffers=sum(each.nbytes for each in model.buffers() if each.is_floating_point()),
        moments=sum(
            moment.nbytes
            for side in sides.values()
            for use in side.uses
            for moment in use.moments
            if moment is not None
        ),
        answers=answers,
        stored=stored,
        gradient=teacher and processes == 1 and not blocks_of_large(model),
    )


def _planned(
    name: str,
    param: Tensor,
    fake: Tensor,
    bases: dict[Tensor, Basis],
    compact: bool,
    gate: bool,
    keeps_masks: bool,
) -> PlannedParameter:
    weight = Form(tuple(param.shape), param.dtype)
    if not param.requires_grad or not gate:
        return PlannedParameter(name, weight, is_frozen=not param.requires_grad)
    basis, dtype = bases.get(fake), kept_in(param.dtype, compact)
    if basis is None:
        mask = Form(tuple(param.shape), accumulator(param.dtype) if compact else dtype)
        return PlannedParameter(
            name, weight, False, Form(tuple(param.shape), dtype), mask=mask if keeps_masks else None
        )
    left, right = (
        None if side is None else Form(tuple(side.shape), side.dtype)
        for side in (basis.left, basis.right)
    )
    shape = basis.shape(fake)
    # As in `stack_masks`: a mask is calculated wide, and kept in the precision of directions.
    wide = fake.new_empty((), dtype=accumulator(param.dtype))
    mask = Form(shape, basis.dtype(wide))
    return PlannedParameter(name, weight, False, Form(shape, dtype), (left, right), mask)


def _any_directions(moment: Tensor, count: int, dtype: torch.dtype, known: object) -> Tensor:
    return moment.new_empty(len(moment), count, dtype=dtype)


class _Run:
    """A model that runs on tensors without numbers."""

    def __init__(self, model: nn.Module, predict: Predict) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # which takes a while to import

        self.model, self.predict = model, predict
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = next(model.parameters()).device
        self.fakes = {
            name: self.mode.from_tensor(param).requires_grad_(param.requires_grad)
            for name, param in model.named_parameters()
        }
        self.buffers = {
            name: self.mode.from_tensor(buffer) for name, buffer in model.named_buffers()
        }

    def moments(self, batch: Any) -> dict[Key, Moments]:
        """Return second moments of both sides of each weight, as `take_knowledge` has them."""
        trained = [fake for fake in self.fakes.values() if fake.requires_grad]
        recorder, sides = Recorder(trained), dict[Key, Moments]()
        with self._run(batch, recorder) as prediction:
            outputs = [use.output for use in recorder.uses]
            found = torch.autograd.grad(
                [each.sum() for each in _tensors_of(prediction)], outputs, allow_unused=True
            )
            count = len(next(_tensors_of(prediction)))
            factors = [
                (use, *use.factors(delta, count, accumulator(use.key[0].dtype)))
                for use, delta in zip(recorder.uses, found, strict=True)
                if delta is not None
            ]
            shared = {use.key[0] for use, left, _ in factors if left.are_shared(count)}
            add_moments((each for each in factors if each[0].key[0] not in shared), sides)
        return sides

    def answers(self, batches: list[Any], may_have_features: bool) -> tuple[int, str]:
        """Return how many bytes are stored of the answers to batches, and of what."""
        answers = features = head = 0
        shapes = Counter(map(_shapes_of, batches))
        firsts = {_shapes_of(batch): batch for batch in reversed(batches)}
        for shape, batch in firsts.items():
            product = LastProduct()
            with torch.no_grad(), self._run(batch, product) as prediction:
                answers += shapes[shape] * Answers(prediction, None).bytes
                layer, rows = product.head(), product.features
                if layer is None or rows is None or not isinstance(prediction, Tensor):
                    may_have_features = False
                    continue
                head = layer.nbytes
                features += shapes[shape] * rows.nbytes
                made = (*rows.shape[:-1], len(layer.weight))
                may_have_features &= made == tuple(prediction.shape)
        sizes = {"answers": answers, "features": features + head, "start": 0}
        known = sizes["features"] if may_have_features else None
        stored = what_to_store(answers, known, byte_limit(self.model))
        return sizes[stored], stored

    @contextmanager
    def _run(self, batch: Any, watch: Any) -> Iterator[Any]:
        """Yield the prediction for a batch, made while something watches."""
        found: list[Any] = []
        fakes = {f"model.{name}": each for name, each in (self.fakes | self.buffers).items()}
        validates = Distribution._validate_args
        Distribution.set_default_validate_args(False)  # which looks at numbers
        try:
            with as_it_was(self.model, None), self.mode, torch.enable_grad():
                batch = known_inputs.moved(batch, self.device)
                with watch:
                    functional_call(
                        known_inputs.Pass(self.model, self.predict), fakes, (batch, found.append)
                    )
                (prediction,) = found
                check_prediction(prediction)
                yield prediction
        except RuntimeError as error:
            if type(error).__module__ != "torch._subclasses.fake_tensor":
                raise
            raise ValueError(
                "the plan runs the model on shapes, and its forward pass looks at numbers "
                f"({type(error).__name__} {error}): give it inputs without a mask, or none to route"
            ) from None
        finally:
            Distribution.set_default_validate_args(validates)


def _tensors_of(prediction: Any) -> Iterator[Tensor]:
    """Yield the tensors of a prediction that a gradient can be taken of."""
    values = [prediction] if isinstance(prediction, Tensor) else vars(prediction).values()
    for value in values:
        if isinstance(value, Distribution):
            yield from _tensors_of(value)
        elif isinstance(value, Tensor) and value.requires_grad:
            yield value


def _shapes_of(batch: Any) -> tuple[object, ...]:
    return tuple((each.shape, each.dtype) for each in known_inputs.tensors_of(batch))
