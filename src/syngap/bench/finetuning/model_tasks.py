"""What can be compared on: language models, encoders and classifiers.

An experiment says which by the key of its data: `texts`, `pairs` or `images`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from syngap.bench.finetuning import images, models, texts
from syngap.bench.finetuning.classifier_setting import ClassifierSetting
from syngap.bench.finetuning.encoder_setting import EncoderSetting
from syngap.bench.finetuning.language_setting import LanguageSetting
from syngap.bench.finetuning.setting import Setting
from syngap.bench.registry import Registry

__all__ = ["TASKS", "ModelTask", "task_in"]


@dataclass(frozen=True)
class ModelTask:
    """A kind of model, its data, and how results are named.

    Args:
        key: of the data in YAML.
        sources: of data.
        models: that can be tuned.
        make_setting: from a model, what it was made from, and options.
        anchors: where anchors can come from, the usual source first.
        old: what tables call old data.
        exact: what tables call the share of right answers.
        rise: what forgetting is the rise of.
        gain_unit: of the new loss.
        forgetting_unit: of forgetting.
    """

    key: str
    sources: Registry
    models: Registry
    make_setting: Callable[..., Setting]
    anchors: tuple[str, ...]
    old: str
    exact: str
    rise: str
    gain_unit: str
    forgetting_unit: str


TASKS = {
    task.key: task
    for task in (
        ModelTask(
            "texts",
            texts.registry,
            models.registry,
            LanguageSetting,
            ("own", "text"),
            old="old text",
            exact="exact match",
            rise="the loss on old text",
            gain_unit="nats a token",
            forgetting_unit="nats a token",
        ),
        ModelTask(
            "pairs",
            texts.registry,
            models.encoders,
            EncoderSetting,
            ("text",),
            old="old text",
            exact="pairs found",
            rise="1 - Spearman's correlation of similarities between old texts, at the start and "
            "now",
            gain_unit="nats a pair",
            forgetting_unit="1 - Spearman's correlation",
        ),
        ModelTask(
            "images",
            images.registry,
            models.classifiers,
            ClassifierSetting,
            ("images",),
            old="old images",
            exact="accuracy",
            rise="the cross-entropy on old images",
            gain_unit="nats an image",
            forgetting_unit="nats an image",
        ),
    )
}


def task_in(entries: Mapping[str, Any]) -> ModelTask | None:
    """Return the task whose data a configuration names; None where it is no fine-tuning.

    Examples:
        >>> task_in({"pairs": {"name": "files"}}).exact
        'pairs found'
    """
    return next((TASKS[key] for key in TASKS if key in entries), None)
