"""Texts that come with Python itself: nothing is fetched, so a demonstration runs anywhere."""

from __future__ import annotations

import ast
import codecs
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from syngap.bench.finetuning.texts.kinds import Text, Texts
from syngap.bench.options import Count

__all__ = ["python_texts"]

_PACKAGES = ("json", "logging", "unittest")


def python_texts(
    data: Path | None,
    *,
    new: Literal["rot13", "docstrings"] = "rot13",
    known: Literal["manual", "code"] = "manual",
    characters: Count = 200_000,
) -> Texts:
    """Return the language reference and code as old texts, and one more kind to learn.

    Args:
        data: not needed.
        new: "rot13", a far shift: the second half of the reference with each letter moved by 13;
            "docstrings", a near one: those of the standard library.
        known: the kind of the anchors, where they are not own samples.
        characters: of each kind at most, a tenth of them to test on.
    """
    reference = _reference()
    middle = len(reference) // 2
    sources = {
        "manual": reference[:middle],
        "code": _code(),
        new: codecs.encode(reference[middle:], "rot13") if new == "rot13" else _docstrings(),
    }
    kinds = {kind: _split(source[:characters]) for kind, source in sources.items()}
    return Texts(new, known, kinds)


def _split(text: str) -> Text:
    end = len(text) - len(text) // 10
    return Text(text[:end], text[end:])


@cache
def _reference() -> str:
    """Return the topics of `help()`: prose about the language."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@cache
def _sources() -> tuple[str, ...]:
    return tuple(
        file.read_text(encoding="utf-8")
        for package in _PACKAGES
        for file in sorted(files(package).iterdir(), key=lambda file: file.name)
        if file.name.endswith(".py")
    )


_Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def _code() -> str:
    """Return the sources of some packages without docstrings and comments."""
    return "\n\n".join(ast.unparse(_without_docstrings(source)) for source in _sources())


def _without_docstrings(source: str) -> ast.Module:
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(node, _Documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return module


@cache
def _docstrings() -> str:
    found = [
        text
        for source in _sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, _Documented) and (text := ast.get_docstring(node)) is not None
    ]
    return "\n\n".join(found)
