"""The teacher's pass as a CUDA graph.

The Python that starts the kernels of a forward and backward pass often takes longer than the GPU
that runs them. The teacher's pass is the same at each step, so it is recorded once, for some rows
of known inputs at a time, and then replayed: that takes next to no time of the CPU. It runs beside
the forward pass of the new batch, on a stream of its own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.func import functional_call
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from syngap.optim.consolidation import Predict, in_eval_mode
from syngap.optim.tensors import alike, wide
from syngap.protection import anchors
from syngap.protection.answers import divergence_and_difference
from syngap.protection.pending import Pending

__all__ = ["CapturedPass", "capture", "leaves_of", "nodes_of"]

PREDICTIONS = 4096  # at a time: what a graph takes of memory is of no use to anything else
_LOG = logging.getLogger(__name__)
_AGREES = 0.05  # relative error of a prediction, which half precision stays below
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
        predict: computes logits from a batch.
        batches: of known inputs.
        stored: what is stored of the former answers to each.
        answer: makes logits of what is stored.
        params: the parameters whose gradients are wanted, all that learn from known inputs.
    """
    if not _is_on_gpu(model) or not _is_plain(model):
        return None
    shapes = {_shape_of(*pair) for pair in zip(batches, stored, strict=True)}
    if len(shapes) != 1 or None in shapes:
        return None
    try:
        return CapturedPass(model, predict, batches[0], stored[0], answer, params)
    except (RuntimeError, ValueError) as error:  # it waits for the GPU, or memory is short
        _LOG.info("the teacher's pass is not recorded as a CUDA graph: %s", error)
        return None


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
    """

    def __init__(
        self,
        model: nn.Module,
        predict: Predict,
        batch: Any,
        stored: Any,
        answer: Callable[[Tensor], Tensor],
        params: Sequence[Tensor],
    ) -> None:
        self._model, self._module, self._answer = model, _Predicting(model, predict), answer
        self.params = params
        self._mark = _memory_of(model)
        self._number = 0
        self._holder: weakref.ref[Any] | None = None
        size = max(1, min(len(stored), PREDICTIONS * len(stored) // stored.shape[:-1].numel()))
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
        self._play = self._recorded(some.device) if some.is_cuda else self._tried()

    def fits(self, model: nn.Module) -> bool:
        """Return whether the model runs as it did, with its parameters in the same memory."""
        return self._mark == _memory_of(model) and _is_plain(model)

    @property
    def is_free(self) -> bool:
        """Whether no backward pass still needs the gradients of the last run."""
        return self._holder is None or self._holder() is None

    def loss(self, batch: Any, stored: Tensor, weights: Tensor) -> Tensor:
        """Return KL on a batch, of which the gradient is taken at the same time.

        Args:
            batch: of known inputs.
            stored: of the former answers to it.
            weights: of each prediction in the sum.
        """
        found = _replayed(self, self._total, self.params)
        if self._stream is None:
            self._run(batch, stored, weights)
            found.data.copy_(self._total)
            return found
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._run(batch, stored, weights)
            found.data.copy_(self._total)
            written.record()
        found.record_stream(self._stream)
        weights.record_stream(self._stream)
        return Pending.of(found, written)

    def hold(self, holder: Any) -> int:
        """Keep the gradients of the next run for an object, while it lives; return a number."""
        self._number, self._holder = self._number + 1, weakref.ref(holder)
        return self._number

    def take(self, number: int) -> list[Tensor]:
        """Return the gradients of a run, once; the next run writes to them."""
        if number != self._number or self._holder is None:
            raise RuntimeError(
                "the gradient of this protection.loss() is gone: call backward() once for each "
                "loss(), before the next loss()"
            )
        self._holder = None
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
            for static, source in zip(
                anchors.tensors_of(anchors.part_of(self._batch, filled)),
                anchors.tensors_of(anchors.part_of(batch, part)),
                strict=True,
            ):
                static.copy_(source)
            self._stored[filled].copy_(stored[part])
            self._weights[filled].copy_(weights[part])
            self._play()

    # The graph.

    def _predictions(self) -> Tensor:
        with torch.enable_grad(), in_eval_mode(self._model), _recomputed(self._model):
            found: Tensor = functional_call(self._module, self._leaves, (self._batch,))
        return found

    def _pass(self) -> None:
        now = self._predictions()
        with torch.no_grad():
            total, gradient = divergence_and_difference(
                now, self._stored, self._weights, self._answer
            )
            gradient.mul_(self._weights.to(gradient.dtype).unsqueeze(-1))
        with in_eval_mode(self._model):  # blocks run again
            now.backward(gradient, inputs=list(self._leaves.values()))  # type: ignore[no-untyped-call]
        self._total.add_(total)

    def _tried(self) -> Callable[[], None]:
        """Return the pass, after it has run once."""
        own = set(self._leaves.values())
        if not own.issuperset(leaves_of(nodes_of(self._predictions()))):
            raise ValueError("predictions depend on parameters that are not the model's")
        self._pass()
        return self._pass

    def _recorded(self, device: torch.device) -> Callable[[], None]:
        """Return the replay of a pass."""
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # its nodes of autograd must not know another
                self._tried()()  # libraries choose their kernels
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            torch.clear_autocast_cache()  # else weights that were cast before would be taken
            with _recording(graph, stream):
                self._pass()
            torch.clear_autocast_cache()
        self._stream = stream
        return graph.replay


class _Replayed(torch.autograd.Function):
    """A loss whose value and gradient a replay writes, before they are used.

    It is made before the new batch runs, so that its backward pass comes last, when memory is free.
    """

    @staticmethod
    def forward(ctx: Any, source: CapturedPass, like: Tensor, *params: Tensor) -> Tensor:
        ctx.source, ctx.number = source, source.hold(ctx)
        return torch.empty_like(like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.source.take(ctx.number)
        for some in alike(gradients):
            torch._foreach_mul_(some, grad.to(some[0]))
        return None, None, *gradients


def _replayed(source: CapturedPass, like: Tensor, params: Sequence[Tensor]) -> Tensor:
    found: Tensor = _Replayed.apply(source, like, *params)  # type: ignore[no-untyped-call]
    return found


class _Predicting(nn.Module):
    """A model behind `predict`, so that `functional_call` exchanges its parameters."""

    def __init__(self, model: nn.Module, predict: Predict) -> None:
        super().__init__()
        self.model, self._predict = model, predict

    def forward(self, batch: Any) -> Any:
        return self._predict(batch)


def nodes_of(found: Tensor) -> set[Node]:
    """Return all nodes of the graph of a tensor."""
    assert found.grad_fn is not None
    nodes, left = {found.grad_fn}, [found.grad_fn]
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                left.append(node)
    return nodes


def leaves_of(nodes: Iterable[Node]) -> list[Tensor]:
    """Return the tensors that the gradients of a graph end in."""
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _is_plain(model: nn.Module) -> bool:
    """Return whether a forward pass is the model's own code alone: no hooks, not compiled."""
    return not any(getattr(torch_modules, f"_global{name}", None) for name in _HOOKS) and not any(
        hasattr(each, "_orig_mod")  # of torch.compile
        or vars(each).get("_compiled_call_impl") is not None
        or any(vars(each).get(name) for name in _HOOKS)
        for each in model.modules()
    )


@contextmanager
def _recomputed(model: nn.Module) -> Iterator[None]:
    """Let the blocks of a model keep their inputs alone for the backward pass, and run again there.

    Memory of a graph is its own for good, and time of a GPU that waits for the CPU costs little.
    """
    blocks = _blocks(model)
    before = {block: vars(block).get("forward") for block in blocks}
    for block in blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        with set_checkpoint_early_stop(False):  # by exceptions, which hold memory for a while
            yield
    finally:
        for block, forward in before.items():
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the list of layers that has most parameters: those of a transformer."""
    lists = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    sizes = [sum(param.numel() for param in each.parameters()) for each in lists]
    return list(max(zip(sizes, lists, strict=True), key=itemgetter(0))[1]) if lists else []


def _is_on_gpu(model: nn.Module) -> bool:
    return all(param.is_cuda for param in model.parameters())


def _memory_of(model: nn.Module) -> list[tuple[object, ...]]:
    return [(id(each), each.data_ptr(), each.requires_grad) for each in model.parameters()]


def _shape_of(batch: Any, stored: Tensor | None) -> tuple[object, ...] | None:
    """Return the shape of a batch but for its number of rows, None where it has no rows."""
    if stored is None or anchors.length(batch) != len(stored):
        return None
    tensors = [*anchors.tensors_of(batch), stored]
    return tuple((each.shape[1:], each.dtype, each.device) for each in tensors)


def _require_own_rows(predict: Predict, batch: Any) -> None:
    """Refuse predictions for some rows that depend on what the other rows are."""
    count = max(1, (anchors.length(batch) or 0) // 2)
    whole, some = (predict(each) for each in (batch, anchors.part_of(batch, slice(count))))
    if isinstance(some, Tensor) and isinstance(whole, Tensor) and some.shape[1:] == whole.shape[1:]:
        expected = whole[:count].float()
        if (some.float() - expected).norm() <= _AGREES * expected.norm():
            return
    raise ValueError("predictions for some rows depend on the others")


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record what is done inside; where that fails, random numbers and memory are as before.

    It fails where the CPU waits for the GPU. Torch would then go on as if it were recording.
    """
    generator = torch.cuda.default_generators[stream.device_index]
    spare, pool = generator.clone_state(), torch.cuda.graph_pool_handle()
    current = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        torch.cuda.set_stream(current)
        generator.graphsafe_set_state(spare)
        with suppress(RuntimeError):  # where torch has done it
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        raise
