"""A tiny language model that knows two kinds of text, and points and runs made by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from syngap.bench.finetuning.models import LanguageModel, Making
from syngap.bench.finetuning.models.byte import byte_model
from syngap.bench.finetuning.models.language_model import share_nothing
from syngap.bench.finetuning.point import Point
from syngap.bench.finetuning.setting import Anchors, Setting
from syngap.bench.finetuning.texts.python import python_texts

__all__ = ["EXPERIMENT", "point", "setting"]

EXPERIMENT: dict[str, Any] = {
    "name": "tiny",
    "texts": {"name": "python", "characters": 4000},
    "model": {
        "name": "byte",
        "width": 8,
        "layers": 2,
        "heads": 2,
        "context": 16,
        "pretrain": 10,
        "pretrain_batch": 8,
        "pretrain_lr": 0.01,
    },
    "anchors": {"count": 4},
    "training": {
        "steps": 4,
        "batch": 2,
        "warmup": 2,
        "evaluations": 2,
        "shares": [1.0, 0.5],
        "windows": 4,
        "device": "cpu",
        "checkpoint_seconds": 0.0,
    },
    "methods": {"adamw": {"lr": [0.003, 0.01]}, "kl": {"lr": [0.003, 0.01]}},
    "seeds": [0],
}


@cache
def _language() -> tuple[LanguageModel, Making]:
    texts = python_texts(None, characters=4000)
    making = Making(texts, 0, torch.device("cpu"), None, share_nothing)
    options = {key: value for key, value in EXPERIMENT["model"].items() if key != "name"}
    return byte_model(making, **options), making


def setting(**anchors: Any) -> Setting:
    """Return a setting with a model of two blocks; the model is the same object each time."""
    language, making = _language()
    return Setting(language, making, anchors=Anchors(**{"count": 4, **anchors}), windows=4)


def point(
    new: float,
    old: float,
    *,
    shift: float = 0.0,
    share: float = 1.0,
    step: int = 200,
    seconds: float = 2.0,
) -> Point:
    """Return a point whose second half of the old text is harder by `shift`."""
    return Point(step, share, (new, new), {"english": (old, old + shift)}, seconds, 0.5, 0)
