"""Language models that are tuned: one file, one kind.

A model is a function of `Making` and of keyword-only options that returns a `LanguageModel`.
Another package adds one by an entry point of the group "syngap.language_models".
"""

from syngap.bench.finetuning.models.language_model import LanguageModel, Making
from syngap.bench.registry import Registry

__all__ = ["LanguageModel", "Making", "registry"]

registry = Registry(
    "model",
    "syngap.language_models",
    {
        "byte": "syngap.bench.finetuning.models.byte:byte_model",
        "causal_lm": "syngap.bench.finetuning.models.causal_lm:causal_lm",
    },
)
