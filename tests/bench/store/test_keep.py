"""Runs that are kept: all that a report needs, nothing of the machine, nothing lost on the way."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from checkout import ROOT
from refused import refused
from runfolders import change_packed
from tiny import called, run_inline, tree, written

from syngap.bench import cli
from syngap.bench.runner import local as engine
from syngap.bench.store.environment import environment, portable
from syngap.bench.store.folder_reader import Run, read_run, read_runs
from syngap.bench.store.folder_writer import restore
from syngap.bench.store.keep import keep
from syngap.bench.store.layout import run_folders
from syngap.bench.store.packed import are_same
from syngap.bench.store.records import alone_in

FILES = ["curves.jsonl.gz", "experiment.yaml", "runs.jsonl"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which an experiment of two rows and two seeds was run, once for all tests."""
    folder = tmp_path_factory.mktemp("finished")
    path = written(folder, "methods.syngap={lr: 0.3, buffer: 20, replay: 10}", "seeds=[2, 3]")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(engine, "run_local", run_inline)
        patch.setattr(os, "fsync", lambda handle: None)
        assert cli.main(["run", path, "--methods", "er,syngap"]) == 0
    return folder


@pytest.fixture
def runs(here: Path, finished: Path) -> Path:
    """A copy of the finished experiment in runs/tiny, which a test may change."""
    shutil.copytree(finished, here, dirs_exist_ok=True)
    return here / "runs" / "tiny"


def kept_run(folder: Path, name: str) -> Run:
    (found,) = [run for run in read_runs(folder) if run.path.name == name]
    return found


def rewrite(path: Path, **changes: object) -> None:
    """Change entries of a JSON file in a run folder."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_kept_gives_the_same_report(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, said = called(capsys, "keep", runs)
    assert (code, said) == (0, "")
    assert printed == "results/tiny has 4 runs; files written: 3\n"
    kept = here / "results" / "tiny"
    assert sorted(path.name for path in kept.iterdir()) == FILES
    for was, now in zip(read_runs(runs), read_runs(kept), strict=True):
        assert now.path.name == was.path.name
        summaries = was.summaries if was.seed == 2 else {}
        assert now == replace(was, path=now.path, summaries=summaries)
    assert called(capsys, "report", kept)[1] == called(capsys, "report", runs)[1].replace(
        str(runs), str(kept)
    )


def test_what_a_method_says_of_itself_is_kept_for_the_lowest_seed(runs: Path, here: Path) -> None:
    there = {run.path.name: run.summaries for run in read_runs(runs)}
    assert there["syngap-2"]
    assert there["syngap-3"]
    keep(runs, here / "kept")
    assert kept_run(here / "kept", "syngap-2").summaries == there["syngap-2"]
    assert not kept_run(here / "kept", "syngap-3").summaries


def test_what_is_kept_does_not_depend_on_the_order_of_keeping(runs: Path, here: Path) -> None:
    for name, seed in (("low", 2), ("high", 3)):
        shutil.copytree(runs, here / name)
        for other in (here / name).glob(f"*-{5 - seed}"):
            shutil.rmtree(other)
    for to, order in (("one", ("low", "high")), ("other", ("high", "low"))):
        for name in order:
            keep(here / name, here / to)
    keep(runs, here / "at-once")
    assert tree(here / "one") == tree(here / "other") == tree(here / "at-once")


def test_packed_results_are_kept_together(runs: Path, here: Path) -> None:
    shutil.copytree(runs, here / "few")
    shutil.rmtree(here / "few" / "er-2")
    shutil.rmtree(here / "few" / "syngap-2")
    keep(here / "few", here / "packed-few")
    keep(runs, here / "packed")
    before = tree(here / "packed")
    assert keep(here / "packed-few", here / "packed").written == 0
    assert tree(here / "packed") == before
    assert keep(here / "packed-few", here / "packed").total == 4, "with those that were there"
    keep(here / "packed", here / "packed-few")
    assert tree(here / "packed-few") == before


def test_results_of_an_earlier_version_are_packed_in_another_folder(runs: Path, here: Path) -> None:
    shutil.copytree(runs, here / "kept")
    with refused("kept: holds run folders (er-2)", "packs them in another folder"):
        keep(runs, here / "kept")
    assert keep(here / "kept", here / "packed").runs == ["er-2", "er-3", "syngap-2", "syngap-3"]


def test_runs_are_not_written_among_packed_ones(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(runs, here / "kept")
    before = tree(here / "kept")
    for how in ("--resume", "--fresh"):
        code, _, said = called(capsys, "run", here / "tiny.yaml", "--out", here / "kept", how)
        assert code == 2
        assert "holds packed results, and runs need a folder; give another --out" in said
    assert tree(here / "kept") == before
    shutil.copytree(runs / "er-2", here / "kept" / "er-2")
    with refused("kept: holds packed runs and run folders (er-2)"):
        read_runs(here / "kept")


def test_keeping_at_the_same_time_loses_no_run(runs: Path, here: Path) -> None:
    (here / "kept").mkdir()
    with alone_in(here / "kept"), refused("kept: another process is at work there"):
        keep(runs, here / "kept")
    assert keep(runs, here / "kept").written == 3


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
    for run in (here / "more").glob("syngap-3"):
        for file in ("environment.json", "status.json"):
            shutil.copy(runs / run.name / file, run / file)
    before = tree(here / "kept")
    rewrite(here / "more" / "syngap-3" / "status.json", seconds=1234.5)
    with refused("kept: syngap-3 is there with another content; --replace"):
        keep(here / "more", here / "kept")
    assert tree(here / "kept") == before
    assert keep(here / "more", here / "kept", replaced=True).runs == [
        *("sgd-3", "sgd-4", "syngap-3", "syngap-4")
    ]
    whole = yaml.safe_load((here / "kept" / "experiment.yaml").read_text())
    assert sorted(whole["methods"]) == ["er", "sgd", "syngap"]
    assert whole["seeds"] == [2, 3, 4]
    assert len(read_runs(here / "kept")) == 7
    assert kept_run(here / "kept", "syngap-3").status.seconds == 1234.5
    assert not kept_run(here / "kept", "syngap-3").summaries, "seed 2 is there and lower"


def test_rows_stand_in_the_order_of_the_experiment_that_ships(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("--seeds", "0", "--set", "stream.epochs=1", "--set", "stream.batch=200")
    for row in ("syngap", "sgd", "er"):
        assert called(capsys, "run", "digits", *short, "--methods", row, "--out", row)[0] == 0
        keep(here / row, here / "kept")
    rows = yaml.safe_load((here / "kept" / "experiment.yaml").read_text())["methods"]
    assert list(rows) == ["sgd", "er", "syngap"]


@pytest.mark.parametrize("part", ["config", "environment", "status", "accuracy", "record"])
def test_nothing_is_written_over_without_being_told(part: str, runs: Path, here: Path) -> None:
    keep(runs, here / "kept")
    there = tree(here / "kept")

    def change(run: Run) -> Run:
        if (run.row, run.seed) != ("er", 2):
            return run
        if part == "accuracy":
            return replace(run, accuracy=[[value / 2 for value in row] for row in run.accuracy])
        if part == "record":
            return replace(run, record=[replace(run.record[0], newest=1.25), *run.record[1:]])
        entries = {**getattr(run, part).entries, "steps": 7}
        return replace(run, **{part: replace(getattr(run, part), entries=entries)})

    change_packed(here / "kept", change)
    (here / "kept" / "trials.csv").write_text("mine")
    before = tree(here / "kept")
    assert before != there
    with refused("kept: er-2 is there with another content; --replace"):
        keep(runs, here / "kept")
    assert tree(here / "kept") == before
    keep(runs, here / "kept", replaced=True)
    assert tree(here / "kept") == {**there, "trials.csv": before["trials.csv"]}


def test_files_beside_runs_are_not_written_over_without_being_told(runs: Path, here: Path) -> None:
    (runs / "trials.csv").write_text("row,trial\n")
    keep(runs, here / "kept")
    (here / "kept" / "trials.csv").write_text("another content")
    with refused("kept/trials.csv: is there with another content; --replace"):
        keep(runs, here / "kept")
    assert keep(runs, here / "kept", replaced=True).written == 1
    assert (here / "kept" / "trials.csv").read_text() == "row,trial\n"


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
    with refused("kept: holds other things (thesis.tex) and no runs"):
        keep(runs, here / "kept")
    assert [path.name for path in (here / "kept").iterdir()] == ["thesis.tex"]
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
    with refused("er-3 is running (1 more run unfinished)", "--unfinished"):
        keep(runs, here / "kept")
    assert not (here / "kept").exists()
    code, printed, said = called(capsys, "keep", runs, here / "kept", "--unfinished")
    assert code == 0
    assert said == "er-3 has not ended and is left out\n"
    assert "has 3 runs; files written" in printed
    assert "er-3" not in [run.path.name for run in read_runs(here / "kept")]
    assert str(here) not in (here / "kept" / "runs.jsonl").read_text()
    code, printed, _ = called(capsys, "report", here / "kept")
    assert "failed at step 2 of 6: FloatingPointError" in " ".join(printed.split())


def test_the_experiment_that_is_kept_has_the_rows_and_seeds_that_ran(
    runs: Path, here: Path
) -> None:
    for run in (*runs.glob("er-*"), *runs.glob("*-3")):
        (run / "status.json").write_text('{"state": "running", "step": 2, "steps": 6}')
    keep(runs, here / "kept", unfinished=True)
    kept = yaml.safe_load((here / "kept" / "experiment.yaml").read_text())
    assert [*kept["methods"]] == sorted({run.family for run in read_runs(here / "kept")})
    assert "er" not in kept["methods"]
    assert 3 not in kept["seeds"]
    assert "er" in yaml.safe_load((runs / "experiment.yaml").read_text())["methods"]


def test_a_line_that_was_cut_off_is_left_out(runs: Path, here: Path) -> None:
    status = {"state": "failed", "step": 2, "steps": 6, "error": "OSError: no space left on device"}
    (runs / "er-3" / "status.json").write_text(json.dumps(status))
    with (runs / "er-3" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ta')
    keep(runs, here / "kept", unfinished=True)
    record = kept_run(here / "kept", "er-3").record
    assert record
    assert len(record) == len(kept_run(here / "kept", "er-2").record)


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
    assert printed == "The search is in results/mine/search; files written: 2\n"
    assert sorted(path.name for path in kept.rglob("*")) == ["search.yaml", "trials.csv"]
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
    assert shlex.split(found.command) == [
        *("syngap", "run", "a b.yaml", "--out", "OUT", "--seeds", "0..4")
    ]
    assert str(tmp_path) not in json.dumps(found.as_mapping())


def test_a_command_that_an_older_version_wrote_is_cleaned(runs: Path, here: Path) -> None:
    path = runs / "er-2" / "environment.json"
    found = json.loads(path.read_text())
    rewrite(path, command=f"syngap run x --data {here}/data")
    keep(runs, here / "kept")
    kept = kept_run(here / "kept", "er-2").environment
    assert kept.entries == {**found, "command": "syngap run x --data DATA"}
    for file in (here / "kept").rglob("*.*"):
        content = file.read_bytes()
        content = gzip.decompress(content) if file.suffix == ".gz" else content
        assert str(here).encode() not in content
    rewrite(path, command='syngap run "x')
    with refused("er-2", "No closing quotation"):
        keep(runs, here / "kept")
    for other in (["syngap", f"{here}/x"], None):
        rewrite(path, command=other)
        with refused("er-2", "command is ", "expected text"):
            keep(runs, here / "kept")


def test_entries_of_other_versions_are_kept_as_they_are_and_in_their_order(
    runs: Path, here: Path
) -> None:
    """Such as options that this version does not know, or a run that lacks what it has."""
    folder = runs / "er-2"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    method = {"lr": 0.3, "name": "er", "of_later": [1, {"a": None}]}
    recorded = {"later": 1, "seed": 2, "row": "er", "method": method, "stream": config["stream"]}
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded, sort_keys=False))
    files = {"status.json": {"later": 1, "state": "done", "error": None, "ended": 5}}
    files["environment.json"] = {"note": "n", "device": ["of", "later"], "command": "syngap run x"}
    for name, entries in files.items():
        (folder / name).write_text(json.dumps(entries))
    keep(runs, here / "kept")
    run = kept_run(here / "kept", "er-2")
    in_order = [run.config.as_mapping(), run.status.as_mapping(), run.environment.as_mapping()]
    assert json.dumps(in_order) == json.dumps([recorded, *files.values()])
    assert (run.config.method.name, run.config.experiment) == ("er", None)
    assert (run.status.error, run.status.ended, run.status.seconds) == ("", None, None)
    assert run.environment.device is None, "text where there is one, whatever the file says"


LINKED = ["config.yaml", "environment.json", "status.json", "accuracy.csv", "metrics.jsonl", "x"]


@pytest.mark.parametrize("name", LINKED)
def test_what_a_link_leads_to_is_not_kept(name: str, runs: Path, here: Path) -> None:
    path, secret = runs / "er-2" / name, here / "secret"
    path.touch()
    path.rename(secret)
    path.symlink_to(secret)
    with refused(f"er-2/{name}: is a link, and what it leads to is not published"):
        keep(runs, here / "kept")
    assert not (here / "kept").exists()


def test_a_run_that_is_elsewhere_is_not_kept(runs: Path, here: Path) -> None:
    (runs / "er-2").rename(here / "elsewhere")
    (runs / "er-2").symlink_to(here / "elsewhere")
    with refused("er-2: is a link"):
        keep(runs, here / "kept")
    (runs / "er-2").unlink()
    (runs / "experiment.yaml").rename(here / "mine.yaml")
    (runs / "experiment.yaml").symlink_to(here / "mine.yaml")
    with refused("experiment.yaml: is a link"):
        keep(runs, here / "kept")


def test_a_run_says_when_it_began_and_ended(runs: Path) -> None:
    for run in read_runs(runs):
        assert run.environment.started <= run.status.ended
        assert run.status.ended.endswith("+00:00")


# Going on from a record ---------------------------------------------------------------------------


def test_runs_of_a_record_are_not_done_again(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = here / "record"
    keep(runs, record)
    before = read_runs(record)
    shutil.rmtree(runs)
    command = ["run", next(here.glob("*.yaml")), "--methods", "er,syngap", "--seeds", "2..4"]
    code, printed, said = called(capsys, *command, "--from", record)
    assert code == 0
    assert "4 of 6 runs recorded in" in said
    assert not any(f"{run.path.name} " in said for run in before), "no recorded run is shown"
    found = {run.path.name: run for run in read_runs(runs)}
    assert all(are_same(run, found[run.path.name]) for run in before)
    assert "SynGAP" in printed, "the table has recorded and new runs"
    assert keep(runs, record).written == 3
    assert [run.seed for run in read_runs(record)] == [2, 3, 4, 2, 3, 4]
    again = called(capsys, *command, "--resume", "--from", record)
    assert again[0] == 0
    assert "6 of 6 runs already done" in again[2]


def test_a_record_of_other_options_is_refused(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(runs, here / "record")
    path = next(here.glob("*.yaml"))
    command = ["run", path, "--methods", "er", "--out", here / "new", "--from", here / "record"]
    code, _, said = called(capsys, *command, "--set", "methods.er.lr=0.01", "--seeds", "2")
    assert code == 2
    assert "method.lr was" in said
    assert f"leave out --from, or run {here / 'record' / 'experiment.yaml'}" in said
    assert not (here / "new").exists()
    again = ["run", here / "record" / "experiment.yaml", "--out", here / "new"]
    assert "4 of 4 runs recorded in" in called(capsys, *again, "--from", here / "record")[2]
    other = called(capsys, "run", "digits", "--out", here / "other", "--from", here / "record")
    assert 'holds runs of "tiny", not of "digits"' in other[2]


def test_a_record_without_these_runs_is_mentioned(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(runs, here / "record")
    command = ["run", next(here.glob("*.yaml")), "--methods", "sgd", "--out", here / "new"]
    said = called(capsys, *command, "--from", here / "record")[2]
    assert "record has no finished run of these" in " ".join(said.split())


def test_runs_are_not_written_over_by_themselves(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(runs)
    command = ["run", next(here.glob("*.yaml")), "--methods", "er,syngap", "--fresh"]
    code, _, said = called(capsys, *command, "--from", runs / ".." / "tiny")
    assert code == 2
    assert "are the same folder" in said
    assert tree(runs) == before


def test_a_recorded_run_takes_the_place_of_one_that_did_not_end(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(runs, here / "record")
    rewrite(runs / "er-2" / "status.json", state="failed", error="OSError: no space left")
    (runs / "er-2" / "error.txt").write_text("of the try before")
    shutil.copy(
        runs / "er-2" / "checkpoint" / "weights.safetensors",
        runs / "er-2" / "checkpoint" / "step-000000003.safetensors",
    )
    command = ["run", next(here.glob("*.yaml")), "--methods", "er,syngap", "--seeds", "2..3"]
    said = called(capsys, *command, "--resume", "--from", here / "record")[2]
    assert "1 of 4 runs recorded in" in said
    assert sorted(path.name for path in (runs / "er-2").iterdir()) == [
        *("accuracy.csv", "config.yaml", "environment.json", "metrics.jsonl", "status.json")
    ]
    assert keep(runs, here / "record").written == 0


def test_a_failed_run_of_a_record_is_done_again_and_replaced(
    runs: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(runs / "er-2" / "status.json", state="failed", error="OSError: no space left")
    keep(runs, here / "record", unfinished=True)
    command = ["run", next(here.glob("*.yaml")), "--methods", "er,syngap", "--seeds", "2..3"]
    said = called(capsys, *command, "--out", here / "new", "--from", here / "record")[2]
    assert "3 of 4 runs recorded in" in said
    keep(here / "new", here / "record")
    assert all(run.done for run in read_runs(here / "record"))


def test_a_run_that_is_restored_is_a_run_only_when_all_of_it_is_there(
    runs: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("killed")

    run = read_run(runs / "er-2")
    monkeypatch.setattr("syngap.bench.store.folder_writer.write_yaml", fail)
    with pytest.raises(OSError, match="killed"):
        restore(run, here / "er-2")
    assert not run_folders(here)


RESULTS = ROOT / "results"


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in RESULTS.glob("*/runs.jsonl")) or ["none"]
)
def test_a_recorded_run_is_the_same_after_it_is_restored(name: str, tmp_path: Path) -> None:
    if not (RESULTS / name).is_dir():
        pytest.skip("there are no results beside the tests")
    done = [run for run in read_runs(RESULTS / name) if run.done]
    for run in (done[0], done[-1]):
        restore(run, tmp_path / run.path.name)
        assert are_same(read_run(tmp_path / run.path.name), run)
