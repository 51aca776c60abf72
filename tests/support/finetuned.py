"""Tiny models that know something and learn something else, and points made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from syngap.bench.finetuning.classifier_setting import ClassifierSetting
from syngap.bench.finetuning.encoder_setting import EncoderSetting
from syngap.bench.finetuning.images import Images, Labelled
from syngap.bench.finetuning.language_setting import LanguageSetting
from syngap.bench.finetuning.models import LanguageModel, Making
from syngap.bench.finetuning.models.byte import Block, byte_model
from syngap.bench.finetuning.models.classifier import Classifier
from syngap.bench.finetuning.models.encoder import Encoder
from syngap.bench.finetuning.models.language_model import Shared
from syngap.bench.finetuning.point import Point
from syngap.bench.finetuning.setting import Anchors
from syngap.bench.finetuning.texts import Texts
from syngap.bench.finetuning.texts.python import python_texts
from syngap.bench.options import Count

__all__ = [
    "EXPERIMENT",
    "classifier_setting",
    "encoder_setting",
    "point",
    "setting",
    "share_nothing",
    "tiny_classifier",
    "tiny_encoder",
    "tiny_images",
]

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


def share_nothing(
    name: str, make: Callable[[], Mapping[str, Tensor]], *, any_seed: bool = False
) -> Shared:
    """Make tensors for one run alone."""
    return Shared(make(), 0.0)


@cache
def _language() -> tuple[LanguageModel, Making[Texts]]:
    texts = python_texts(None, characters=4000)
    making = Making(texts, 0, torch.device("cpu"), None, share_nothing)
    options = {key: value for key, value in EXPERIMENT["model"].items() if key != "name"}
    return byte_model(making, **options), making


def setting(**anchors: Any) -> LanguageSetting:
    """Return a setting with a model of two blocks; the model is the same object each time."""
    language, making = _language()
    return LanguageSetting(language, making, anchors=Anchors(**{"count": 4, **anchors}), windows=4)


# Encoders -----------------------------------------------------------------------------------------


class TinyEncoder(nn.Module):
    """Bytes, two blocks, and the mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 8)
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.tokens(tokens)
        for block in self.blocks:
            states = block(states)
        mask = (tokens != 0).unsqueeze(-1)
        return normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def tiny_encoder(making: Making[Texts], *, context: Count = 16) -> Encoder:
    """Return an encoder with random weights that sees the first bytes of a text."""
    torch.manual_seed(0)

    def encode(texts: Sequence[str]) -> Tensor:
        rows = [torch.tensor(list(text.encode()[:context])) for text in texts]
        padded = nn.utils.rnn.pad_sequence(rows, True)
        return nn.functional.pad(padded, (0, context - padded.shape[1]))

    return Encoder(TinyEncoder(), lambda model, tokens: model(tokens), encode, context)


def encoder_setting(*, anchors: int = 4, windows: int = 8, seed: int = 0) -> EncoderSetting:
    """Return a setting with a tiny encoder, which learns rot13."""
    texts = python_texts(None, characters=40_000)
    making = Making(texts, seed, torch.device("cpu"), None, share_nothing)
    given = Anchors(source="text", count=anchors)
    return EncoderSetting(tiny_encoder(making), making, anchors=given, windows=windows)


# Classifiers --------------------------------------------------------------------------------------


class TinyFeatures(nn.Module):
    """Two blocks of a convolution and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
                for channels in (3, 6)
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.blocks(images)
        return found.mean((2, 3))


def tiny_classifier(making: Making[Images]) -> Classifier:
    """Return a classifier of three classes with random weights."""
    torch.manual_seed(0)
    return Classifier(TinyFeatures(), nn.Linear(6, 3), lambda images: images.float() / 255)


def tiny_images(data: object = None) -> Images:
    """Return random images of two new classes, and of three that are known."""
    order = torch.Generator().manual_seed(0)

    def some(count: int, classes: int) -> Labelled:
        images = torch.randint(256, (count, 3, 6, 6), generator=order, dtype=torch.uint8)
        return Labelled(images, torch.arange(count) % classes)

    old = {"objects": some(10, 3), "animals": some(7, 3)}
    return Images(some(20, 2), some(12, 2), 2, some(8, 3), old)


def classifier_setting(*, anchors: int = 8, windows: int = 4) -> ClassifierSetting:
    """Return a setting with a tiny classifier that learns two classes."""
    making = Making(tiny_images(), 0, torch.device("cpu"), None, share_nothing)
    given = Anchors(source="images", count=anchors)
    return ClassifierSetting(tiny_classifier(making), making, anchors=given, windows=windows)


# Points -------------------------------------------------------------------------------------------


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
