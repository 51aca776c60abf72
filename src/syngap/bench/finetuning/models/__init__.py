"""Models that are tuned: one file, one kind.

A model is a function of `Making` and of keyword-only options. A language model's returns a
`LanguageModel`, an encoder's an `Encoder`, a classifier's a `Classifier`. Another package adds one
by an entry point of the group "syngap.language_models", "syngap.encoders" or "syngap.classifiers".
What it reads from the folder of data is named by its options `file`, `folder` and `gguf`: what runs
share is made again where the contents of these change.
"""

from syngap.bench.finetuning.models.language_model import LanguageModel, Making
from syngap.bench.registry import Registry

__all__ = ["LanguageModel", "Making", "classifiers", "encoders", "registry"]

_HERE = "syngap.bench.finetuning.models"

registry = Registry(
    "model",
    "syngap.language_models",
    {"byte": f"{_HERE}.byte:byte_model", "causal_lm": f"{_HERE}.causal_lm:causal_lm"},
)
encoders = Registry(
    "encoder",
    "syngap.encoders",
    {"sentence_encoder": f"{_HERE}.encoder:sentence_encoder"},
)
classifiers = Registry(
    "classifier",
    "syngap.classifiers",
    {"efficientnet_lite0": f"{_HERE}.efficientnet_lite:efficientnet_lite0"},
)
