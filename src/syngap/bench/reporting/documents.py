"""Marked blocks in documents, filled with what the results give.

    <!-- results: curve table1-cifar100-shared -->
    (a table)
    <!-- end -->

    SynGAP ends at <!-- results: value table1-cifar100-shared syngap ACC -->34.3 ± 1.7<!-- end -->.

The words after "results:" are a query, see `queries`. Fenced code is left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from syngap.bench.config.reading import SMALL
from syngap.bench.errors import UserError
from syngap.bench.reporting.queries import run_query
from syngap.bench.reporting.results import Results
from syngap.bench.storage import read, write

__all__ = ["StaleBlock", "fill", "stale_blocks"]

_FENCED = re.compile(r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(
    r"<!--\s*(?:(?P<opens>(?i:results?)\s*:)(?P<query>.*?)|(?P<end>end)\s*)-->", re.DOTALL
)
_LINE_START = re.compile(r"[\s>]*(?:[-*+]|\d+[.)])?\s*")  # of a line, a quotation or a list's item


@dataclass(frozen=True)
class StaleBlock:
    """A block that does not hold what the results give: where it is, and the difference."""

    place: str
    query: str
    diff: str


@dataclass(frozen=True)
class _Block:
    query: str
    line: int
    begin: int  # of its content
    end: int
    in_a_line: bool


def fill(path: Path, results: Results) -> int:
    """Write what the results give into the blocks of a document; return how many are in it."""
    text, newline = _read(path)
    parts, done = [], 0
    contents = _contents(text, results, path)
    for block, content in contents:
        parts += [text[done : block.begin], content]
        done = block.end
    new = "".join([*parts, text[done:]])
    if new != text:
        write(path, new.replace("\n", newline).encode(), within=path.parent)
    return len(contents)


def stale_blocks(path: Path, results: Results) -> list[StaleBlock]:
    """Return the blocks of a document that do not hold what the results give."""
    text, _ = _read(path)
    found = []
    for block, content in _contents(text, results, path):
        now = text[block.begin : block.end]
        if now != content:
            a, b = (side.strip().splitlines() for side in (now, content))
            diff = unified_diff(a, b, str(path), str(results.folder), lineterm="")
            found.append(StaleBlock(f"{path}, line {block.line}", block.query, "\n".join(diff)))
    return found


def _contents(text: str, results: Results, where: Path) -> list[tuple[_Block, str]]:
    """Return every block with the content that the results give."""
    found = []
    for block in _blocks(text, str(where)):
        try:
            content = run_query(block.query, results).strip()
        except UserError as error:
            raise UserError(f"{where}, line {block.line}: {error}") from error
        found.append((block, content if block.in_a_line else f"\n\n{content}\n\n"))
    return found


def _blocks(text: str, where: str) -> list[_Block]:
    fences = [match.span() for match in _FENCED.finditer(text)]
    found: list[_Block] = []
    opening: re.Match[str] | None = None
    for mark in _MARK.finditer(text):
        if any(begin <= mark.start() < end for begin, end in fences):
            continue
        place = f"{where}, line {_line(text, mark.start())}"
        if mark["end"]:
            if opening is None:
                raise UserError(f"{place}: <!-- end --> without a beginning, <!-- results: … -->")
            found.append(_block(text, opening, mark, where))
            opening = None
        elif mark["opens"] != "results:":
            raise UserError(f'{place}: a block begins with "results:", not "{mark["opens"]}"')
        elif opening is not None:
            raise UserError(f"{place}: a block begins within another; <!-- end --> is missing")
        else:
            opening = mark
    if opening is not None:
        line = _line(text, opening.start())
        raise UserError(f"{where}, line {line}: the block has no <!-- end -->")
    return found


def _block(text: str, opening: re.Match[str], end: re.Match[str], where: str) -> _Block:
    line = _line(text, opening.start())
    in_a_line = not text[opening.end() :].startswith("\n")
    if in_a_line and _LINE_START.fullmatch(text[: opening.start()].rpartition("\n")[2]):
        raise UserError(
            f"{where}, line {line}: a line that begins with a comment is not Markdown; "
            "move the block within its line, or its content to a line of its own"
        )
    return _Block(" ".join(opening["query"].split()), line, opening.end(), end.start(), in_a_line)


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _read(path: Path) -> tuple[str, str]:
    """Return a document, and how its lines end."""
    try:
        text = read(path, SMALL).decode("utf-8")
        return text.replace("\r\n", "\n"), "\r\n" if "\r\n" in text else "\n"
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"{path}: cannot be read ({reason})") from error
