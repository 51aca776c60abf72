"""Packages that not everybody needs: imported when asked for, and named where they are missing."""

from __future__ import annotations

from typing import Any

from syngap.bench.registry import import_or_refuse

__all__ = ["needed"]


def needed(module: str, extra: str) -> Any:
    """Import and return `module`; UserError with the extra that brings it, or why it fails.

    Examples:
        >>> needed("json.decoder", "ray").__name__
        'json.decoder'
    """
    return import_or_refuse(module, extra, f"pip install 'syngap[{extra}]'")
