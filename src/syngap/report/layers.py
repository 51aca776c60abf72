"""Importance and plasticity of each tensor after each task: the rows of a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syngap.experiments.folder import Run
from syngap.report.series import Curve, importance_curve, plasticity_curve

__all__ = ["Layers", "is_weight", "layers", "title"]


@dataclass(frozen=True)
class Layers:
    """What tensors were like after each task, from the input to the output.

    Args:
        names: of the tensors.
        importance: by tensor and task, as a multiple of the network's mean; None where it is
            unknown.
        plasticity: by tensor and task, mean over the tensor.
    """

    names: list[str]
    importance: list[list[float]] | None
    plasticity: list[list[float]]

    def only(self, names: Sequence[str]) -> Layers:
        """Return the same for some of the tensors."""
        places = [self.names.index(name) for name in names]
        some = None if self.importance is None else [self.importance[place] for place in places]
        return Layers(list(names), some, [self.plasticity[place] for place in places])


def layers(runs: Sequence[Run]) -> Layers | None:
    """Return the tensors of a row's runs, averaged over those that tell of them."""
    plasticity = plasticity_curve(runs)
    if plasticity is None:
        return None
    gated = _after_tasks(plasticity)
    names = [name for name in gated if name]
    importance = importance_curve(runs)
    weighed = _after_tasks(importance) if importance else {}
    known = all(name in weighed for name in [*names, ""]) and all(weighed.get("", [0.0]))
    return Layers(
        names,
        [_shares(weighed[name], weighed[""]) for name in names] if known else None,
        [gated[name] for name in names],
    )


def is_weight(name: str) -> bool:
    """Return whether a tensor's name is that of a layer's weights, not of its bias or of a norm.

    Examples:
        >>> [is_weight(name) for name in ("stem.conv.weight", "stem.norm.weight", "head.bias")]
        [True, False, False]
    """
    module, _, last = name.rpartition(".")
    words = module.lower()
    return last == "weight" and "norm" not in words and "bn" not in words


def title(name: str) -> str:
    """Return a tensor's name as it is shown: a layer's for its weights, where it has one.

    Examples:
        >>> title("stem.conv.weight"), title("stem.norm.weight"), title("0.weight")
        ('stem.conv', 'stem.norm.weight', '0.weight')
    """
    layer = name.removesuffix(".weight")
    return layer if is_weight(name) and not layer.isdigit() else name


def _after_tasks(curve: Curve) -> dict[str, list[float]]:
    """Return tensor → its mean after each task."""
    ends = [place for place, at in enumerate(curve.places) if at and at == int(at)]
    return {
        name[: -len("/mean")]: [band.mean[end] for end in ends]
        for name, band in curve.lines.items()
        if name.endswith("/mean")
    }


def _shares(values: Sequence[float], of: Sequence[float]) -> list[float]:
    return [value / whole for value, whole in zip(values, of, strict=True)]
