"""The comparison tool, installed by `pip install 'syngap[bench]'`.

- `streams`, `memory`, `methods`, `models`, `training`, `metrics`: what an experiment is made of
- `finetuning`: likewise of an experiment that compares fine-tuning methods
- `config`: an experiment as typed values; `store`: the files of runs and results
- `runner`: runs an experiment, here or on a cluster; `tuning`: chooses hyper-parameters
- `landscapes`: loss surfaces; `reporting`: tables, figures and pages
- `api`: all of it from Python, which this module offers; `cli`: the command
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["load", "report", "reproduce", "run", "tune"]

if TYPE_CHECKING:
    from syngap.bench.api import load, report, reproduce, run, tune
else:

    def __getattr__(name):
        """Import the interface when it is asked for, so that `syngap --help` needs no torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("syngap.bench.api"), name)

    def __dir__():
        return sorted({*globals(), *__all__})
