"""Runs that share a GPU: a daemon of their own, told by a program that stands in for NVIDIA's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from syngap.bench.runner import mps as sharing

PIPES = "CUDA_MPS_PIPE_DIRECTORY"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, on a machine where no daemon runs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(sharing, "_USUAL", tmp_path / "nowhere")
    return folder


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def control(folder: Path, log: Path, code: int = 0) -> None:
    told = f'if [ "$1" = -d ]; then echo "start ${PIPES}"; else cat; fi >> {log}; exit {code}'
    program(folder, "nvidia-cuda-mps-control", told)


def test_a_daemon_is_started_and_ended_and_leaves_nothing(programs: Path, tmp_path: Path) -> None:
    control(programs, tmp_path / "log")
    with sharing.mps_daemon() as shared:
        assert shared
        place = os.environ[PIPES]
        assert Path(place).is_dir()
    assert (tmp_path / "log").read_text() == f"start {place}\nquit\n"
    assert PIPES not in os.environ
    assert not Path(place).exists()


def test_it_ends_with_an_error_too(programs: Path, tmp_path: Path) -> None:
    control(programs, tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), sharing.mps_daemon():
        raise KeyboardInterrupt
    assert (tmp_path / "log").read_text().endswith("quit\n")


def test_one_that_does_not_start_is_not_missed(programs: Path, tmp_path: Path) -> None:
    control(programs, tmp_path / "log", code=1)
    with sharing.mps_daemon() as shared:
        assert not shared
    assert "quit" not in (tmp_path / "log").read_text()


def test_one_that_runs_already_is_left_alone(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control(programs, tmp_path / "log")
    (tmp_path / "control").touch()
    monkeypatch.setenv(PIPES, str(tmp_path))
    with sharing.mps_daemon() as shared:
        assert shared
        assert os.environ[PIPES] == str(tmp_path)
    assert not (tmp_path / "log").exists()
    assert sharing.runs_per_gpu(cores=16) == 7


@pytest.mark.parametrize(
    ("cores", "memory", "fit"),
    [
        (16, "143771", 7),
        (4, "143771", 2),
        (1, "143771", 1),
        (16, "8192", 2),
        (16, "143771\n6144", 2),
    ],
)
def test_as_many_as_cores_and_memory_allow(
    cores: int, memory: str, fit: int, programs: Path, tmp_path: Path
) -> None:
    control(programs, tmp_path / "log")
    program(programs, "nvidia-smi", f"printf '{memory}'")
    assert sharing.runs_per_gpu(cores) == fit


def test_without_the_service_there_is_one(programs: Path) -> None:
    assert sharing.runs_per_gpu(cores=16) == 1
    with sharing.mps_daemon() as shared:
        assert not shared
