"""Packages that not everybody needs: imported when asked for, and named where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from syngap.errors import UserError

__all__ = ["needed"]


def needed(module: str, extra: str) -> Any:
    """Import and return `module`; UserError with the extra that brings it where it is missing.

    Examples:
        >>> needed("json.decoder", "ray").__name__
        'json.decoder'
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"{extra}: {error}; pip install 'syngap[{extra}]' brings it") from error
