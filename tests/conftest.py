"""Settings shared by every test."""

from __future__ import annotations

import gc
import os
from functools import cache
from typing import Any

# Tests run in parallel processes, which would otherwise compete for the same cores. What tests
# start inherits it. It is set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# For each kind of device that is not there torch notes the seed, and the text of the whole stack.
for absent in (torch.cuda, torch.xpu, torch.mtia):
    if not absent.is_available():
        absent.manual_seed_all = lambda seed: None  # type: ignore[assignment]

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_finish() -> None:
    """What tests and torch are made of stays: whoever collects garbage need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all cases of a test to one worker, and all tests of a file that names an `xdist_group`.

    What they prepare or compile takes long. pytest-xdist's own groups need pytest < 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def is_group(file: str) -> bool:
        path = config.rootpath / file
        return path.suffix == ".py" and "mark.xdist_group(" in path.read_text(encoding="utf-8")

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if is_group(file) else nodeid.partition("[")[0]

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            # After each test all units of a worker are counted, so those that are done go.
            units = self.assigned_work[node]
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(units[scope].values()):
                del units[scope]

    return Scheduler(config, log)
