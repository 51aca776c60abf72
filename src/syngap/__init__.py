"""SynGAP: metaplasticity as adaptive gradient preconditioning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["SynGAP", "__version__", "own_samples", "plasticity", "protect"]

if TYPE_CHECKING:
    from syngap.optim import SynGAP, plasticity
    from syngap.protection import own_samples, protect
else:
    _HOMES = {
        "SynGAP": "syngap.optim",
        "plasticity": "syngap.optim",
        "protect": "syngap.protection.protection",
        "own_samples": "syngap.protection.samples",
    }

    def __getattr__(name):
        """Import what is asked for when it is, so that `syngap --help` needs no torch."""
        if name == "optim":
            return import_module("syngap.optim")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(_HOMES[name]), name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})
