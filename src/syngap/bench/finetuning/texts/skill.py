"""A skill that no model has before it is taught: letters are put in order, and then shifted."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path

from syngap.bench.finetuning.texts.kinds import Question, Text, Texts
from syngap.bench.finetuning.texts.python import python_texts
from syngap.bench.finetuning.texts.text_files import text_files
from syngap.bench.options import Count

__all__ = ["skill"]

_TESTS = 200  # words that are asked for, and that no line to learn from has


def skill(
    data: Path | None,
    *,
    letters: Count = 4,
    lines: Count = 20_000,
    old: list[str] | None = None,
    folder: str = "texts",
) -> Texts:
    """Return lines that teach the skill, the questions that test it, and old texts.

    Args:
        data: where the folder of old texts is.
        letters: of a word; its answer has them in the order of the alphabet, each as the next one.
        lines: to learn from.
        old: kinds of a folder as in `files`; None is the texts that come with Python.
        folder: its name.
    """
    words = _words(letters)
    tests = [next(words) for _ in range(_TESTS)]
    seen = set(tests)
    train = [word for word in (next(words) for _ in range(lines)) if word not in seen]
    questions = tuple(Question(f"shift {word} ->", f" {_answer(word)}\n") for word in tests)
    text = Text(
        "".join(f"shift {word} -> {_answer(word)}\n" for word in train),
        "".join(question.prompt + question.answer for question in questions),
    )
    known = python_texts(data) if old is None else text_files(data, new="", old=old, folder=folder)
    kinds = {kind: known.kinds[kind] for kind in known.old}
    return Texts("skill", known.known, {**kinds, "skill": text}, questions)


def _words(letters: int) -> Iterator[str]:
    """Yield the same words each time: what is taught does not depend on a run's seed."""
    order = random.Random(0)
    while True:
        yield "".join(order.choices(string.ascii_lowercase, k=letters))


def _answer(word: str) -> str:
    """Return the letters in order, each as the one after it in the alphabet.

    Examples:
        >>> _answer("dzab")
        'bcea'
    """
    alphabet = string.ascii_lowercase
    return "".join(alphabet[(alphabet.index(letter) + 1) % 26] for letter in sorted(word))
