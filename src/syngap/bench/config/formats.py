"""The number of what run folders hold, and what is said where it is larger than ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syngap.bench.errors import UserError
from syngap.bench.options import shown

__all__ = ["FORMAT", "check_format"]

FORMAT = 1


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
