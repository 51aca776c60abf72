"""SynGAP: metaplasticity as adaptive gradient preconditioning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["SynGAP", "__version__", "plasticity", "rotate", "unrotate"]

if TYPE_CHECKING:
    from syngap.optim import SynGAP, plasticity, rotate, unrotate
else:

    def __getattr__(name):
        """Import the optimizer when it is asked for, so that `syngap --help` needs no torch."""
        if name not in ("optim", *__all__):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        optim = import_module("syngap.optim")
        globals()[name] = found = optim if name == "optim" else getattr(optim, name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})
