"""The teacher's pass as a CUDA graph.

The Python that starts the kernels of a forward and backward pass often takes longer than the GPU
that runs them. The teacher's pass is the same at each step, so it is recorded once, for some rows
of known inputs at a time, and then replayed: that takes next to no time of the CPU. It runs beside
the forward pass of the new batch, on a stream of its own.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.modules import module as torch_modules

from syngap.optim.checks import is_compiled
from syngap.optim.predictions import Predict, in_eval_mode
from syngap.optim.tensors import alike, wide
from syngap.protection import anchors
from syngap.protection.answers import divergence_and_difference
from syngap.protection.gradients import leaves_of, nodes_of, times
from syngap.protection.pending import Pending
from syngap.protection.recomputed import blocks_of, recomputed

__all__ = ["RUNS_PLAINLY", "CapturedPass", "capture", "recording"]

PREDICTIONS = 4096  # at a time: what a graph takes of memory is of no use to anything else
MORE_MEMORY = 8  # times as much takes a block that is not run again
_LOG = logging.getLogger(__name__)
_AGREES = 0.01  # nats between a prediction alone and among others, which half precision stays below
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
RUNS_PLAINLY = (
    "protection.loss() takes a whole pass at each step, as it could not be recorded as a CUDA "
    "graph: that needs a model without hooks that is not compiled and does not wait for the GPU, "
    "and known inputs of one shape without a mask. protect(..., every=2) takes half of the time"
)


def capture(
    model: nn.Module,
    predict: Predict,
    batches: Sequence[Any],
    stored: Sequence[Tensor | None],
    answer: Callable[[Tensor], Tensor],
    params: Sequence[Tensor],
) -> CapturedPass | None:
    """Return the teacher's pass, recorded, None where that is not possible.

    A graph holds what runs on one GPU without waiting for it, for inputs of one shape. Hooks would
    run once, and not at each replay.

    Args:
        model: the model.
        predict: computes logits from a batch, in the same way at each call.
        batches: of known inputs.
        stored: what is stored of the former answers to each.
        answer: makes logits of what is stored.
        params: the parameters whose gradients are wanted, all that learn from known inputs.
    """
    if not _is_on_one_gpu(model) or _memory_of(model) is None:
        return None
    shapes = {_shape_of(*pair) for pair in zip(batches, stored, strict=True)}
    if len(shapes) != 1 or None in shapes:
        return None

    def attempt(recompute: bool) -> CapturedPass | None:
        try:
            return CapturedPass(model, predict, batches[0], stored[0], answer, params, recompute)
        except Exception as error:  # the plain pass, which ran before, does without
            _LOG.info("the teacher's pass is not recorded as a CUDA graph: %s", error)
            return None

    return attempt(recompute=True) or attempt(recompute=False)


class CapturedPass:
    """KL(before ‖ now) on batches of known inputs, and its gradient, some rows at a time.

    Gradients are those of tensors that share the memory of the parameters, so that the model's own
    gradients and hooks are not touched.

    Args:
        model: on a CPU nothing is recorded, and each pass runs as it is.
        predict: computes logits from a batch.
        batch: one of the batches; others may have more or fewer rows of the same shape.
        stored: what is stored of the former answers to it, row by row.
        answer: makes logits of what is stored.
        params: the parameters whose gradients are wanted.
        recompute: whether blocks run again in the backward pass, for less memory.
    """

    def __init__(
        self,
        model: nn.Module,
        predict: Predict,
        batch: Any,
        stored: Any,
        answer: Callable[[Tensor], Tensor],
        params: Sequence[Tensor],
        recompute: bool = True,
    ) -> None:
        self._model, self._answer, self.params = model, answer, params
        self._module, self._recompute = anchors.Pass(model, predict), recompute
        self._memory, self._buffers = _memory_of(model), list(model.buffers())
        self._versions = [buffer._version for buffer in self._buffers]
        self._holder: weakref.ref[Any] | None = None
        self._is_taken = False
        most = PREDICTIONS if recompute else PREDICTIONS // MORE_MEMORY
        size = max(1, min(len(stored), most * len(stored) // stored.shape[:-1].numel()))
        self._batch = anchors.copied(anchors.part_of(batch, slice(size)))
        self._stored = stored[:size].clone()
        with in_eval_mode(model), torch.no_grad():
            _require_own_rows(predict, batch)
            some = predict(self._batch)
        assert isinstance(some, Tensor)
        self._weights = torch.zeros_like(wide(some[..., 0]))
        self._total = self._weights.new_zeros(())
        names: dict[Tensor, str] = {each: name for name, each in self._module.named_parameters()}
        self._leaves = {names[each]: each.detach().requires_grad_() for each in params}
        self._gradients = [torch.zeros_like(each) for each in params]
        for leaf, gradient in zip(self._leaves.values(), self._gradients, strict=True):
            leaf.grad = gradient
        self._stream: torch.cuda.Stream | None = None
        if some.is_cuda:
            self._play = self._recorded(some.device)
        else:
            self._run_once()
            self._play = self._run_rows

    def fits(self, model: nn.Module) -> bool:
        """Return whether the model runs as it did, with its tensors in the same memory."""
        return self._memory is not None and self._memory == _memory_of(model)

    @property
    def is_free(self) -> bool:
        """Whether no backward pass still needs the gradients of the last run."""
        return self._is_taken or self._holder is None or self._holder() is None

    def loss(self, batch: Any, stored: Tensor, weights: Tensor) -> Tensor:
        """Return KL on a batch, of which the gradient is taken at the same time.

        Args:
            batch: of known inputs.
            stored: of the former answers to it.
            weights: of each prediction in the sum.
        """
        found: Tensor = _Replayed.apply(self, self._total, *self.params)  # type: ignore[no-untyped-call]
        if self._stream is None:
            self._run(batch, stored, weights)
            found.data.copy_(self._total)
            return found
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._run(batch, stored, weights)
            found.data.copy_(self._total)
            written.record()
        for each in (found, weights):
            each.record_stream(self._stream)
        if self._versions == [buffer._version for buffer in self._buffers]:
            return Pending.of(found, written)
        current.wait_event(written)  # the model's forward pass writes what this one reads
        return found

    def hold(self, holder: Any) -> None:
        """Keep the gradients of the next run for an object, as long as it lives."""
        self._holder, self._is_taken = weakref.ref(holder), False

    def take(self, holder: Any) -> list[Tensor]:
        """Return the gradients of the object's run, which the next run writes to."""
        if self._holder is None or self._holder() is not holder:
            raise RuntimeError(
                "the gradient of this protection.loss() is gone, because loss() was called again "
                "since: call backward() before the next loss()"
            )
        self._is_taken = True
        return self._gradients

    def _run(self, batch: Any, stored: Tensor, weights: Tensor) -> None:
        """Add up loss and gradients over the rows."""
        for some in alike([*self._gradients, self._total]):
            torch._foreach_zero_(some)
        size = len(self._stored)
        for start in range(0, len(stored), size):
            part = slice(start, min(start + size, len(stored)))
            filled = slice(part.stop - start)
            self._weights[filled.stop :] = 0.0  # rows that are left from before do not count
            for static, fresh in zip(
                anchors.tensors_of(anchors.part_of(self._batch, filled)),
                anchors.tensors_of(anchors.part_of(batch, part)),
                strict=True,
            ):
                static.copy_(fresh)
            self._stored[filled].copy_(stored[part])
            self._weights[filled].copy_(weights[part])
            self._play()

    # The graph.

    def _run_rows(self, check: Callable[[Tensor], None] = lambda now: None) -> None:
        """Add loss and gradients of the rows that are in place."""

        def add(now: Tensor) -> None:
            check(now)
            with torch.no_grad():
                total, gradient = divergence_and_difference(
                    now, self._stored, self._weights, self._answer
                )
                gradient.mul_(self._weights.to(gradient.dtype).unsqueeze(-1))
                self._total.add_(total)
            now.backward(gradient, inputs=list(self._leaves.values()))  # type: ignore[no-untyped-call]

        blocks = blocks_of(self._model) if self._recompute else []
        with (
            torch.enable_grad(),
            in_eval_mode(self._model),
            recomputed(blocks, self._model, later=False),
        ):
            # The backward pass too sees the leaves, with which blocks run again.
            functional_call(self._module, self._leaves, (self._batch, add))

    def _run_once(self) -> None:
        """Run as it is; refuse predictions that gradients of the parameters do not explain."""
        own = set(self._leaves.values())

        def check(now: Tensor) -> None:
            if not own.issuperset(leaves_of(nodes_of(now))):
                raise ValueError("predictions depend on parameters that are not the model's")

        self._run_rows(check)

    def _recorded(self, device: torch.device) -> Callable[[], None]:
        """Return the replay of a pass over the rows that are in place."""
        with torch.cuda.device(device):
            self._stream = stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._run_once()  # libraries choose their kernels
                self._run_rows()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            torch.clear_autocast_cache()  # else weights that were cast before would be taken
            with _recording(graph, stream):
                self._run_rows()
            torch.clear_autocast_cache()
        static = [self._stored, self._weights, self._total, *self._gradients]
        for each in (*static, *anchors.tensors_of(self._batch)):
            each.record_stream(stream)
        return graph.replay


class _Replayed(torch.autograd.Function):
    """A loss whose value and gradient a replay writes, before they are used.

    It is made before the new batch runs, so that its backward pass comes last, when memory is free.
    """

    @staticmethod
    def forward(ctx: Any, source: CapturedPass, like: Tensor, *params: Tensor) -> Tensor:
        ctx.source = source
        source.hold(ctx)
        return torch.empty_like(like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *times(ctx.source.take(ctx), grad)


# What can be recorded


def _is_on_one_gpu(model: nn.Module) -> bool:
    devices = {param.device for param in model.parameters()}
    return len(devices) == 1 and devices.pop().type == "cuda"


def _memory_of(model: nn.Module) -> list[tuple[object, ...]] | None:
    """Return where the tensors of a model are, and which of them learn.

    None where a forward pass is more than the model's own code: with hooks, or compiled.
    """
    if any(getattr(torch_modules, f"_global{name}", None) for name in _HOOKS):
        return None
    found: list[tuple[object, ...]] = []
    for module in model.modules():
        own = vars(module)
        if is_compiled(module) or any(map(own.get, _HOOKS)):
            return None
        tensors = [*module._parameters.values(), *module._buffers.values()]
        found += [(id(t), t.data_ptr(), t.requires_grad) for t in tensors if t is not None]
    return found


def _shape_of(batch: Any, stored: Tensor | None) -> tuple[object, ...] | None:
    """Return the shape of a batch but for its number of rows, None where it has no rows."""
    if stored is None or anchors.length(batch) != len(stored):
        return None
    names = tuple(batch) if isinstance(batch, Mapping) else type(batch)
    tensors = [*anchors.tensors_of(batch), stored]
    return names, *((each.shape[1:], each.dtype, each.device) for each in tensors)


def _require_own_rows(predict: Predict, batch: Any) -> None:
    """Refuse predictions for some rows that depend on what the other rows are."""
    count = max(1, (anchors.length(batch) or 0) // 2)
    whole, some = (predict(each) for each in (batch, anchors.part_of(batch, slice(count))))
    if isinstance(some, Tensor) and isinstance(whole, Tensor) and some.shape[1:] == whole.shape[1:]:
        weights = torch.ones_like(wide(some[..., 0]))
        kl, _ = divergence_and_difference(some, whole[:count], weights / weights.numel())
        if kl <= _AGREES:
            return
    raise ValueError("predictions for some rows depend on the others")


# While it is recorded


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record what is done inside; where that fails, random numbers and memory are as before.

    It fails where the CPU waits for the GPU. Torch would then go on as if it were recording.
    """
    generator = torch.cuda.default_generators[stream.device_index]
    spare, pool = generator.clone_state(), torch.cuda.graph_pool_handle()
    current = torch.cuda.current_stream()
    try:
        with recording(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        torch.cuda.set_stream(current)
        generator.graphsafe_set_state(spare)
        with suppress(RuntimeError):  # where torch has done it
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        raise


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record what is done inside as a CUDA graph, while no garbage is collected.

    No graph may be deleted while another is recorded, and the collector may delete one any time.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if was_enabled:
            gc.enable()
