"""Running a model over unlabelled inputs without leaving a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.messages import count_of

__all__ = [
    "Predict",
    "Progress",
    "as_it_was",
    "call",
    "in_eval_mode",
    "inputs_alone",
    "predictions",
]

Predict: TypeAlias = Callable[[Any], "Tensor | Distribution"]
Progress: TypeAlias = Callable[[int, "int | None"], None]


def predictions(
    model: nn.Module,
    inputs: Tensor | Iterable[Any],
    *,
    batch_size: int,
    predict: Predict | None,
    progress: Progress | None,
    generator: torch.Generator | None,
    during: AbstractContextManager[Any] | None = None,
) -> Iterator[Tensor | Distribution]:
    """Yield the model's differentiable predictions, in eval mode, batch by batch.

    Modes, buffers and random states are afterwards what they were, also if it is stopped early.
    `during` is entered for each forward pass.
    """
    batches = torch.split(inputs, batch_size) if isinstance(inputs, Tensor) else inputs
    total = len(batches) if isinstance(batches, Sized) else None
    done = 0
    with as_it_was(model, generator):
        for done, batch in enumerate(batches, start=1):
            with torch.enable_grad(), during or nullcontext():
                prediction = predict(batch) if predict else call(model, batch)
            yield prediction
            del prediction
            if progress is not None:
                progress(done, total)
    if not done:
        raise ValueError("at least one batch is needed: inputs are empty, or were used up before")


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model without dropout, and with the statistics that its normalisation has learned."""
    modes = [module for module in model.modules() if module.training]
    _set_training(modes, False)
    try:
        yield
    finally:
        _set_training(modes, True)


def _set_training(modules: Iterable[nn.Module], training: bool) -> None:
    for module in modules:
        if "training" in vars(module):  # ten times as fast as through nn.Module
            vars(module)["training"] = training
        else:
            module.training = training


@contextmanager
def as_it_was(model: nn.Module, generator: torch.Generator | None) -> Iterator[None]:
    """Run a model in eval mode, and give modes, buffers and random states back."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    own_state = None if generator is None else generator.get_state()
    devices = {param.device for param in model.parameters() if param.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(devices, key=str)):
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        if generator is not None and own_state is not None:
            generator.set_state(own_state)


def inputs_alone(parts: int, name: str) -> str:
    """Return code that takes the inputs of batches which have labels too."""
    return f"[x for x, y in {name}]" if parts == 2 else f"[batch[0] for batch in {name}]"


def call(model: nn.Module, batch: Any) -> Any:
    """Return the prediction of a model for a batch: its output, or the logits of it."""
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        try:
            output = model(*batch)
        except TypeError as error:
            raise TypeError(
                f"the model did not take {count_of(len(batch), 'part')} of a batch as arguments "
                f"({error}); where some are labels, pass {inputs_alone(len(batch), 'inputs')}"
            ) from error
    else:
        output = model(batch)
    if isinstance(output, (Tensor, Distribution)):
        return output
    if isinstance(output, dict):
        return output.get("logits", output)
    return getattr(output, "logits", output)
