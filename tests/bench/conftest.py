"""Fixtures shared by the tests of the comparison tool."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
from tiny import yaml_composed_once

IMPORTED = ["syngap.bench.runner.local", "syngap.bench.streams.arrays", "torch._dynamo", "pytest"]


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes that begin with all imports done; those of a user spend seconds on them."""
    workers = multiprocessing.get_context("forkserver")
    workers.set_forkserver_preload(IMPORTED)
    first = workers.Process(target=int)
    first.start()
    first.join()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: workers)


@pytest.fixture(autouse=True, scope="session")
def quick_yaml() -> Iterator[None]:
    """What a text of YAML consists of is found once."""
    with yaml_composed_once():
        yield
