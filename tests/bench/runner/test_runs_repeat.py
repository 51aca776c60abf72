"""The same seed gives the same R and the same weights again; another does not.

That it does not matter which process does a run, and after which others, is in
training/test_determinism.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from tiny import RESULTS, job, results

from syngap.bench.runner.local import run_here
from syngap.bench.runner.run import stream_of

Found: TypeAlias = dict[str, dict[str, bytes]]

ROWS = ("er", "syngap")
SEEDS = (0, 1)
SETTINGS = ("methods.syngap={lr: 1.0, buffer: 20, replay: 10}", "training.evaluate_every=2")


def here(folder: Path, *settings: str) -> Found:
    """Do every run in this process, one after the other."""
    for row in ROWS:
        for seed in SEEDS:
            run_here(job(folder / f"{row}-{seed}", *settings, row=row, seed=seed))
    return found(folder)


def found(folder: Path) -> Found:
    names = [f"{row}-{seed}" for row in ROWS for seed in SEEDS]
    return {name: results(folder / name) for name in names}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_results_again_and_another_seed_others(
    tmp_path: Path,
) -> None:
    once = here(tmp_path / "once", *SETTINGS)
    torch.manual_seed(1234)  # what happened in this process before is no part of a run
    torch.rand(7)
    assert here(tmp_path / "again", *SETTINGS) == once
    for row in ROWS:
        for name in RESULTS:
            assert once[f"{row}-0"][name] != once[f"{row}-1"][name], (row, name)


def test_the_seed_orders_the_stream(tmp_path: Path) -> None:
    first, same, other = (
        stream_of(job(tmp_path, "stream.first=", seed=seed).config, None) for seed in (0, 0, 1)
    )
    assert first.class_task is not None
    assert same.class_task is not None
    assert other.class_task is not None
    assert torch.equal(first.class_task, same.class_task)
    assert not torch.equal(first.class_task, other.class_task)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_is_that_of_the_experiment(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum depends in its last bits on how many there are."""
    monkeypatch.setattr("syngap.bench.store.folder_writer._TELL_EVERY", 0.0)
    before, found = torch.get_num_threads(), []
    settings = f"training.threads={threads}", "model.hidden=[300]"
    run_here(job(tmp_path / "once", *settings), lambda *_: found.append(torch.get_num_threads()))
    assert set(found) == {threads}
    assert torch.get_num_threads() == before
    run_here(job(tmp_path / "again", *settings))
    assert results(tmp_path / "again") == results(tmp_path / "once")
