"""What is recorded can be run again, and whether it is the same again is told truly."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runfolders import Made, change_packed, write_experiment, write_run
from scipy import stats
from tiny import called, run_inline, written

from syngap.bench import cli
from syngap.bench.metrics import accuracy
from syngap.bench.reporting.reproduction import describe, reproductions
from syngap.bench.reporting.statistics import half_interval, half_prediction
from syngap.bench.runner import local as engine
from syngap.bench.store.folder_reader import Run, read_run, read_runs
from syngap.bench.store.keep import keep

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with results of tiny, made once: rows sgd, er and syngap, seeds 0, 1, 2."""
    folder = tmp_path_factory.mktemp("recorded")
    path = written(folder, "methods.syngap={lr: 0.3, buffer: 20, replay: 10}", "seeds=[0, 1, 2]")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(engine, "run_local", run_inline)
        patch.setattr(os, "fsync", lambda handle: None)
        assert cli.main(["run", path]) == 0
        keep(folder / "runs" / "tiny", folder / "results" / "tiny")
    return folder


@pytest.fixture
def call(
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    """The command line in a copy of that folder, which a test may change."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return lambda *arguments: called(capsys, *arguments)


def change(row: str, *changes: Callable[[Run], object], seed: int | None = None) -> None:
    """Make it look as if the runs of `row` had been recorded otherwise."""

    def changed(run: Run) -> Run:
        for each in changes if run.row == row and seed in (None, run.seed) else ():
            each(run)
        return run

    change_packed(Path("results/tiny"), changed)


def raise_accuracy(run: Run, by: float) -> None:
    run.accuracy[:] = [[value + by for value in line] for line in run.accuracy]


# The command


def test_the_same_machine_gives_the_same_again(call: Call, tmp_path: Path) -> None:
    code, printed, _ = call("reproduce", "tiny")
    assert code == 0
    assert sorted(path.name for path in Path("runs/reproduce-tiny").glob("*-*")) == [
        *("er-0", "syngap-0")
    ]
    recorded = read_runs(Path("results/tiny"))
    values = [accuracy(run.accuracy) for run in recorded if run.row == "er"]
    mean, sd = stats.tmean(values), stats.tstd(values)
    wide = stats.t.ppf(0.975, 2) * sd * (1 / 3 + 1) ** 0.5
    lines = printed.splitlines()[5:]
    within = lines[3].split("± ")[1].split()[0]
    assert within == f"{wide:.2f}"
    assert lines == [
        "ER",
        f"  recorded  ACC {mean:.2f} ± {sd:.2f} over 3 seeds",
        f"  here      ACC {values[0]:.2f} over 1 seed",
        f"  inside: {values[0] - mean:+.2f}, expected within ± {within} (95 %)",
        f"  seed 0: {values[0]:.2f} recorded, {values[0]:.2f} here, both on cpu: the same R",
    ]
    assert printed.startswith("SynGAP\n")


def test_what_falls_outside_the_recorded_spread_ends_with_1(call: Call, tmp_path: Path) -> None:
    change("er", lambda run: raise_accuracy(run, by=-60))
    code, printed, _ = call("reproduce", "tiny", "--seeds", 3)
    assert code == 1
    syngap, er = printed.split("\nER\n")
    assert "\n  inside: +0.00, " in syngap
    assert "\n  OUTSIDE: +60.00, expected within ± " in er
    assert er.count(": +60.00\n") == 3, "each seed says its own difference"


def test_rows_and_their_number_of_seeds_are_chosen(call: Call) -> None:
    assert call("reproduce", "tiny", "--row", "all", "--seeds", 2, "--out", "a")[0] == 0
    assert len(list(Path("a").glob("*-*"))) == 6
    code, printed, _ = call("reproduce", "tiny", "--row", "sgd", "--out", "b")
    assert code == 0
    assert printed.startswith("SGD\n")
    assert [path.name for path in Path("b").glob("*-*")] == ["sgd-0"]


def test_what_was_run_again_is_not_run_a_third_time(call: Call) -> None:
    call("reproduce", "tiny", "--row", "er")
    before = json.loads(Path("runs/reproduce-tiny/er-0/environment.json").read_text())
    _, printed, said = call("reproduce", "tiny", "--row", "er")
    assert "1 of 1 run already done" in said
    assert "  inside: " in printed
    assert json.loads(Path("runs/reproduce-tiny/er-0/environment.json").read_text()) == before
    assert "already" not in call("reproduce", "tiny", "--row", "er", "--fresh")[2]


def test_it_is_the_recorded_configuration_that_is_run(call: Call) -> None:
    change("er", lambda run: run.config.entries["method"].update(lr=0.01))
    _, printed, _ = call("reproduce", "tiny", "--row", "er")
    assert read_run(Path("runs/reproduce-tiny/er-0")).config.method.options["lr"] == 0.01
    assert ": the same R" not in printed


def test_options_that_came_later_take_their_defaults(call: Call) -> None:
    change(
        "er",
        lambda run: run.config.entries["stream"].pop("blur"),
        lambda run: run.config.entries["method"].pop("memory"),
    )
    code, printed, _ = call("reproduce", "tiny", "--row", "er")
    assert code == 0
    assert ": the same R" in printed


def test_without_its_gpu_a_run_is_done_on_what_there_is(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    change(
        "er",
        lambda run: run.config.entries["training"].update(device="cuda"),
        lambda run: run.environment.entries.update(device="H200"),
    )
    code, printed, _ = call("reproduce", "tiny", "--row", "er")
    assert code == 0
    assert " recorded on H200, " in printed
    assert " here on cpu: " in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tini",), 'results: no experiment "tini"; did you mean "tiny"?'),
        (("tiny", "--row", "err"), '--row: no finished run of "err" is recorded; did you mean'),
        (("tiny", "--seeds", "4"), "--seeds: 4 were asked for, 3 are recorded for all rows"),
        (("tiny", "--seeds", "0"), "--seeds"),
        (("tiny", "--data", "nowhere"), '--data: there is no folder "nowhere"'),
        (("tiny", "--results", "nowhere"), "nowhere: no such folder; --results gives another"),
    ],
)
def test_what_cannot_be_run_again(arguments: tuple[str, ...], words: str, call: Call) -> None:
    code, printed, said = call("reproduce", *arguments)
    assert (code, printed) == (2, "")
    assert words in said
    assert not Path("runs/reproduce-tiny").exists()


def test_rows_of_different_settings_are_not_run_together(call: Call) -> None:
    change("er", lambda run: run.config.entries["stream"].update(batch=50), seed=0)
    code, _, said = call("reproduce", "tiny")
    assert code == 2
    assert "er-0: stream.batch is not that of the other runs" in said
    change("er", lambda run: run.config.entries["method"].update(gone=1), seed=0)
    code, _, said = call("reproduce", "tiny", "--row", "er")
    assert code == 2
    assert "er-0: methods.er.gone: unknown option" in said


# The interval


def test_the_interval_holds_new_runs_as_often_as_it_says() -> None:
    """From 5 recorded values, 19 of 20 means of 2 new ones fall inside, whatever the normal law."""
    values = stats.norm.rvs(loc=30, scale=2, size=(4000, 7), random_state=0)
    inside = 0
    for line in values:
        known, new = line[:5], line[5:]
        half = half_prediction(float(known.std(ddof=1)), 5, new=2)
        inside += abs(new.mean() - known.mean()) <= half
    assert inside / len(values) == pytest.approx(0.95, abs=0.012)


def test_the_interval_is_by_students_t_at_every_count() -> None:
    """Without a jump where a table of quantiles would end."""
    for count in range(2, 200):
        expected = stats.t.ppf(0.975, count - 1) / count**0.5
        assert half_interval(1.0, count) == pytest.approx(expected, rel=1e-9), count


def test_the_interval_needs_two_values_and_a_new_one() -> None:
    with pytest.raises(ValueError, match="at least two"):
        half_prediction(1.0, 1)
    with pytest.raises(ValueError, match="at least one"):
        half_prediction(1.0, 5, new=0)


def test_a_single_recorded_seed_gives_no_verdict(tmp_path: Path) -> None:
    for name, end in (("there", 60), ("here", 90)):
        write_experiment(tmp_path / name, {}, ())
        write_run(tmp_path / name, "er", Made("er"), 0, R=[[90, 0], [end, end]], every=50)
    (row,) = reproductions(read_runs(tmp_path / "there"), read_runs(tmp_path / "here"))
    assert row.is_inside is None
    assert "  +30.00; too few seeds: 1 recorded, an interval needs 3" in describe(row)


def test_runs_that_have_not_finished_are_not_compared(tmp_path: Path) -> None:
    for name in ("there", "here"):
        write_experiment(tmp_path / name, {"er": Made("er")}, (0, 1), every=50)
    write_run(tmp_path / "here", "er", Made("er"), 1, state="failed", tasks_done=1)
    (row,) = reproductions(read_runs(tmp_path / "there"), read_runs(tmp_path / "here"))
    assert (row.here.seeds, row.recorded.seeds) == (1, 2)
    write_run(tmp_path / "here", "er", Made("er"), 0, state="failed", tasks_done=1)
    assert reproductions(read_runs(tmp_path / "there"), read_runs(tmp_path / "here")) == []
