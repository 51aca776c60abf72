"""Settings shared by every test."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

# Tests run in parallel processes, which would otherwise compete for the same cores. What tests
# start inherits it. It is set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a file that names an `xdist_group` to one worker, the others one by one.

    What such a file prepares takes long. pytest-xdist's own groups need pytest < 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def is_group(file: str) -> bool:
        path = config.rootpath / file
        return path.suffix == ".py" and "mark.xdist_group(" in path.read_text(encoding="utf-8")

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if is_group(file) else nodeid

    return Scheduler(config, log)
