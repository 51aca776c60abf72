"""Files that nobody has to trust: plain, of a known size at most, and plain values in them.

A few hundred bytes of YAML can stand for more values than any memory holds, a pipe in the place of
a file is waited for without end, and a value that is nested deep enough exhausts the interpreter.
All of it is refused here, before anything is made of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from syngap.bench.errors import DamagedError, UserError
from syngap.bench.options import DEEPEST, plain, shown
from syngap.bench.storage import read

__all__ = [
    "FORMAT",
    "BoundedLoader",
    "check_format",
    "is_name",
    "json_in",
    "reading",
    "text_in",
    "yaml_in",
]

FORMAT = 1  # of what run folders hold
SMALL = 1 << 24  # bytes of a file that people could read
LARGE = 1 << 30  # bytes of a record of a long run
MOST_VALUES = 1 << 18  # in one YAML file, counted where they are used
LONGEST = 200  # letters of a reason


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")


def is_name(value: Any) -> bool:
    """Return whether `value` can name a folder, and no other than one where it is put.

    Examples:
        >>> is_name("table1-cifar100"), is_name("../x"), is_name("")
        (True, False, False)
    """
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def text_in(path: Path, most: int = SMALL) -> str:
    """Return the text in a plain file; UserError where it is another thing or larger than `most`.

    Raises:
        OSError: where it cannot be read.
        UnicodeDecodeError: where it is no text.
    """
    text = read(path, most).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def yaml_in(path: Path) -> dict[str, Any]:
    """Return the mapping in a file that syngap wrote; UserError where there is none."""
    with reading(path):
        return _mapping(yaml.load(text_in(path), BoundedLoader))  # a safe loader


def json_in(path: Path) -> dict[str, Any]:
    """Return the mapping in a file that syngap wrote; UserError where there is none."""
    with reading(path):
        return _mapping(json.loads(text_in(path)))


def check_format(found: Mapping[str, Any], where: Path | str, known: int = FORMAT) -> None:
    """Refuse what a newer syngap wrote: this one would not know what it does not understand.

    What does not say its format is from before formats were counted, and can be read.

    Args:
        found: what the file holds.
        where: the file.
        known: the format that is read here, and all before it.

    Examples:
        >>> check_format({"format": 2}, "runs/demo/experiment.yaml", known=1)
        Traceback (most recent call last):
        syngap.bench.errors.UserError: runs/demo/experiment.yaml: written by a newer syngap ...
    """
    said = found.get("format", 0)
    if isinstance(said, bool) or not isinstance(said, int):
        raise UserError(f"{where}: format: got {shown(said)}, expected a whole number")
    if said > known:
        raise UserError(
            f"{where}: written by a newer syngap (format {shown(said)}, this one reads {known}); "
            "upgrade syngap"
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while `path` is read into a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{path}: not as syngap wrote it ({_reason(error)})") from error
    except (RecursionError, yaml.YAMLError) as error:
        raise DamagedError(f"{path}: not as syngap wrote it ({_reason(error)})") from error


class BoundedLoader(yaml.SafeLoader):
    """YAML that stands for no more than it can be worth, whatever its aliases multiply."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        """Refuse a bracket that is too deep when it is met: to look for its end is quadratic."""
        if self.flow_level > DEEPEST:
            mark = self.get_mark()
            raise yaml.scanner.ScannerError(None, None, "values nested too deep", mark)
        super().fetch_flow_collection_start(token)

    def get_single_node(self) -> yaml.Node | None:
        """Return the document, having counted what it stands for."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _count(node, {}, 0) > MOST_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"it stands for more than {MOST_VALUES} values", node.start_mark
            )
        return node


def _count(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Return how many values a node stands for, each alias counted as what it refers to."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if known.get(id(node)) == 0 or depth > DEEPEST:
        what = "a value that holds itself" if depth <= DEEPEST else "values nested too deep"
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
    if id(node) not in known:
        known[id(node)] = 0  # until it is known
        pairs = isinstance(node, yaml.MappingNode)
        inner = [part for pair in node.value for part in pair] if pairs else node.value
        known[id(node)] = 1 + sum(_count(part, known, depth + 1) for part in inner)
    return known[id(node)]


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it holds no names with values")
    found: dict[str, Any] = plain(value)
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]!a} is missing"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
