"""Words that only this project would understand, and what to write instead.

`make lint` runs this file; `tests/project/test_repository.py` calls it. Words are looked for in
prose, with word boundaries, in any case, and over the ends of lines; names among those that code
defines.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from checkout import ROOT

PLACES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml"),
    *("docs", "src", "examples", "research", "benchmarks", "results/README.md"),
)
KINDS = {".md", ".py", ".ipynb", ".yaml", ".yml", ".toml", ".js", ".html", ".css"}
WORDS = {
    "turned": "rotated (into the K-FAC eigenbasis), or switched on or off",
    "way back": "interpolation of the weights with the start (WiSE-FT)",
    "on the way": "during training",
    "told apart": "significantly different, or distinguished",
    "tell apart": "distinguish, or no significant difference",
    "tells apart": "distinguishes",
    "told": "says, reports, gets, or is called with",
    "heard": "reported, or makes no progress",
    "judge": "evaluate, or an evaluator",
    "judged": "evaluated",
    "spoilt": "not finite, or damaged",
    "served": "accepted, or run",
    "lasting": "permanent, or a snapshot",
    "the rooms": "components, or packages",
    "the house": "the package, or the project",
    "over AdamW's": "relative to AdamW",
    "level with": "no significant difference from",
    "closes directions": "scales down updates along important directions",
    "close directions": "scale down updates along important directions",
    "bear out": "confirm",
}
NAMES = {
    "asked": "query, or selected",
    "given": "raw, options, or what the value is",
    "told": "message, or expected",
    "heard": "events",
    "judged": "evaluated",
    "spoilt": "has_nonfinite_grads, or damaged",
    "held": "saved, or snapshot",
    "lasting": "snapshot",
    "served": "accepted",
}


class Finding(NamedTuple):
    """A word, where it stands, and what to write instead."""

    file: str
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f'{self.file}:{self.line}: "{self.word}": write {self.instead}'


def in_prose(text: str, file: str, words: Mapping[str, str] = WORDS) -> Iterator[Finding]:
    """Yield the words of `words` in `text`; where one holds another, the longer one alone."""
    longest = sorted(words, key=len, reverse=True)
    parts = (r"[\s_#*]+".join(map(re.escape, word.split())) for word in longest)
    for found in re.finditer(rf"(?<![^\W_])({'|'.join(parts)})(?![^\W_])", text, re.IGNORECASE):
        word = " ".join(re.split(r"[\s_#*]+", found[0]))
        instead = next(words[one] for one in words if one.lower() == word.lower())
        yield Finding(file, text.count("\n", 0, found.start()) + 1, word, instead)


def in_code(text: str, file: str) -> Iterator[Finding]:
    """Yield the names of `NAMES` that Python code defines."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case _:
                continue
        assert isinstance(node, (ast.expr, ast.stmt, ast.arg))
        if (instead := NAMES.get(name.strip("_").lower())) is not None:
            yield Finding(file, node.lineno, name, instead)


def findings(root: Path = ROOT) -> list[Finding]:
    """Return every such word and name in the files that people read."""
    found: list[Finding] = []
    for place in PLACES:
        whole = root / place
        files = [whole] if whole.is_file() else sorted(whole.rglob("*"))
        for path in files:
            file = path.relative_to(root).as_posix()
            if path.suffix not in KINDS or not path.is_file():
                continue
            text = path.read_text(encoding="utf-8")
            found += in_prose(text, file)
            if path.suffix == ".py":
                found += in_code(text, file)
    return found


if __name__ == "__main__":
    lines = [str(finding) for finding in findings()]
    sys.exit("\n".join(lines) if lines else None)
