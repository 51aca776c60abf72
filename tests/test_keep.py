"""Runs that are kept: all that a report needs, nothing of the machine, nothing lost on the way."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from refused import refused
from tiny import called, run_inline, tree, written

from syngap.experiments import engine
from syngap.experiments.environment import environment, portable
from syngap.experiments.folder import read_runs
from syngap.experiments.keep import keep

FILES = ["accuracy.csv", "config.yaml", "environment.json", "metrics.jsonl", "status.json"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return tmp_path


@pytest.fixture
def runs(here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A finished experiment of two rows and two seeds in runs/tiny."""
    path = written(here, "methods.syngap={lr: 0.3, buffer: 20, replay: 10}", "seeds=[2, 3]")
    assert called(capsys, "run", path, "--methods", "er,syngap")[0] == 0
    return here / "runs" / "tiny"


def summaries(path: Path) -> list[bool]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [bool(json.loads(line)["summary"]) for line in lines]


def test_what_is_kept_gives_the_same_report(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, said = called(capsys, "keep", runs)
    assert (code, said) == (0, "")
    assert printed == "4 runs are in results/tiny; files written: 21\n"
    kept = here / "results" / "tiny"
    assert sorted(path.name for path in kept.iterdir()) == [
        *("er-2", "er-3", "experiment.yaml", "syngap-2", "syngap-3")
    ]
    for run in kept.glob("*-*"):
        assert sorted(path.name for path in run.iterdir()) == FILES
    for was, now in zip(read_runs(runs), read_runs(kept), strict=True):
        assert (now.config, now.status, now.accuracy) == (was.config, was.status, was.accuracy)
        assert (now.initial, now.record) == (was.initial, was.record)


def test_what_a_method_says_of_itself_is_kept_for_the_lowest_seed(runs: Path, here: Path) -> None:
    assert all(summaries(runs / "syngap-3"))
    keep(runs, here / "kept")
    assert all(summaries(here / "kept" / "syngap-2"))
    assert not any(summaries(here / "kept" / "syngap-3"))


def test_keeping_again_writes_nothing(runs: Path, here: Path) -> None:
    keep(runs, here / "kept")
    before = tree(here / "kept")
    assert keep(runs, here / "kept").written == 0
    assert tree(here / "kept") == before


def test_rows_and_seeds_are_added_to_those_that_are_there(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(runs, here / "kept")
    command = (
        "run",
        here / "tiny.yaml",
        "--methods",
        "sgd,syngap",
        "--seeds",
        "3,4",
        "--out",
        here / "more",
    )
    assert called(capsys, *command)[0] == 0
    path = here / "more" / "syngap-3" / "status.json"
    path.write_text(path.read_text().replace('"seconds": ', '"seconds": 1'))
    with refused("syngap-3/", "is there with another content"):
        keep(here / "more", here / "kept")
    assert keep(here / "more", here / "kept", replaced=True).runs == [
        *("sgd-3", "sgd-4", "syngap-3", "syngap-4")
    ]
    whole = yaml.safe_load((here / "kept" / "experiment.yaml").read_text())
    assert sorted(whole["methods"]) == ["er", "sgd", "syngap"]
    assert whole["seeds"] == [2, 3, 4]
    assert len(read_runs(here / "kept")) == 7
    assert not any(summaries(here / "kept" / "syngap-3")), "seed 2 is there and lower"


def test_rows_stand_in_the_order_of_the_experiment_that_ships(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("--seeds", "0", "--set", "stream.epochs=1", "--set", "stream.batch=200")
    for row in ("syngap", "sgd", "er"):
        assert called(capsys, "run", "digits", *short, "--methods", row, "--out", row)[0] == 0
        keep(here / row, here / "kept")
    rows = yaml.safe_load((here / "kept" / "experiment.yaml").read_text())["methods"]
    assert list(rows) == ["sgd", "er", "syngap"]


def test_nothing_is_written_over_without_being_told(runs: Path, here: Path) -> None:
    keep(runs, here / "kept")
    table = here / "kept" / "er-2" / "accuracy.csv"
    table.write_text("another content")
    (here / "kept" / "er-3" / "status.json").unlink()
    before = tree(here / "kept")
    with refused("er-2/accuracy.csv: is there with another content; --replace"):
        keep(runs, here / "kept")
    assert tree(here / "kept") == before
    assert keep(runs, here / "kept", replaced=True).written == 2
    assert table.read_bytes() == (runs / "er-2" / "accuracy.csv").read_bytes()


def test_another_experiment_is_left_alone(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(runs, here / "kept")
    path = str(here / "tiny.yaml")
    for setting, said in (
        ("stream.batch=50", "stream.batch is 100 there and 50 in the runs"),
        ("methods.er.lr=0.1", "methods.er.lr is 0.3 there and 0.1 in the runs"),
        ("name=other", 'name is "tiny" there and "other" in the runs'),
    ):
        out = here / setting
        command = ("run", path, "--methods", "er", "--seeds", "5", "--set", setting, "--out", out)
        assert called(capsys, *command)[0] == 0
        with refused("kept/experiment.yaml", said):
            keep(out, here / "kept", replaced=True)


def test_a_folder_with_other_things_is_left_alone(runs: Path, here: Path) -> None:
    (here / "kept").mkdir()
    (here / "kept" / "thesis.tex").write_text("years of work")
    with refused("kept: no runs there"):
        keep(runs, here / "kept")
    with refused("is where the runs are"):
        keep(runs, runs / ".." / "tiny")


def test_unfinished_runs_are_refused_unless_told(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(run: str, **status: object) -> None:
        (runs / run / "status.json").write_text(json.dumps({"step": 2, "steps": 6, **status}))

    ends("er-3", state="running")
    ends("syngap-2", state="failed", error="FloatingPointError: the loss is not finite")
    (runs / "syngap-2" / "error.txt").write_text(f'File "{here}/x.py", line 3')
    with refused("er-3 is running and 1 more have not finished", "--unfinished"):
        keep(runs, here / "kept")
    assert not (here / "kept").exists()
    code, printed, said = called(capsys, "keep", runs, here / "kept", "--unfinished")
    assert code == 0
    assert said == "er-3 has not ended and is left out\n"
    assert printed.startswith("3 runs are in ")
    assert not (here / "kept" / "er-3").exists()
    assert not (here / "kept" / "syngap-2" / "error.txt").exists()
    code, printed, _ = called(capsys, "report", here / "kept")
    assert "failed at step 2 of 6: FloatingPointError" in " ".join(printed.split())


def test_a_line_that_was_cut_off_is_left_out(runs: Path, here: Path) -> None:
    status = {"state": "failed", "step": 2, "steps": 6, "error": "OSError: no space left on device"}
    (runs / "er-3" / "status.json").write_text(json.dumps(status))
    with (runs / "er-3" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ta')
    keep(runs, here / "kept", unfinished=True)
    kept = here / "kept" / "er-3" / "metrics.jsonl"
    assert len(summaries(kept.parent)) == len(summaries(here / "kept" / "er-2"))
    assert kept.read_text().endswith("}\n")


def test_what_a_search_or_a_landscape_wrote_is_kept_too(runs: Path, here: Path) -> None:
    (runs / "trials.csv").write_text("row,trial\n")
    (runs / "landscapes" / "sgd-0").mkdir(parents=True)
    (runs / "landscapes" / "sgd-0" / "landscape.json").write_text("{}")
    (runs / "landscapes" / "sgd-0" / "weights.safetensors").write_bytes(b"much")
    keep(runs, here / "kept")
    found = {str(path.relative_to(here / "kept")) for path in (here / "kept").rglob("*.*")}
    assert {"trials.csv", "landscapes/sgd-0/landscape.json"} <= found
    assert not any("checkpoint" in name or name.endswith(("safetensors", "html")) for name in found)


def test_a_search_is_kept_beside_its_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, kept = here / "runs" / "mine-search", here / "results" / "mine" / "search"
    folder.mkdir(parents=True)
    (folder / "search.yaml").write_text("experiment: mine\ntrials: 2\n")
    (folder / "er-trial0-100").mkdir()
    for name in ("trials.csv", "tuned.yaml", "er-trial0-100/config.yaml"):
        (folder / name).write_text(f"{name}: 1\n")
    assert "the search has not ended" in called(capsys, "keep", folder)[2]
    assert not kept.exists()

    (folder / "search.yaml").write_text("experiment: mine\ntrials: 2\nchosen: {}\n")
    printed = called(capsys, "keep", folder)[1]
    assert printed == "The search is in results/mine/search; files written: 3\n"
    assert sorted(path.name for path in kept.rglob("*")) == [
        *("search.yaml", "trials.csv", "tuned.yaml")
    ]
    assert (kept / "trials.csv").read_text() == "trials.csv: 1\n"
    assert called(capsys, "keep", folder)[1].endswith("files written: 0\n")

    (folder / "trials.csv").write_text("other\n")
    assert "--replace writes over" in called(capsys, "keep", folder)[2]
    assert (kept / "trials.csv").read_text() == "trials.csv: 1\n"
    assert called(capsys, "keep", folder, "--replace")[1].endswith("files written: 1\n")


# Nothing of the machine


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["run", "digits", "--data", "/mnt/x"], ["run", "digits", "--data", "DATA"]),
        (["run", "digits", "--data=/mnt/x"], ["run", "digits", "--data=DATA"]),
        (["run", "digits", "--out", "runs/a"], ["run", "digits", "--out", "OUT"]),
        (["run", "/mnt/x/mine.yaml", "--resume"], ["run", "mine.yaml", "--resume"]),
        (["run", "C:\\x\\mine.yaml"], ["run", "mine.yaml"]),
        (["run", "a/mine.yaml"], ["run", "a/mine.yaml"]),
        (["run", "a", "--set", "stream.path=/mnt/x/b"], ["run", "a", "--set", "stream.path=b"]),
        (["run", "a", "--set", "methods.er.lr=0.1"], ["run", "a", "--set", "methods.er.lr=0.1"]),
        (["run", "a", "--data"], ["run", "a", "--data"]),
    ],
    ids=" ".join,
)
def test_a_command_names_no_folder_of_the_machine(given: list[str], kept: list[str]) -> None:
    assert portable(given) == kept
    assert portable(kept) == kept


def test_an_environment_has_the_command_as_it_can_be_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["run", f"{tmp_path}/a b.yaml", "--out", str(tmp_path), "--seeds", "0..4"]
    monkeypatch.setattr(sys, "argv", ["syngap", *given])
    found = environment(torch.device("cpu"))
    assert shlex.split(found["command"]) == [
        *("syngap", "run", "a b.yaml", "--out", "OUT", "--seeds", "0..4")
    ]
    assert str(tmp_path) not in json.dumps(found)


def test_a_command_that_an_older_version_wrote_is_cleaned(runs: Path, here: Path) -> None:
    path = runs / "er-2" / "environment.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "command": f"syngap run x --data {here}/data"}))
    keep(runs, here / "kept")
    kept = json.loads((here / "kept" / "er-2" / "environment.json").read_text())
    assert kept == {**found, "command": "syngap run x --data DATA"}
    for file in (here / "kept").rglob("*.*"):
        assert file.is_dir() or str(here) not in file.read_text()


def test_a_run_says_when_it_began_and_ended(runs: Path) -> None:
    for run in read_runs(runs):
        assert run.environment["started"] <= run.status["ended"]
        assert run.status["ended"].endswith("+00:00")
