"""A search gives every row its trials, learns from them, and goes on where it was killed."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import yaml
from tiny import SEARCH, called, run_inline, state, tree, written
from torch import Tensor

from syngap.bench.config.space import Space
from syngap.bench.options import Count
from syngap.bench.runner import local as engine
from syngap.bench.runner.run import Job
from syngap.bench.streams import Samples, Tasks
from syngap.bench.streams.digits import digits
from syngap.bench.tuning import study
from syngap.bench.tuning.study import RANDOM_FIRST, suggestion
from syngap.bench.tuning.trials import Outcome, Trial

Call = Callable[..., tuple[int, str, str]]

TUNE = ("tune", "tiny.yaml", "--out", "out")


RUN_LOCAL = engine.run_local


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an experiment that can be searched."""
    written(tmp_path, f"search={SEARCH}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line, with its runs in this process: a worker takes seconds to start."""
    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return lambda *arguments: called(capsys, *arguments)


def trials(folder: Path) -> list[dict[str, str]]:
    """What trials.csv says, but for the times."""
    with (folder / "trials.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        assert float(line.pop("seconds")) >= 0
    return lines


def loaded(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


# What comes of it ---------------------------------------------------------------------------------


def test_every_row_has_its_trials_and_the_best_is_chosen(here: Path, call: Call) -> None:
    code, printed, _ = call(*TUNE)
    assert code == 0
    lines = trials(here / "out")
    assert [(line["row"], line["trial"]) for line in lines] == [
        (row, str(number)) for row in ("sgd", "er") for number in range(3)
    ]
    found = loaded(here / "out/search.yaml")
    tuned = loaded(here / "out/tuned.yaml")
    for row in ("sgd", "er"):
        own = [line for line in lines if line["row"] == row]
        best = max(own, key=lambda line: float(line["ACC"]))
        chosen = found["chosen"][row]
        assert (chosen["ACC"], chosen["trials"]) == (float(best["ACC"]), 3)
        for option, value in chosen["values"].items():
            assert float(best[option]) == value == tuned["methods"][row][option]
            assert str(value) in printed
        assert list(chosen["values"]) == list(SEARCH["spaces"][row])
        assert len({line["lr"] for line in own}) == 3
    assert {**tuned, "methods": 0} == {**loaded_experiment(here), "methods": 0}
    assert found["environment"]["optuna"] == optuna.__version__


def loaded_experiment(here: Path) -> dict[str, Any]:
    from syngap.bench.config.experiment import Experiment, read

    mapping = Experiment.from_mapping(read(str(here / "tiny.yaml"))).as_mapping()
    return dict(yaml.safe_load(yaml.safe_dump(mapping)))


def test_a_trial_is_a_run_on_validation_samples_whose_weights_are_not_kept(
    here: Path, call: Call
) -> None:
    call(*TUNE, "--methods", "er")
    (line, *_) = trials(here / "out")
    config = loaded(here / "out/er-trial0-100/config.yaml")
    assert config["method"]["lr"] == float(line["lr"])
    assert config["method"]["buffer"] == int(line["buffer"])
    assert config["method"]["replay"] == 10, "what is not searched is as it was"
    assert (config["seed"], config["stream"]["validation"]) == (100, 0.2)
    assert state(here / "out/er-trial0-100") == "done"
    final = (here / "out/er-trial0-100/accuracy.csv").read_text().splitlines()[-1]
    accuracies = [float(cell) for cell in final.split(",")[1:]]
    assert float(line["ACC"]) == pytest.approx(sum(accuracies) / 2, abs=1e-3)
    assert not list((here / "out").rglob("*.safetensors"))


def test_what_was_found_can_be_run(here: Path, call: Call) -> None:
    call(*TUNE, "--methods", "er")
    assert call("run", "out/tuned.yaml", "--out", "table")[0] == 0
    config = loaded(here / "table/er-0/config.yaml")
    assert (
        config["method"]["lr"] == loaded(here / "out/search.yaml")["chosen"]["er"]["values"]["lr"]
    )
    assert config["stream"]["validation"] == 0.0
    assert "search" not in config
    assert "search" not in loaded(here / "table/experiment.yaml")
    assert call("run", "tiny.yaml", "--set", "search=", "--out", "table", "--fresh")[0] == 0
    assert call("run", "tiny.yaml", "--out", "table", "--resume")[0] == 0


def test_with_more_seeds_their_mean_counts(here: Path, call: Call) -> None:
    written(here, f"search={SEARCH}", "search.seeds=[100, 7]", "search.trials=1")
    call(*TUNE, "--methods", "er")
    (both,) = trials(here / "out")
    assert both["seeds"] == "100 7"
    each = [(here / f"out/er-trial0-{seed}/accuracy.csv").read_text() for seed in (100, 7)]
    values = [[float(v) for v in text.splitlines()[-1].split(",")[1:]] for text in each]
    assert each[0] != each[1]
    mean = sum(sum(row) / len(row) for row in values) / 2
    assert float(both["ACC"]) == pytest.approx(mean, abs=1e-3)


def test_a_row_without_a_space_stays_as_it_is(here: Path, call: Call) -> None:
    written(here, f"search={SEARCH}", "methods.adam.lr=0.07")
    code, printed, _ = call(*TUNE)
    assert code == 0
    assert "not chosen, and as they were in tuned.yaml: adam" in printed
    assert loaded(here / "out/tuned.yaml")["methods"]["adam"]["lr"] == 0.07
    assert not list((here / "out").glob("adam*"))


def test_a_value_at_the_edge_is_said_to_be_there(here: Path, call: Call) -> None:
    written(here, f"search={SEARCH}", "search.spaces.er={lr: {choose: [0.3, 1.0e-9, 2.0e-9]}}")
    printed = call(*TUNE, "--methods", "er", "--trials", "8")[1]
    assert "er: lr 0.3 is at the upper edge of what was tried" in printed


def test_the_first_trial_tries_the_start(here: Path, call: Call) -> None:
    starts = "{lr: {log: [0.01, 1.0], start: 0.25}, buffer: {uniform: [10, 40], start: 33}}"
    written(here, f"search={SEARCH}", f"search.spaces.er={starts}")
    assert call(*TUNE)[0] == 0
    first, *later = [(line["lr"], line["buffer"]) for line in trials(here / "out")][3:]
    assert first == ("0.25", "33")
    assert first not in later
    assert loaded(here / "out/search.yaml")["spaces"]["er"]["buffer"] == {
        "uniform": [10, 40],
        "start": 33,
    }
    assert call(*TUNE[:3], "plain", "--set", f"search.spaces={SEARCH['spaces']}")[0] == 0
    own = [line for line in trials(here / "plain") if line["row"] == "sgd"]
    assert own == [line for line in trials(here / "out") if line["row"] == "sgd"]


def test_trials_learn_and_choose_without_the_test_samples(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(seed: int, data: Path | None, *, tasks: Count = 5) -> Tasks:
        made = digits(seed, data, tasks=tasks)
        return replace(made, test=replace(made.test, samples=Untouchable(made.test.samples)))

    monkeypatch.setattr("syngap.bench.streams.digits.digits", poisoned)
    code, _, said = call("run", "tiny.yaml", "--out", "table", "--methods", "er")
    assert (code, "AssertionError: test samples were read" in said) == (1, True)
    assert call(*TUNE)[0] == 0
    assert len(trials(here / "out")) == 6


class Untouchable:
    """Samples that must not be read."""

    def __init__(self, samples: Samples) -> None:
        self._samples, self.shape = samples, samples.shape

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, index: Tensor) -> Tensor:
        raise AssertionError("test samples were read")

    def to(self, device: torch.device) -> Untouchable:
        return self


# Failures -----------------------------------------------------------------------------------------


def test_a_trial_that_diverges_counts_as_the_worst(here: Path, call: Call) -> None:
    written(here, f"search={SEARCH}", "search.spaces.sgd={lr: {choose: [0.1, 1.0e+30]}}")
    code, printed, _ = call(*TUNE, "--methods", "sgd", "--trials", "6")
    assert code == 0
    lines = trials(here / "out")
    wild = [line for line in lines if float(line["lr"]) > 1]
    assert 0 < len(wild) < len(lines) == 6
    for line in lines:
        assert line["state"] == ("diverged" if line in wild else "done")
        assert line["why"].startswith("FloatingPointError: ") == (line in wild)
        assert (float(line["ACC"]) == 0) == (line in wild)
    assert f"sgd: {len(wild)} of 6 trials diverged" in printed
    assert loaded(here / "out/tuned.yaml")["methods"]["sgd"]["lr"] == 0.1
    assert not list((here / "out").rglob("*.safetensors"))
    before = tree(here / "out")
    assert call(*TUNE, "--methods", "sgd", "--trials", "6", "--resume")[0] == 0
    assert set(tree(here / "out")) == {*before}
    assert trials(here / "out") == lines, "what diverged is not tried again"


def test_where_every_trial_diverges_nothing_is_chosen(here: Path, call: Call) -> None:
    written(here, f"search={SEARCH}", "search.spaces.sgd={lr: {log: [1.0e+29, 1.0e+30]}}")
    code, printed, _ = call(*TUNE, "--methods", "sgd")
    assert code == 0
    assert "sgd: 3 of 3 trials diverged" in printed
    assert loaded(here / "out/tuned.yaml")["methods"]["sgd"]["lr"] == 0.1
    assert loaded(here / "out/search.yaml")["chosen"] == {}


def test_another_failure_stops_its_row_and_is_tried_again(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = engine.execute, iter(range(9))

    def fails(job: Job, tell: Any) -> None:
        if job.config.row == "sgd" and next(run) == 1:
            raise OSError("the disk is gone")
        whole(job, tell)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "execute", fails)
        code, printed, _ = call(*TUNE)
    assert code == 1
    assert "sgd-trial1-100 failed: OSError: the disk is gone" in printed
    assert "as they were in tuned.yaml: sgd" in printed
    rows = [line["row"] for line in trials(here / "out")]
    assert rows == ["sgd", "er", "er", "er"]
    assert list(loaded(here / "out/search.yaml")["chosen"]) == ["er"]
    assert call(*TUNE, "--resume")[0] == 0
    assert call("tune", "tiny.yaml", "--out", "whole")[0] == 0
    assert trials(here / "out") == trials(here / "whole")


# Going on -----------------------------------------------------------------------------------------


class Killed(BaseException):
    """The end of everything."""


@pytest.mark.parametrize("at", [7])
def test_a_search_that_was_killed_tries_the_same_as_one_that_was_not(
    at: int, here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a trial whose first seed has ended, and more than once."""
    two = ("--set", "search.seeds=[100, 7]", "--trials", str(RANDOM_FIRST + 2))
    assert call(*TUNE[:3], "whole", *two)[0] == 0
    whole, left = engine.execute, iter(range(at))

    def killed(job: Job, tell: Any) -> None:
        if next(left, None) is None:
            raise Killed
        whole(job, tell)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "execute", killed)
        with pytest.raises(Killed):
            call(*TUNE, *two)
        left = iter(range(2))
        with pytest.raises(Killed):
            call(*TUNE, *two, "--resume")
    ended = len(list((here / "out").glob("*/status.json")))
    assert ended == at + 2
    assert call(*TUNE, *two, "--resume")[0] == 0
    assert trials(here / "out") == trials(here / "whole")
    assert (here / "out/tuned.yaml").read_bytes() == (here / "whole/tuned.yaml").read_bytes()


def test_a_trial_that_has_begun_tries_what_its_folder_says(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of the sampler may suggest something else by now."""
    assert call(*TUNE)[0] == 0
    once = trials(here / "out")
    status = here / "out/er-trial2-100/status.json"
    status.write_text(status.read_text().replace("done", "running"))
    monkeypatch.setattr(study, "suggestion", lambda *_: {"lr": 0.5, "buffer": 10})
    assert call(*TUNE, "--resume")[0] == 0
    assert trials(here / "out") == once
    assert call(*TUNE, "--resume", "--methods", "er", "--trials", "4")[0] == 0
    assert [line["lr"] for line in trials(here / "out") if line["row"] == "er"][3:] == ["0.5"]


@pytest.mark.parametrize("without", ["method", "lr"])
def test_a_trial_whose_folder_does_not_say_what_it_tried_is_refused_in_one_line(
    without: str, here: Path, call: Call
) -> None:
    call(*TUNE, "--methods", "er")
    path = here / "out/er-trial1-100/config.yaml"
    config = loaded(path)
    (config if without in config else config["method"]).pop(without)
    path.write_text(yaml.safe_dump(config))
    code, _, said = call(*TUNE, "--methods", "er", "--resume")
    place = "out/er-trial1-100/config.yaml"
    assert (code, said) == (
        2,
        f"syngap: {place}: not as syngap wrote it ('{without}' is missing)\n",
    )


def test_rows_and_trials_can_be_added_and_change_nothing(here: Path, call: Call) -> None:
    assert call(*TUNE[:3], "whole")[0] == 0
    assert call(*TUNE, "--methods", "er", "--trials", "2")[0] == 0
    assert [line["row"] for line in trials(here / "out")] == ["er", "er"]
    code, printed, said = call(*TUNE, "--resume")
    assert code == 0
    assert "of 4  sgd-trial0-100" in said, "those that have ended are not to come"
    assert trials(here / "out") == trials(here / "whole")
    assert "sgd" in printed


def test_a_search_that_has_ended_says_the_same_again(here: Path, call: Call) -> None:
    once = call(*TUNE)
    again = call(*TUNE, "--resume")
    assert again[:2] == once[:2]
    assert again[2] == ""


def test_what_is_there_is_not_mixed_with_another_search(here: Path, call: Call) -> None:
    call(*TUNE)
    before = tree(here / "out")

    def refused(*arguments: str) -> str:
        code, _, said = call(*TUNE, *arguments)
        assert code == 2
        assert len(said.splitlines()) == 1
        assert tree(here / "out") == before
        return said

    assert "holds runs already; --resume goes on" in refused()
    assert "--resume and --fresh: got both" in refused("--resume", "--fresh")
    space = "search.spaces.er.lr={log: [0.1, 1]}"
    assert "spaces.er.lr.log was [0.01, 1.0] there" in refused("--resume", "--set", space)
    assert "seeds was [100] there and is [7] now" in refused(
        "--resume", "--set", "search.seeds=[7]"
    )
    start = "search.spaces.sgd.lr.start=0.1"
    assert "spaces.sgd.lr.start was null there and is 0.1 now" in refused(
        "--resume", "--set", start
    )
    fewer = refused("--resume", "--trials", "2")
    assert "search.trials: got 2, but out has more of sgd" in fewer
    alone = f"search.spaces={ {'sgd': SEARCH['spaces']['sgd']} }"
    assert "search.spaces.er: missing, but out has trials of it" in refused(
        "--resume", "--set", alone
    )
    gone = ("--set", alone, "--set", "methods={sgd: {lr: 0.1}}")
    assert "search.spaces.er: missing, but out has trials of it" in refused("--resume", *gone)
    validation = "search.stream.validation=0.3"
    assert "stream.validation was 0.2 there" in refused("--resume", "--set", validation)
    assert call(*TUNE, "--fresh", "--set", space, "--methods", "er")[0] == 0
    assert not list((here / "out").glob("sgd*"))
    assert [line["row"] for line in trials(here / "out")] == ["er"] * 3


def test_what_an_earlier_search_found_is_not_left_beside_a_new_one(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(*TUNE)[0] == 0

    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(engine, "run_local", killed)
    with pytest.raises(Killed):
        call(*TUNE, "--fresh")
    assert not (here / "out/tuned.yaml").exists()
    assert trials(here / "out") == []


def test_trials_are_not_reported_as_if_they_were_seeds_of_a_table(here: Path, call: Call) -> None:
    call(*TUNE)
    code, printed, said = call("report", "out")
    assert (code, printed) == (2, "")
    assert said == "syngap: out: holds trials of a search and no table; see trials.csv there\n"


def test_whoever_stops_it_is_told_how_to_go_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "run_local", interrupted)
    advice = "Stopped. The same command with --resume goes on, in runs/tiny-search.\n"
    assert call("tune", "tiny.yaml") == (130, "", advice)


# Refused ------------------------------------------------------------------------------------------


def test_searches_that_cannot_begin(here: Path, call: Call) -> None:
    def refused(*arguments: str) -> str:
        before = tree(here)
        code, printed, said = call("tune", *arguments)
        assert (code, printed) == (2, "")
        assert tree(here) == before
        return said

    assert "syngap: search: missing" in refused("tiny.yaml", "--set", "search=")
    assert "syngap: search: missing" in refused("coil100-nc", "--trials", "3")
    assert "methods: unknown" in refused("tiny.yaml", "--methods", "quux")
    without = ("--set", "methods.adam={}", "--methods", "adam")
    assert "search.spaces.adam: missing" in refused("tiny.yaml", *without)
    assert "--trials" in refused("tiny.yaml", "--trials", "0")
    assert "--data: there is no folder" in refused("tiny.yaml", "--data", "nowhere")
    assert "search.seeds: 0 " in refused("tiny.yaml", "--set", "search.seeds=[0]")


def test_without_optuna_one_line_says_how_to_get_it(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, said = call(*TUNE)
    assert code == 2
    assert said.endswith("pip install 'syngap[tune]' brings it\n")
    assert len(said.splitlines()) == 1


# The sampler --------------------------------------------------------------------------------------

LR = {"lr": Space("log", [0.001, 10.0]), "memory": Space("choose", ["a", "b"])}


def tried(values: dict[str, Any], accuracy: float) -> Outcome:
    return Outcome(Trial("er", 0, values, []), accuracy, 0.0)


def test_suggestions_repeat_and_differ_by_seed() -> None:
    some = [suggestion(LR, [], seed) for seed in (1, 2, 3)]
    assert some == [suggestion(LR, [], seed) for seed in (1, 2, 3)]
    assert len({one["lr"] for one in some}) == 3


def test_the_start_is_suggested_once_and_learned_from() -> None:
    spaces = {"lr": Space("log", [0.001, 10.0], 0.5), "memory": Space("choose", ["a", "b"], "b")}
    first = suggestion(spaces, [], 1)
    assert first == {"lr": 0.5, "memory": "b"}
    assert suggestion(spaces, [], 2) == first
    past = [tried(first, 10.0)]
    assert suggestion(spaces, past, 1) == suggestion(LR, past, 1) != first


def test_suggestions_learn_from_the_past() -> None:
    """After trials of which only one region was good, it is looked at more often than by chance."""

    def near(value: dict[str, Any]) -> bool:
        return 0.05 < value["lr"] < 0.5

    rates = (0.0015, 0.004, 0.012, 0.1, 0.15, 0.2, 2.0, 5.0, 9.0)
    past = [tried({"lr": lr, "memory": "a"}, 90 if near({"lr": lr}) else 10) for lr in rates]
    learned = sum(near(suggestion(LR, past, seed)) for seed in range(30))
    random = sum(near(suggestion(LR, past[: RANDOM_FIRST - 1], seed)) for seed in range(30))
    assert learned > random + 5


def test_values_have_their_option_s_type() -> None:
    spaces = {
        "replay": Space("uniform", [5, 20]),
        "lr": Space("uniform", [0.1, 0.9]),
        "momentum": Space("choose", [0.0, 0.9]),
        "bounded": Space("choose", [True, False]),
    }
    past: list[Outcome] = []
    for seed in range(8):
        values = suggestion(spaces, past, seed)
        assert type(values["replay"]) is int
        assert 5 <= values["replay"] <= 20
        assert 0.1 <= values["lr"] <= 0.9
        assert values["momentum"] in (0.0, 0.9)
        assert values["bounded"] in (True, False)
        past.append(tried(values, float(seed)))


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
def test_worker_processes_give_the_same_as_this_one(
    here: Path, call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the runs that follow others are given out: with more workers than rows, too."""
    call(*TUNE[:3], "whole", "--trials", "2")
    monkeypatch.setattr(engine, "run_local", RUN_LOCAL)
    code, _, said = called(capsys, *TUNE, "--trials", "2", "--workers", "3")
    assert code == 0
    assert said.splitlines()[-1].startswith("4 of 4")
    assert trials(here / "out") == trials(here / "whole")
