"""Blocks that run again in the backward pass, for less memory (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from syngap.optim.checks import is_compiled
from syngap.optim.predictions import in_eval_mode
from syngap.optim.tensors import is_sharded

__all__ = ["blocks_of", "blocks_of_large", "is_large", "recomputed"]

LARGE = 1 << 31  # bytes of gradients from which on the teacher has none of its own


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the list of layers that has most parameters: those of a transformer."""
    lists = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    sizes = [sum(param.numel() for param in each.parameters()) for each in lists]
    if not lists:
        return []
    _, largest = max(zip(sizes, lists, strict=True), key=itemgetter(0))
    used = dict.fromkeys(largest)  # each once, also where a block is used again and again
    return [block for block in used if any(True for _ in block.parameters())]


def is_large(model: nn.Module) -> bool:
    """Return whether the gradients of a model take much memory."""
    return sum(param.nbytes for param in model.parameters() if param.requires_grad) > LARGE


def blocks_of_large(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model whose gradients take much memory, none of a smaller one.

    Nor are there any under FSDP2, which frees weights. A compiled model is one block, so as not to
    be compiled again.
    """
    if not is_large(model) or any(map(is_sharded, model.parameters())):
        return []
    return [model] if any(map(is_compiled, model.modules())) else blocks_of(model) or [model]


@contextmanager
def recomputed(
    blocks: Sequence[nn.Module], model: nn.Module, *, later: bool = True
) -> Iterator[None]:
    """Let blocks keep their inputs alone for the backward pass, and run again there.

    Models of transformers keep no keys and values meanwhile, to which a second run would add.

    Args:
        blocks: of the model.
        model: the model.
        later: False where the backward pass follows at once, as in a CUDA graph; else random
            numbers and buffers may have changed by then, and are for a while what they were.
    """
    before = {block: vars(block).get("forward") for block in blocks}
    modules = model.modules() if blocks else ()
    configs: list[Any] = [getattr(each, "config", None) for each in modules]
    caching = [each for each in configs if getattr(each, "use_cache", None) is True]
    for block in blocks:
        block.forward = partial(_checkpointed, block, block.forward, later)
    for config in caching:
        config.use_cache = False
    try:
        with set_checkpoint_early_stop(False):  # by exceptions, which hold memory for a while
            yield
    finally:
        for block, forward in before.items():
            if forward is None:
                del block.forward
            else:
                block.forward = forward
        for config in caching:
            config.use_cache = True


def _checkpointed(
    block: nn.Module, forward: Callable[..., Any], later: bool, *args: Any, **kwargs: Any
) -> Any:
    params: list[Tensor] = list(block.parameters())
    versions = [param._version for param in params]
    averages = _averages_of(block) if later else []

    def run(*args: Any) -> Any:  # without kwargs, of which checkpoint would take some
        if versions != [param._version for param in params]:
            raise RuntimeError(
                "weights were changed between protection.loss() and backward(): call backward() "
                "before the optimizer's step"
            )
        # In the backward pass the model may be in train mode again.
        with in_eval_mode(block), _with_buffers(averages):
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=later)


def _averages_of(block: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Return copies of the buffers that a forward pass may change, and where they belong."""
    return [
        (module._buffers, name, buffer.detach().clone())
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]


@contextmanager
def _with_buffers(values: Sequence[tuple[dict[str, Tensor | None], str, Tensor]]) -> Iterator[None]:
    """Let modules have other tensors for buffers for a while."""
    now = [(buffers, name, buffers[name]) for buffers, name, _ in values]
    for buffers, name, value in values:
        buffers[name] = value
    try:
        yield
    finally:
        for buffers, name, buffer in now:
            buffers[name] = buffer
