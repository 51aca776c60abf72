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
    "check_predict",
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
    check_predict(predict)
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
    """Run a model in eval mode, and give all that a forward pass may change back.

    That is modes, buffers, attributes of layers and random states. `eval()` is not called, in which
    some layers change their weights. The CPU holds a copy of all buffers meanwhile, which takes as
    much memory as they do. Versions of tensors cannot say which to copy back: batch normalisation
    and writes by `.data` do not raise them.
    """
    restore = _snapshot(model)
    own_state = None if generator is None else generator.get_state()
    devices = {param.device for param in model.parameters() if param.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(devices, key=str)), in_eval_mode(model):
            yield
    finally:
        restore()
        if generator is not None and own_state is not None:
            generator.set_state(own_state)


def _snapshot(model: nn.Module) -> Callable[[], None]:
    """Return what gives a model its attributes, buffers and renormalised embeddings back.

    Attributes go with buffers: a layer that enlarges one may note its length.
    """
    layers = [
        (module, _attributes(module), dict(module._buffers.items())) for module in model.modules()
    ]
    embeddings = [part for part, *_ in layers if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    normed = [part.weight for part in embeddings if part.max_norm is not None]
    values = [
        (tensor, tensor.data, _unexpanded(tensor.data).to("cpu", copy=True))
        for tensor in (*model.buffers(), *normed)
        if not tensor.is_meta
    ]

    def restore() -> None:
        for module, attributes, buffers in layers:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            if not isinstance(module, torch.jit.ScriptModule):  # which adds and deletes none
                module._buffers.clear()
            for name, buffer in buffers.items():
                module._buffers[name] = buffer
        for tensor, data, value in values:
            tensor.data = data
            _unexpanded(data).copy_(value)  # data, so that graphs made before remain valid

    return restore


def _attributes(module: nn.Module) -> dict[str, Any]:
    return vars(module) | {"_non_persistent_buffers_set": set(module._non_persistent_buffers_set)}


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a view that has each number of an expanded tensor once, so that it can be written."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]


def check_predict(predict: object) -> None:
    """Refuse what cannot predict."""
    if predict is not None and not callable(predict):
        raise ValueError(
            "predict must be a function that returns logits or a distribution for a batch, such as "
            f"lambda batch: model(batch).logits, got {predict!r}"
        )


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
