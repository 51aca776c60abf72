"""Texts of known kinds: what a model is to learn and what it is to keep. One file, one source.

A source is a function of the folder that data are in, and of keyword-only options; it returns
`Texts`. Another package adds one by an entry point of the group "syngap.texts".
"""

from syngap.bench.finetuning.texts.kinds import Question, Text, Texts
from syngap.bench.registry import Registry

__all__ = ["Question", "Text", "Texts", "registry"]

registry = Registry(
    "texts",
    "syngap.texts",
    {
        "python": "syngap.bench.finetuning.texts.python:python_texts",
        "skill": "syngap.bench.finetuning.texts.skill:skill",
        "files": "syngap.bench.finetuning.texts.text_files:text_files",
    },
)
