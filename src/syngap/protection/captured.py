"""The teacher's pass as a CUDA graph.

The Python that starts the kernels of a forward and backward pass often takes longer than the GPU
that runs them. The teacher's pass is the same at each step, so it is recorded once, for a few rows
of known inputs at a time, and then replayed: that takes next to no time of the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import functional_call
from torch.nn.modules import module as torch_modules

from syngap.optim.consolidation import Predict, in_eval_mode
from syngap.optim.tensors import alike, wide
from syngap.protection import anchors
from syngap.protection.answers import weighted_divergence

__all__ = ["CapturedPass", "capture", "leaves_of", "nodes_of"]

PREDICTIONS = 512  # at a time: the memory that more would take is of no use to anything else
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
    except (RuntimeError, ValueError):  # it waits for the GPU, or memory is short
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
        for leaf in self._leaves.values():
            leaf.grad = torch.zeros_like(leaf)
        own = set(self._leaves.values())
        if not own.issuperset(leaves_of(nodes_of(self._loss()))):
            raise ValueError("predictions depend on parameters that are not the model's")
        self._play = self._recorded(some.device) if some.is_cuda else self._pass

    def fits(self, model: nn.Module) -> bool:
        """Return whether the model runs as it did, with its parameters in the same memory."""
        return self._mark == _memory_of(model) and _is_plain(model)

    def run(self, batch: Any, stored: Tensor, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return KL on a batch and the gradients of `params`, which the next run writes to.

        Args:
            batch: of known inputs.
            stored: of the former answers to it.
            weights: of each prediction in the sum.
        """
        gradients = [leaf.grad for leaf in self._leaves.values() if leaf.grad is not None]
        for some in alike([*gradients, self._total]):
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
        return self._total, gradients

    # Whose gradients are in memory.

    @property
    def is_free(self) -> bool:
        """Whether no backward pass still needs the gradients of the last run."""
        return self._holder is None or self._holder() is None

    def hold(self, holder: Any) -> int:
        """Keep the gradients of this run for an object, as long as it lives; return its number."""
        self._number, self._holder = self._number + 1, weakref.ref(holder)
        return self._number

    def release(self, number: int) -> None:
        """Let the next run have the memory of the gradients; refuse where it had it already."""
        if number != self._number:
            raise RuntimeError(
                "the gradient of this protection.loss() is gone, because loss() was called again "
                "since: call backward() once for each, or before the next"
            )
        self._holder = None

    # The graph.

    def _loss(self) -> Tensor:
        with torch.enable_grad(), in_eval_mode(self._model):
            now = functional_call(self._module, self._leaves, (self._batch,))
            return weighted_divergence(now, self._answer(self._stored), self._weights)

    def _pass(self) -> None:
        loss = self._loss()
        loss.backward(inputs=list(self._leaves.values()))  # type: ignore[no-untyped-call]
        self._total.add_(loss.detach())

    def _recorded(self, device: torch.device) -> Callable[[], None]:
        """Return the replay of a pass."""
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream), _waiting_refused():
                for _ in range(2):  # in which libraries choose their kernels
                    self._pass()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            torch.clear_autocast_cache()  # else weights that were cast before would be taken
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._pass()
            torch.clear_autocast_cache()
        return graph.replay


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
def _waiting_refused() -> Iterator[None]:
    """Raise where the CPU waits for the GPU, which a graph cannot hold."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
