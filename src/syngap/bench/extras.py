"""Optional packages: imported on use, with an error that names the extra to install."""

from __future__ import annotations

from typing import Any

from syngap.bench.registry import import_or_refuse

__all__ = ["import_extra"]


def import_extra(module: str, extra: str) -> Any:
    """Import and return `module`; UserError with the extra to install, or why it fails.

    Examples:
        >>> import_extra("json.decoder", "ray").__name__
        'json.decoder'
    """
    return import_or_refuse(module, extra, f"pip install 'syngap[{extra}]'")
