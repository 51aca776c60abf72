"""What a notebook can do: run, tune, report and load experiments without the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table
from tiny import SEARCH, run_inline, tiny

from syngap import bench
from syngap.bench.errors import UserError
from syngap.bench.runner import local


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in whose process runs are done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "run_local", run_inline)
    return tmp_path


def test_an_experiment_runs_reports_and_is_loaded_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = bench.run(tiny(), methods=["er", "sgd"], seeds=range(2))
    assert [(run.row, run.seed) for run in runs.runs] == [
        (r, s) for r in ("sgd", "er") for s in (0, 1)
    ]
    assert not runs.failed
    assert isinstance(runs.table(), Table)
    assert runs.markdown().startswith("| method")
    assert runs.report(here / "page") == here / "page/index.html"
    assert (here / "page/index.html").stat().st_size > 0
    assert bench.load(runs.folder).markdown() == runs.markdown()
    assert bench.report(runs.folder) == runs.folder / "index.html"
    assert "4 of 4" in capsys.readouterr().err


def test_a_second_call_goes_on_with_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    bench.run(tiny(), methods=["sgd"], progress=False)
    assert capsys.readouterr().err == ""
    again = bench.run(tiny(), methods=["sgd", "er"])
    assert {run.row for run in again.runs} == {"sgd", "er"}
    assert "1 of 2 runs already done" in capsys.readouterr().err


def test_a_search_chooses_values(here: Path) -> None:
    tuned = bench.tune({**tiny(), "search": SEARCH}, methods=["sgd"], trials=1, progress=False)
    assert tuned.experiment.is_file()
    assert isinstance(tuned.table(), Table)


def test_mistakes_are_one_line_before_anything_is_written(here: Path) -> None:
    with pytest.raises(UserError, match="sygnap"):
        bench.run(tiny(), methods=["sygnap"])
    with pytest.raises(UserError, match="seeds"):
        bench.run(tiny(), seeds=[-1])
    with pytest.raises(UserError, match="nowhere"):
        bench.load("nowhere")
    assert list(here.iterdir()) == []
