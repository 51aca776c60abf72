"""Rotated weights (the K-FAC eigenbasis), so that a gate scales down important directions.

A diagonal says little of weights that only matter together. For a linear layer y = W x the Fisher
matrix is close to A ⊗ B (K-FAC), where A is the second moment of x and B that of the gradient of
log p with respect to y. With their eigenvectors U and V, W = V W′ Uᵀ, and in the entries of W′ the
matrix is close to diagonal: each is how strongly one direction of inputs moves one of outputs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from syngap.optim.basis import is_sharded, note_plain, note_rotated
from syngap.optim.consolidation import Predict, Progress, predictions
from syngap.optim.scores import Prediction, read_prediction, score_sums

__all__ = ["rotate", "unrotate"]

Call: TypeAlias = tuple[str, Tensor, Tensor]  # name, input, output


class Rotation(nn.Module):
    """W = V W′ Uᵀ; a side that is not rotated has no matrix.

    Args:
        outer: V, orthogonal, or None.
        inner: U, likewise.
    """

    outer: Tensor | None
    inner: Tensor | None

    def __init__(self, outer: Tensor | None, inner: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("outer", outer)
        self.register_buffer("inner", inner)

    def forward(self, rotated: Tensor) -> Tensor:
        """Return the layer's weight."""
        return self._product(rotated, back=True)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the weight in the rotated basis."""
        return self._product(weight, back=False)

    def _product(self, matrix: Tensor, *, back: bool) -> Tensor:
        with torch.autocast(matrix.device.type, enabled=False):  # the basis has to stay orthogonal
            if self.outer is not None:
                matrix = (self.outer if back else self.outer.T) @ matrix
            if self.inner is not None:
                matrix = matrix @ (self.inner.T if back else self.inner)
        return matrix


def rotate(
    model: nn.Module,
    inputs: Tensor | Iterable[Any],
    *,
    sides: Literal["both", "inputs"] = "both",
    largest: int = 4096,
    batch_size: int = 32,
    predict: Predict | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Rotate the weights of linear layers into the K-FAC eigenbasis of `inputs`.

    The model computes what it did, and its parameters are the same objects with other values, in
    another order (a bias before its weight); an optimizer that has not stepped yet works on
    directions from then on, and SynGAP refuses to go on with what it knew of plain weights. Call it
    before `consolidate`, with the same inputs, and `unrotate` when training has ended and before
    the model is saved. Frozen weights, those that several modules share, and other kinds of layers
    stay as they are: look at the names that are returned.

    Args:
        model: has trainable `nn.Linear` layers, with weights in float32 or float64 (autocast is
            welcome).
        inputs: batches, or one tensor to be cut into batches, as for `SynGAP.consolidate`.
        sides: rotate "both" sides of a weight, or that of its "inputs" alone.
        largest: a side of more rows is not rotated; its matrix would have the square of them.
        batch_size: length of the batches cut from a tensor.
        predict: computes logits or a distribution from a batch in place of `model(batch)`.
        generator: source of the drawn labels (logits only: distributions draw by themselves).
        progress: called after each batch with the number done and, where known, of all.

    Returns:
        The names of the layers that were rotated.

    Examples:
        >>> from syngap import SynGAP
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> known = torch.randn(64, 4)
        >>> rotate(model, known)
        ['0', '2']
        >>> optimizer = SynGAP.wrap(torch.optim.AdamW(model.parameters()), consolidation=0.9)
        >>> optimizer.consolidate(model, known)
        >>> unrotate(model)  # after training
        ['0', '2']
    """
    if sides not in ("both", "inputs"):
        raise ValueError(f"sides must be 'both' or 'inputs', got {sides!r}")
    layers = _rotatable_layers(model)
    moments: dict[str, list[Tensor | None]] = {
        name: [_square(layer, side, largest, sides) for side in (0, 1)]
        for name, layer in layers.items()
    }
    if all(moment is None for pair in moments.values() for moment in pair):
        raise ValueError(f"every side of every layer is longer than largest={largest}")
    rows: Counter[str] = Counter()
    with _calls(layers) as calls:
        for prediction in predictions(
            model,
            inputs,
            batch_size=batch_size,
            predict=predict,
            progress=progress,
            generator=generator,
        ):
            read = read_prediction(prediction, generator=generator)
            rows.update(_gather(read, calls, moments))
            del prediction, read  # or their graph lives until the next one is whole
    seen = [name for name, pair in moments.items() if _has_any(pair)]
    if not seen:
        raise ValueError("rotate needs at least one batch whose predictions depend on a layer")
    if not all(_is_finite(pair) for pair in moments.values()):
        raise ValueError("what goes through the linear layers, or its gradient, is not finite")
    by_inputs = [name for name in seen if moments[name][1] is not None]
    thin = [name for name in by_inputs if rows[name] < layers[name].in_features]
    if thin:
        warnings.warn(
            f"rotate saw fewer rows than {len(thin)} of {len(seen)} layers have inputs (the first: "
            f"{thin[0]}, {rows[thin[0]]} of {layers[thin[0]].in_features}), so directions that "
            "matter may be taken to be free: give it more inputs",
            stacklevel=2,
        )
    rotations = {name: Rotation(*map(_directions, moments[name])) for name in seen}
    for name, rotation in rotations.items():  # none before all are found
        note_rotated(layers[name].weight)
        parametrize.register_parametrization(layers[name], "weight", rotation)
    return seen


def unrotate(model: nn.Module) -> list[str]:
    """Give a model that was rotated its plain weights back, as they are now.

    Its parameters stay the same objects, with other values: an optimizer that went on with them
    would have momentum and importance of directions, so make a new one; SynGAP insists.

    Returns:
        The names of the layers that were rotated, none where the model was not.
    """
    found = []
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            rotations = list(module.get_submodule("parametrizations.weight").children())
            if len(rotations) > 1 and any(isinstance(one, Rotation) for one in rotations):
                raise ValueError(f"{name} has another parametrization with its rotation: remove it")
            if isinstance(rotations[0], Rotation):
                # Copies of a module have its class in common, and would lose their weight with it.
                kind = type(module)
                module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
                parametrize.remove_parametrizations(module, "weight")
                note_plain(module.weight)
                if "bias" in module._parameters:  # behind the weight, as it was
                    module._parameters["bias"] = module._parameters.pop("bias")
                found.append(name)
    return found


def _rotatable_layers(model: nn.Module) -> dict[str, nn.Linear]:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("rotate the model before DDP wraps it, which gives all processes the same")
    owners: Counter[Tensor | None] = Counter()
    for module in model.modules():
        owners.update(module._parameters.values())
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not parametrize.is_parametrized(module, "weight")
    }
    found = {
        name: layer
        for name, layer in linear.items()
        if layer.weight.requires_grad and owners[layer.weight] == 1
    }
    if any(isinstance(module, Rotation) for module in model.modules()):
        raise ValueError("the model is rotated already: unrotate(model), then rotate it again")
    if not linear:
        raise ValueError(
            "the model has no nn.Linear, and others cannot be rotated: use consolidate alone"
        )
    if not found:
        raise ValueError(
            "every nn.Linear is frozen or shares its weight with another module, so there is none "
            "to rotate: unfreeze first, or use consolidate alone"
        )
    for name, layer in found.items():
        if is_sharded(layer.weight):
            raise ValueError(f"rotate needs whole weights, and those of {name} are sharded")
        if layer.weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"rotate would round the weights of {name}, which are {layer.weight.dtype}: load "
                "the model in float32 and train it under autocast"
            )
    return found


def _square(layer: nn.Linear, side: int, largest: int, sides: str) -> Tensor | None:
    rows = layer.weight.shape[side]
    if rows > largest or (side == 0 and sides == "inputs"):
        return None
    return torch.zeros(rows, rows, dtype=layer.weight.dtype, device=layer.weight.device)


def _has_any(pair: list[Tensor | None]) -> bool:
    return any(bool(moment.any()) for moment in pair if moment is not None)


def _is_finite(pair: list[Tensor | None]) -> bool:
    return all(bool(moment.isfinite().all()) for moment in pair if moment is not None)


def _gather(
    read: Prediction, calls: list[Call], moments: dict[str, list[Tensor | None]]
) -> Counter[str]:
    """Add a batch to the moments and return how many rows it had by layer.

    Those count that the prediction depends on: padding has no score.
    """
    counted: Counter[str] = Counter()
    noted = list(calls)
    scores = score_sums(read, [output for _, _, output in noted]) if noted else []
    calls.clear()  # also those of a checkpoint's recomputation
    for (name, entered, _), score in zip(noted, scores, strict=True):
        if score is not None:
            rows, deltas = (t.detach().reshape(-1, t.shape[-1]) for t in (entered, score))
            used = deltas.any(-1)
            outer, inner = moments[name]
            if outer is not None:  # a prediction counts alike in every batch
                _add(outer, deltas[used], weight=float(read.count))
            if inner is not None:
                _add(inner, rows[used])
            counted[name] += int(used.sum())
    return counted


def _add(moment: Tensor, rows: Tensor, weight: float = 1.0) -> None:
    rows = rows.to(moment)
    moment.addmm_(rows.T, rows, alpha=weight)


def _directions(moment: Tensor | None) -> Tensor | None:
    """Return eigenvectors as columns."""
    if moment is None:
        return None
    vectors: Tensor = torch.linalg.eigh(moment.double()).eigenvectors
    return vectors.to(moment.dtype).contiguous()


@contextmanager
def _calls(layers: dict[str, nn.Linear]) -> Iterator[list[Call]]:
    """Note every call of the layers: name, input, output."""
    calls: list[Call] = []

    def note(name: str) -> Any:
        def keep(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            if output.requires_grad:
                calls.append((name, args[0] if args else kwargs["input"], output))
            return output.clone()  # what follows may work in place

        return keep

    hooks = [
        layer.register_forward_hook(note(name), with_kwargs=True) for name, layer in layers.items()
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
