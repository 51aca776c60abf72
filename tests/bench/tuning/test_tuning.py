"""A search gives every row the same runs, keeps what is best over seeds, and survives a kill."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from refused import refused
from tiny import SEARCH, called, run_inline, state, tree, written
from torch import Tensor

from syngap.bench.config.component import Component
from syngap.bench.config.experiment import Experiment, complete_method, read
from syngap.bench.config.search import Search
from syngap.bench.config.space import Space
from syngap.bench.options import Count
from syngap.bench.reporting.searches import read_search, search_data
from syngap.bench.runner import local as engine
from syngap.bench.runner.run import Job
from syngap.bench.runs import Runs
from syngap.bench.store.outcome import Environment
from syngap.bench.store.search_record import TrialRun, environments_of
from syngap.bench.streams import Samples, Tasks
from syngap.bench.streams.digits import digits
from syngap.bench.tuning.halving import Source, Standing, Trial, standing, trial_source

Call = Callable[..., tuple[int, str, str]]
Score = Callable[[Trial, int], float | None]

TUNE = ("tune", "tiny.yaml", "--out", "out")
RUN_LOCAL = engine.run_local
SPACES = {"lr": Space("log", [0.01, 1.0]), "momentum": Space("choose", [0.0, 0.9])}
SOURCE = Source({"default": {"lr": 0.1, "momentum": 0.0}}, SPACES, seed=3)


# Halving, with made-up scores ---------------------------------------------------------------------


def rules(
    trials: int = 16,
    added: tuple[int, ...] = (4, 4),
    rounds: tuple[tuple[float, int], ...] = ((0.33, 3), (2, 5)),
) -> Search:
    seeds = list(range(100, 100 + max([1, *(count for _, count in rounds)])))
    return Search(trials, [*added], [*rounds], seeds, 0.1, Component(""), {})


def searched(
    search: Search, score: Score, source: Source = SOURCE, chance: random.Random | None = None
) -> tuple[Standing, dict[tuple[int, int], float | None]]:
    """The search to its end: how it stands then, and every run that it needed.

    With `chance`, runs end in any order, and it is looked at after each.
    """
    scores: dict[tuple[int, int], float | None] = {}
    while (now := standing(source, search, scores)).to_do:
        asked = [chance.choice(now.to_do)] if chance else now.to_do
        for trial, seed in asked:
            assert (trial.number, seed) not in scores, "no run is made twice"
            scores[trial.number, seed] = score(trial, seed)
    return now, scores


def noisy(trial: Trial, seed: int) -> float | None:
    """A score that depends on the values and the seed; some of the runs diverge."""
    chance = random.Random(f"{sorted(trial.values.items())} {seed}")
    return None if chance.random() < 0.1 else 50 + chance.gauss(0, 10)


@pytest.mark.parametrize("seed", range(12))
def test_it_is_halving_over_seeds_in_plain_loops(seed: int) -> None:
    chance = random.Random(seed)
    search = rules(
        chance.randint(1, 20),
        tuple(chance.randint(1, 4) for _ in range(chance.randint(0, 2))),
        ((chance.choice([0.33, 0.5, 7]), 3), (chance.choice([0.1, 2, 3]), 5)),
    )
    now, scores = searched(search, noisy, replace(SOURCE, seed=seed))
    total = search.trials + sum(search.added)
    assert [trial.number for trial in now.trials] == list(range(total))
    by_number, needed, left, known = now.trials, set(), list(range(total)), 1
    for number in left:
        needed.add((number, 100))
    for part, seeds in search.rounds:
        means = {}
        for number in left:
            runs = [noisy(by_number[number], 100 + place) for place in range(known)]
            means[number] = 0.0 if None in runs else sum(map(float, filter(None, runs))) / known
        best: list[int] = []
        while len(best) < (-int(-part * total // 1) if part < 1 else part) and len(best) < len(
            left
        ):
            highest = None
            for number in left:
                if number not in best and (highest is None or means[number] > means[highest]):
                    highest = number
            assert highest is not None
            best.append(highest)
        left, known = best, seeds
        needed |= {(number, 100 + place) for number in left for place in range(seeds)}
    assert {*scores} == needed
    finals = {
        number: [noisy(by_number[number], 100 + place) for place in range(5)] for number in left
    }
    means = {
        number: 0.0 if None in runs else sum(map(float, filter(None, runs))) / 5
        for number, runs in finals.items()
    }
    assert means[now.left[0].number] == pytest.approx(max(means.values()))


def test_every_row_has_the_same_runs_whatever_comes_of_them() -> None:
    def rising(trial: Trial, seed: int) -> float:
        return float(str(trial.values["lr"]))

    def broken(trial: Trial, seed: int) -> None:
        return None

    def level(trial: Trial, seed: int) -> float:
        return 1.0

    for search in (rules(), rules(3, (), ()), rules(9, (2,), ((3, 2),))):
        for score in (rising, broken, level, noisy):
            now, scores = searched(search, score)
            assert (len(now.trials), len(scores)) == (search.counts[0][0], search.runs)
            assert len({str(trial.values) for trial in now.trials}) == len(now.trials)


@pytest.mark.parametrize("seed", range(5))
def test_runs_may_end_in_any_order_and_the_search_be_looked_at_after_each(seed: int) -> None:
    at_once, scores = searched(rules(), noisy)
    one_by_one, same = searched(rules(), noisy, chance=random.Random(seed))
    assert one_by_one == at_once
    assert same == scores


def test_the_default_and_the_row_are_always_tried_first() -> None:
    row = {"lr": 0.007, "momentum": 0.5}  # which the spaces do not hold
    source = replace(SOURCE, known={**SOURCE.known, "row": row})
    for trials in (2, 3, 16):
        now = standing(source, rules(trials), {})
        assert [trial.values for trial in now.trials[:2]] == [SOURCE.known["default"], row]
        assert [trial.source for trial in now.trials] == [
            "default",
            "row",
            *["drawn"] * (trials - 2),
        ]
    same = replace(SOURCE, known={**SOURCE.known, "row": SOURCE.known["default"]})
    assert [trial.source for trial in standing(same, rules(3), {}).trials] == [
        *("default", "drawn", "drawn")
    ]


def test_draws_fill_the_space_and_depend_on_the_seed() -> None:
    trials = standing(replace(SOURCE, known={}), rules(), {}).trials
    rates = sorted(float(str(trial.values["lr"])) for trial in trials)
    for place, rate in enumerate(rates):
        low, high = 10 ** (-2 + 2 * place / 16), 10 ** (-2 + 2 * (place + 1) / 16)
        assert 0.99 * low <= rate <= 1.01 * high, "one in each sixteenth"
    other = standing(replace(SOURCE, known={}, seed=4), rules(), {}).trials
    assert [trial.values for trial in other] != [trial.values for trial in trials]


@pytest.mark.parametrize(("sign", "edge"), [(1, "upper"), (-1, "lower")])
def test_where_the_best_is_at_an_edge_the_space_is_widened_there(sign: int, edge: str) -> None:
    def score(trial: Trial, seed: int) -> float:
        return 50 + sign * float(str(trial.values["lr"]))

    search = rules()
    now, _ = searched(search, score)
    assert [(each.trials, each.option, each.edge) for each in now.widened] == [
        *((16, "lr", edge), (20, "lr", edge))
    ]
    for first, each in zip((16, 20), now.widened, strict=True):
        low, high = each.new.values
        added = [float(str(trial.values["lr"])) for trial in now.trials[first : first + 4]]
        assert all(low <= rate <= high for rate in added)
        assert all(trial.source == "beyond" for trial in now.trials[first : first + 4])
    assert now.spaces["lr"] == now.widened[-1].space
    assert now.spaces["momentum"] == SPACES["momentum"]
    best = float(str(now.left[0].values["lr"]))
    assert not 0.01 <= best <= 1.0
    bounded, _ = searched(search, score, replace(SOURCE, allows=lambda option, value: False))
    assert (bounded.widened, len(bounded.trials)) == ([], 24)


def test_where_the_best_is_inside_nothing_is_widened_and_what_is_added_is_near_it() -> None:
    def score(trial: Trial, seed: int) -> float:
        return 50 - abs(float(str(trial.values["lr"])) - 0.1)

    now, _ = searched(rules(), score)
    assert now.widened == []
    assert now.spaces == SPACES
    for trial in now.trials[16:]:
        assert trial.source == "near"
        assert 0.04 < float(str(trial.values["lr"])) < 0.25


def test_seeds_that_were_lucky_once_are_not_chosen() -> None:
    """The highest of 24 single scores is luck; the mean over five seeds is not."""

    def score(trial: Trial, seed: int) -> float:
        chance = random.Random(f"{trial.number} {seed}")
        return (52.0 if trial.number == 5 else 50.0) + chance.gauss(0, 1)

    now, scores = searched(rules(added=()), score)
    first = max(range(16), key=lambda number: scores[number, 100] or 0)
    assert first != 5
    assert now.left[0].number == 5


def test_what_the_method_refuses_is_not_drawn() -> None:
    experiment = Experiment.from_mapping(read("table1-cifar100-tuned"))
    assert experiment.search is not None
    for row, method in experiment.methods.items():
        source = trial_source(row, experiment.search, method)
        now, _ = searched(experiment.search, noisy, source)
        default = complete_method({"name": method.name})
        first = now.trials[0].values
        for option in source.spaces:  # but no average where the row has one
            is_off = option in ("average", "teacher") and not default[option]
            assert first[option] == (method.options if is_off else default)[option]
        assert now.trials[1].source == ("drawn" if row == "syngap" else "row")
        for trial in now.trials:
            if trial.values.get("teacher"):
                assert trial.values["average"], "which is what teaches"
    no_more = replace(SOURCE, spaces={"momentum": SPACES["momentum"]}, known={})
    with refused("the spaces of momentum have no more than 2 trials"):
        standing(no_more, rules(3), {})


# A search in a folder -----------------------------------------------------------------------------


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
        for name in [name for name in line if name.startswith("seconds")]:
            assert float(line.pop(name) or 0) >= 0
        del line["environments"]  # commands differ
    return lines


def loaded(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def test_every_row_has_its_runs_and_the_best_of_the_last_round_is_chosen(
    here: Path, call: Call
) -> None:
    code, printed, said = call(*TUNE)
    assert code == 0
    lines = trials(here / "out")
    assert [(line["row"], line["trial"]) for line in lines] == [
        (row, str(number)) for row in ("sgd", "er") for number in range(4)
    ]
    found = loaded(here / "out/search.yaml")
    tuned = loaded(here / "out/tuned.yaml")
    assert found["every_row"] == {"trials": 4, "runs": 6, "rounds": [[4, 1], [2, 2]]}
    assert said.splitlines()[-1].startswith("12 of 12"), "progress knows how many will come"
    for row in ("sgd", "er"):
        own = [line for line in lines if line["row"] == row]
        finals = [line for line in own if line["seeds"] == "100 7"]
        first = sorted(own, key=lambda line: -float(line["ACC 100"]))
        assert {line["trial"] for line in finals} == {line["trial"] for line in first[:2]}
        best = max(finals, key=lambda line: float(line["ACC"]))
        chosen = found["chosen"][row]
        assert (chosen["ACC"], chosen["trials"], chosen["runs"]) == (float(best["ACC"]), 4, 6)
        assert (chosen["trial"], chosen["source"]) == (int(best["trial"]), best["source"])
        assert chosen["seconds"] > 0
        for option, value in chosen["values"].items():
            assert float(best[option]) == value == tuned["methods"][row][option]
            assert str(value) in printed
        assert list(chosen["values"]) == list(SEARCH["spaces"][row])
        assert own[0]["source"] == "default"
        default = complete_method({"name": row})
        assert all(float(own[0][option]) == default[option] for option in SEARCH["spaces"][row])
    assert lines[5]["source"] == "row", "which has another rate than the default"
    assert {**tuned, "methods": 0} == {**loaded_experiment(here), "methods": 0}
    written_search = {**SEARCH, "spaces": found["spaces"]}
    assert {key: found[key] for key in written_search} == written_search


def test_the_table_says_how_many_of_its_trials_the_option_counts(here: Path, call: Call) -> None:
    printed = call(*TUNE, "--trials", "2", "--set", "search.added=[1, 2]", "--methods", "sgd")[1]
    said = "Trials of each row: 2 in the first step (--trials), then 1 and 2 more around its best."
    assert said in " ".join(printed.split())
    (line,) = (line for line in printed.splitlines() if line.startswith("│ sgd"))
    assert [cell.strip() for cell in line.split("│")][4] == "5"


def loaded_experiment(here: Path) -> dict[str, Any]:
    mapping = Experiment.from_mapping(read(str(here / "tiny.yaml"))).as_mapping()
    return dict(yaml.safe_load(yaml.safe_dump(mapping)))


def test_a_trial_is_a_run_on_validation_samples_as_long_as_the_table_s(
    here: Path, call: Call
) -> None:
    call(*TUNE, "--methods", "er")
    (line, *_) = trials(here / "out")
    config = loaded(here / "out/er-trial0-100/config.yaml")
    assert config["method"]["lr"] == float(line["lr"])
    assert config["method"]["replay"] == int(line["replay"])
    assert config["method"]["buffer"] == 20, "what is not searched is as it was"
    assert (config["seed"], config["stream"]["validation"]) == (100, 0.2)
    table = loaded_experiment(here)["stream"]
    assert {**config["stream"], "validation": 0.0} == table, "epochs and tasks above all"
    assert state(here / "out/er-trial0-100") == "done"
    final = (here / "out/er-trial0-100/accuracy.csv").read_text().splitlines()[-1]
    accuracies = [float(cell) for cell in final.split(",")[1:]]
    assert float(line["ACC 100"]) == pytest.approx(sum(accuracies) / 2, abs=1e-3)
    for each in trials(here / "out"):
        scores = [float(each[f"ACC {seed}"]) for seed in each["seeds"].split()]
        assert float(each["ACC"]) == pytest.approx(sum(scores) / len(scores), abs=1e-3)
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
    code, _, said = call("run", "out/tuned.yaml", "--out", "other", "--seeds", "7")
    assert (code, "--seeds: 7 is a seed of the experiment's search" in said) == (2, True)


def test_the_search_is_kept_with_the_results_and_shown(here: Path, call: Call) -> None:
    """Every trial with its scores by seed, what was chosen, what was widened."""
    space = {"lr": {"log": [0.02, 0.05]}}
    narrow = ("methods.er.lr=0.03", f"search.spaces.er={space}")
    written(here, f"search={SEARCH}", *narrow)
    assert call(*TUNE)[0] == 0
    assert call("keep", "out")[0] == 0
    assert call("run", "out/tuned.yaml", "--out", "table")[0] == 0
    assert call("keep", "table")[0] == 0
    kept = here / "results/tiny"
    assert {path.name for path in (kept / "search").iterdir()} == {"search.yaml", "trials.csv"}
    assert call("report", kept)[0] == 0
    found = read_search(kept, Runs(kept).rows)
    assert found is not None
    data = search_data(found)
    page = (kept / "index.html").read_text(encoding="utf-8")
    assert len(data["trials"]) == 8
    lines = trials(here / "out")
    for cells, line in zip(data["trials"], lines, strict=True):
        scores = [f"{seed}: {float(line[f'ACC {seed}']):.2f}" for seed in line["seeds"].split()]
        assert cells[1] == f"{line['trial']} ({line['source']})"
        assert cells[4] == "; ".join(scores)
        assert cells[4] in page
    assert "4 trials of every row with seed 100, the best 2 with 2 seeds, by Latin" in data["says"]
    assert data["columns"][-2:] == ["training", "device time"]
    cost = loaded(here / "out/search.yaml")["cost"]
    for cells, row in zip(data["rows"], ("sgd", "er"), strict=True):
        took = cost["rows"][row]
        assert cells[-2:] == [f"{took['seconds']:.0f} s", f"{took['device_seconds']:.0f} s"]
    in_all = f"{cost['all']['seconds']:.0f} s"
    assert f" a row, {in_all} in all. With 1 at a time, that is {in_all} of" in data["says"]
    widened = loaded(here / "out/search.yaml")["widened"]["er"][-1]["space"]["log"]
    assert f"lr {widened[0]:g} to {widened[1]:g} (log), widened" in data["rows"][1][1]
    assert "Spaces were widened where the best stood at an edge." in data["says"]
    assert all(row.used for row in found.rows)


def test_a_row_without_a_space_stays_as_it_is(here: Path, call: Call) -> None:
    written(here, f"search={SEARCH}", "methods.adam.lr=0.07")
    code, printed, _ = call(*TUNE)
    assert code == 0
    assert "not chosen, and as they were in tuned.yaml: adam" in printed
    assert loaded(here / "out/tuned.yaml")["methods"]["adam"]["lr"] == 0.07
    assert not list((here / "out").glob("adam*"))


def test_what_was_widened_is_said_and_recorded(here: Path, call: Call) -> None:
    """Digits need a rate far above 2e-4."""
    space = {"log": [1e-4, 2e-4]}
    written(here, f"search={SEARCH}", "methods.er.lr=0.0002", f"search.spaces.er={ {'lr': space} }")
    code, printed, said = call(*TUNE, "--methods", "er")
    assert code == 0
    (found,) = loaded(here / "out/search.yaml")["widened"]["er"]
    assert (found["after"], found["option"], found["edge"]) == (3, "lr", "upper")
    low, high = found["space"]["log"]
    assert low == 1e-4
    assert high > 0.1, "the default is better than all of the space"
    line = "er: the best of 3 trials was at the upper edge of lr, which was widened to 0.0001 to "
    line += f"{high:g} (log)"
    assert line in printed
    assert line in said, "while it goes on, too"
    assert [each["source"] for each in trials(here / "out")] == [
        "default",
        "row",
        "drawn",
        "beyond",
    ]


def test_a_value_at_the_edge_of_choices_is_said_to_be_there(here: Path, call: Call) -> None:
    choices = "search.spaces.er={lr: {choose: [0.1, 1.0e-9, 2.0e-9]}}"
    written(here, f"search={SEARCH}", choices, "search.added=[]", "methods.er.lr=0.1")
    printed = call(*TUNE, "--methods", "er")[1]
    assert "er: lr 0.1 is at the upper edge of what was tried" in printed
    assert loaded(here / "out/search.yaml")["chosen"]["er"]["edges"] == {"lr": "upper"}


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
    assert len(trials(here / "out")) == 8


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
    wild = "search.spaces.sgd={lr: {choose: [0.1, 0.2, 1.0e+29, 1.0e+30]}}"
    written(here, f"search={SEARCH}", wild)
    code, printed, _ = call(*TUNE, "--methods", "sgd")
    assert code == 0
    lines = trials(here / "out")
    diverged = [line for line in lines if float(line["lr"]) > 1]
    assert len(diverged) == 2
    for line in lines:
        assert line["state"] == ("diverged" if line in diverged else "done")
        assert line["why"].startswith("FloatingPointError: ") == (line in diverged)
        assert (float(line["ACC"]) == 0) == (line in diverged)
    assert "sgd: 2 of 4 trials diverged" in printed
    assert loaded(here / "out/tuned.yaml")["methods"]["sgd"]["lr"] in (0.1, 0.2)
    assert not list((here / "out").rglob("*.safetensors"))
    before = tree(here / "out")
    assert call(*TUNE, "--methods", "sgd", "--resume")[0] == 0
    assert set(tree(here / "out")) == {*before}
    assert trials(here / "out") == lines, "what diverged is not tried again"


def test_where_every_trial_diverges_nothing_is_chosen(here: Path, call: Call) -> None:
    wild = "search.spaces.sgd={lr: {log: [1.0e+29, 1.0e+30]}, weight_decay: {choose: [0, 1]}}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syngap.bench.tuning.halving.defaults", lambda kind: {})
        written(here, f"search={SEARCH}", wild, "methods.sgd.lr=1.0e+29")
        code, printed, _ = call(*TUNE, "--methods", "sgd")
    assert code == 0
    assert "sgd: 4 of 4 trials diverged" in printed
    assert "widened" not in printed
    assert loaded(here / "out/tuned.yaml")["methods"]["sgd"]["lr"] == 1e29
    assert loaded(here / "out/search.yaml")["chosen"] == {}


def test_another_failure_stops_its_row_and_is_tried_again(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = engine.execute, iter(range(99))

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
    ended = [line["trial"] for line in trials(here / "out") if line["row"] == "sgd"]
    assert ended == ["0", "2"], "what its round has besides"
    assert list(loaded(here / "out/search.yaml")["chosen"]) == ["er"]
    assert call(*TUNE, "--resume")[0] == 0
    assert call("tune", "tiny.yaml", "--out", "whole")[0] == 0
    assert trials(here / "out") == trials(here / "whole")


# Going on -----------------------------------------------------------------------------------------


class Killed(BaseException):
    """The end of everything."""


def stopped(monkeypatch: pytest.MonkeyPatch, call: Call, after: int, *arguments: object) -> None:
    """A search that is killed after so many runs."""
    whole, left = engine.execute, iter(range(after))

    def killed(job: Job, tell: Any) -> None:
        if next(left, None) is None:
            raise Killed
        whole(job, tell)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "execute", killed)
        with pytest.raises(Killed):
            call(*arguments)


@pytest.mark.parametrize("at", [2, 9, 11])
def test_a_search_that_was_killed_chooses_the_same_as_one_that_was_not(
    at: int, here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any of its rounds, and more than once."""
    assert call(*TUNE[:3], "whole")[0] == 0
    stopped(monkeypatch, call, at, *TUNE)
    if at < 11:
        stopped(monkeypatch, call, 1, *TUNE, "--resume")
    ended = len(list((here / "out").glob("*/status.json")))
    assert ended == at + (at < 11)
    code, _, said = call(*TUNE, "--resume")
    assert code == 0
    assert f" of {12 - ended}  " in said, "those that have ended are not to come"
    assert trials(here / "out") == trials(here / "whole")
    assert (here / "out/tuned.yaml").read_bytes() == (here / "whole/tuned.yaml").read_bytes()


# Going on elsewhere -------------------------------------------------------------------------------

ROUNDS = ("search.rounds=[[3, 2], [2, 4]]", "search.seeds=[100, 7, 8, 9]")  # 4 + 3 + 4 runs
ER = ("tune", "tiny.yaml", "--methods", "er", "--out")


def test_a_machine_that_comes_later_changes_no_number_of_those_before() -> None:
    """Lines of trials.csv name machines by number, and may be older than search.yaml."""
    first, later = (Environment({"device": each}) for each in ("one", "other"))
    runs = [TrialRun(50.0, 1.0, later), TrialRun(50.0, 1.0, first)]  # the later one's row is first
    assert environments_of(runs, environments_of(runs[1:])) == [first, later]


def assert_same_search(one: Path, other: Path) -> None:
    """With all digits of every score, and the same choice."""
    assert trials(one) == trials(other)
    chosen = [loaded(folder / "search.yaml")["chosen"]["er"] for folder in (one, other)]
    for key in ("values", "ACC", "trial", "seeds", "runs"):
        assert chosen[0][key] == chosen[1][key]


@pytest.mark.parametrize(("after", "of_round"), [(2, 1), (5, 2), (9, 3)])
def test_a_search_goes_on_from_its_packed_record_to_the_same_choice(
    after: int, of_round: int, here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any of its rounds, in another folder that has none of the runs."""
    written(here, f"search={SEARCH}", *ROUNDS)
    assert call(*ER, "whole")[0] == 0
    stopped(monkeypatch, call, after, *ER, "out")
    most = max(len(line["seeds"].split()) for line in trials(here / "out"))
    assert most == of_round
    refused = call("keep", "out")
    assert refused[0] == 2
    assert "--unfinished keeps what it has so far" in refused[2]
    code, _, said = call("keep", "out", "--unfinished")
    assert (code, f"has {after} runs so far" in said) == (0, True)
    kept = here / "results/tiny/search"
    assert {path.name for path in kept.iterdir()} == {"search.yaml", "trials.csv"}
    found = read_search(kept.parent, ())
    assert found is not None
    assert f"The search has not ended: {11 - after} runs to come." in search_data(found)["says"]
    code, _, said = call(*ER, "elsewhere", "--from", kept)
    assert (code, f"of {11 - after}  " in said) == (0, True), "none is run again"
    assert len(list((here / "elsewhere").glob("*/config.yaml"))) == 11 - after
    assert_same_search(here / "elsewhere", here / "whole")
    assert call("keep", "elsewhere")[0] == 0, "it has all that was kept before"
    tuned = [(here / folder / "tuned.yaml").read_bytes() for folder in ("elsewhere", "whole")]
    assert tuned[0] == tuned[1]


def test_run_folders_that_are_missing_or_damaged_are_made_up_for_by_the_record(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(here, f"search={SEARCH}", *ROUNDS)
    assert call(*ER, "whole")[0] == 0
    stopped(monkeypatch, call, 6, *ER, "out")
    shutil.rmtree(here / "out/er-trial0-100")
    cut = here / "out/er-trial1-100/accuracy.csv"
    cut.write_text("".join(cut.read_text().splitlines(True)[:-1]))
    (here / "out/er-trial2-100/status.json").write_text("{")
    (here / "out/er-trial3-100/config.yaml").write_bytes(b"\xff")
    shutil.copytree(here / "out", here / "without")
    code, _, said = call(*ER, "out", "--resume")
    assert (code, "of 5  " in said) == (0, True)
    assert_same_search(here / "out", here / "whole")
    # Without a record they are run again, and nothing is lost.
    (here / "without/trials.csv").unlink()
    code, _, said = call(*ER, "without", "--resume")
    assert (code, said.count("the run begins again")) == (0, 3)
    assert_same_search(here / "without", here / "whole")
    assert len(list((here / "without").glob("*.damaged-*"))) == 3


@pytest.mark.parametrize("after", [5, 11, 13])
def test_one_command_makes_a_tuned_table_and_goes_on_wherever_it_was_stopped(
    after: int, here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the search of 12 runs, in its last, and within the table of 2."""
    command = ("tune", "tiny.yaml", "--table", "--out")
    code, printed, _ = call(*command, "whole", "--results", "expected")
    assert code == 0
    assert "The table and the search are recorded in expected/tiny" in printed
    stopped(monkeypatch, call, after, *command, "out")
    kept = here / "results/tiny"
    assert (kept / "search").exists() == (after == 13)
    assert not (kept / "runs.jsonl").exists()
    assert call(*command, "out", "--resume")[0] == 0
    whole, found = Runs(here / "expected/tiny"), Runs(kept)
    assert [(run.row, run.accuracy) for run in found.runs] == [
        (run.row, run.accuracy) for run in whole.runs
    ]
    assert_same_search(kept / "search", here / "expected/tiny/search")
    chosen = loaded(kept / "search/search.yaml")["chosen"]
    for run in found.runs:
        options = run.config.method.options
        assert {name: options[name] for name in chosen[run.row]["values"]} == chosen[run.row][
            "values"
        ]
        assert run.config.entries["stream"]["validation"] == 0.0
    search = read_search(kept, found.rows)
    assert search is not None
    assert all(row.used for row in search.rows)


def test_a_tuned_table_is_not_recorded_over_other_results(here: Path, call: Call) -> None:
    """Which shows before the first run."""
    command = ("tune", "tiny.yaml", "--table", "--out", "out")
    assert call("run", "tiny.yaml", "--out", "plain")[0] == 0
    assert call("keep", "plain")[0] == 0
    before = tree(here)
    code, _, said = call(*command)
    assert (code, "results/tiny: holds results of another search, or of none" in said) == (2, True)
    assert tree(here) == before
    assert call(*command, "--results", "new", "--methods", "er")[0] == 0
    other = ("--set", "search.spaces.er.lr={log: [0.1, 1]}", "--results", "new", "--fresh")
    assert "new/tiny: holds results of another search" in call(*command, *other)[2]


def test_a_record_of_another_search_or_one_that_is_damaged_is_refused(
    here: Path, call: Call
) -> None:
    assert call(*TUNE)[0] == 0
    assert call("keep", "out", "kept")[0] == 0
    kept = here / "kept"

    def refused(*arguments: str) -> str:
        code, _, said = call("tune", "tiny.yaml", "--out", "new", "--from", "kept", *arguments)
        assert (code, len(said.splitlines())) == (2, 1)
        assert not (here / "new").exists()
        return said

    assert "stream.epochs was 1 there and is 2 now" in refused("--set", "stream.epochs=2")
    assert "method.buffer was 20 there and is 30" in refused("--set", "methods.er.buffer=30")
    assert "model.hidden was [8] there" in refused("--set", "model.hidden=[9]")
    assert "seeds was [100, 7] there" in refused("--set", "search.seeds=[100, 8]")
    alone = f"search.spaces={ {'sgd': SEARCH['spaces']['sgd']} }"
    assert "search.spaces.er: missing, but kept has trials of it" in refused("--set", alone)
    text = (kept / "trials.csv").read_text()
    for old, new, why in (
        ("default", "default,1", "a line that is shorter or longer"),
        ("er,1,row", "er,0,row", "row er, trial 0 is there twice"),
        (",0.3,", ",0.4,", "er, trial 1: lr was"),
    ):
        assert old in text
        (kept / "trials.csv").write_text(text.replace(old, new))
        assert f"kept/trials.csv: {why}" in refused().replace("not as syngap wrote it (", "")
    (kept / "trials.csv").unlink()
    assert "--from: kept has no record that a search can go on from" in refused()
    assert "kept: holds the record of a search" in call(*TUNE[:3], "kept", "--resume")[2]


def test_a_kept_search_is_replaced_by_what_continues_it_and_by_nothing_else(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch, call, 3, *TUNE)
    assert call("keep", "out", "kept", "--unfinished")[0] == 0
    assert call(*ER, "other", "--set", "search.stream.validation=0.3")[0] == 0
    before = tree(here / "kept")
    code, _, said = call("keep", "other", "kept")
    assert (code, "is there with another content" in said) == (2, True)
    assert tree(here / "kept") == before
    assert call(*TUNE, "--resume")[0] == 0
    assert call("keep", "out", "kept")[0] == 0
    assert call("keep", "other", "kept", "--replace")[0] == 0


def test_rows_that_are_searched_apart_are_recorded_as_if_they_were_searched_together(
    here: Path, call: Call
) -> None:
    command = ("tune", "tiny.yaml", "--table", "--out")
    assert call(*command, "both", "--results", "together")[0] == 0
    rows = list(SEARCH["spaces"])
    assert len(rows) > 1
    for row in rows:
        assert call(*command, row, "--results", "apart", "--methods", row)[0] == 0
    together, apart = here / "together/tiny", here / "apart/tiny"
    assert_same_search(apart / "search", together / "search")
    found, expected = (loaded(each / "search/search.yaml") for each in (apart, together))
    for part in ("spaces", "configuration", "every_row"):
        assert found[part] == expected[part]
    assert list(found["cost"]["rows"]) == rows
    assert found["cost"]["all"]["runs"] == expected["cost"]["all"]["runs"]
    of_tables = [
        sorted((run.row, run.seed, run.accuracy) for run in Runs(each).runs)
        for each in (apart, together)
    ]
    assert of_tables[0] == of_tables[1]
    search = read_search(apart, Runs(apart).rows)
    assert search is not None
    assert all(row.used for row in search.rows)
    before = tree(here)
    other = ("--methods", rows[0], "--results", "apart", "--set", "model.hidden=[9]")
    assert "apart/tiny: holds results of another search" in call(*command, "new", *other)[2]
    assert tree(here) == before


def test_trials_are_up_to_date_after_every_run(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process was killed in a way that it could not notice."""
    seen: list[tuple[int, int]] = []
    whole, ended = engine.execute, iter(range(99))

    def looks(job: Job, tell: Any) -> None:
        lines = trials(here / "out")
        seen.append((sum(len(line["seeds"].split()) for line in lines), next(ended)))
        whole(job, tell)

    monkeypatch.setattr(engine, "execute", looks)
    assert call(*TUNE)[0] == 0
    assert [recorded for recorded, _ in seen] == [run for _, run in seen] == list(range(12))


def test_the_record_has_all_digits_and_what_runs_cost(here: Path, call: Call) -> None:
    written(
        here, f"search={SEARCH}", "methods.joint={}", "search.spaces.joint={lr: {log: [0.01, 1]}}"
    )
    code, printed, _ = call(*TUNE)
    assert code == 0
    found, lines = loaded(here / "out/search.yaml"), trials(here / "out")
    scores = {row: found["chosen"][row]["ACC"] for row in ("sgd", "er")}  # joint is no rival
    best, other = sorted(scores, key=lambda row: -scores[row])
    by_seed = [
        [float(line[key]) for key in line if key.startswith("ACC ")]
        for row in (best, other)
        for line in lines
        if line["row"] == row and int(line["trial"]) == found["chosen"][row]["trial"]
    ]
    higher = sum(theirs > ours for ours, theirs in zip(*by_seed, strict=True))
    assert f"best on validation samples: {best}, {scores[best]:.2f}; {other} is next" in printed
    assert f"{scores[other]:.2f}, and higher with {higher} of {len(by_seed[0])} seed" in printed
    with (here / "out/trials.csv").open(encoding="utf-8") as file:
        times = list(csv.DictReader(file))
    every = 0.0
    for row in ("sgd", "er", "joint"):
        spent = 0.0
        for line, time in zip(lines, times, strict=True):
            for seed in line["seeds"].split() if line["row"] == row else ():
                folder = here / f"out/{row}-trial{line['trial']}-{seed}"
                final = (folder / "accuracy.csv").read_text().splitlines()[-1]
                assert float(line[f"ACC {seed}"]) == fmean(map(float, final.split(",")[1:]))
                status = json.loads((folder / "status.json").read_text())
                assert float(time[f"seconds {seed}"]) == status["seconds"]
                spent += status["seconds"]
        cost = found["cost"]["rows"][row]
        assert cost["runs"] == 6
        assert cost["seconds"] == found["chosen"][row]["seconds"] == pytest.approx(spent, abs=2e-3)
        assert cost["device_seconds"] == cost["seconds"], "one at a time"
        every += spent
    assert found["cost"]["all"]["runs"] == 18
    assert found["cost"]["all"]["seconds"] == pytest.approx(every, abs=2e-3)
    (environment,) = found["environments"]
    assert (environment["device"], environment["at_a_time"]) == ("cpu", 1)
    assert "started" not in environment


def test_a_trial_whose_folder_tried_something_else_is_refused_in_one_line(
    here: Path, call: Call
) -> None:
    call(*TUNE, "--methods", "er")
    path = here / "out/er-trial1-100/config.yaml"
    config = loaded(path)
    config["method"]["lr"] = 0.123
    path.write_text(yaml.safe_dump(config))
    code, _, said = call(*TUNE, "--methods", "er", "--resume")
    place = "out/er-trial1-100/config.yaml"
    assert code == 2
    assert said.startswith(f"syngap: {place}: method.lr was 0.123 there and is 0.3 now")
    assert len(said.splitlines()) == 1


def test_rows_can_be_added_and_change_nothing(here: Path, call: Call) -> None:
    assert call(*TUNE[:3], "whole")[0] == 0
    assert call(*TUNE, "--methods", "er")[0] == 0
    assert {line["row"] for line in trials(here / "out")} == {"er"}
    code, printed, said = call(*TUNE, "--resume")
    assert code == 0
    assert "of 6  sgd-trial0-100" in said, "those that have ended are not to come"
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
    assert "seeds was [100, 7] there and is [8, 7] now" in refused(
        "--resume", "--set", "search.seeds=[8, 7]"
    )
    assert "trials was 3 there and is 2 now" in refused("--resume", "--trials", "2")
    assert "rounds was [[2, 2]] there and is [[3, 2]] now" in refused(
        "--resume", "--set", "search.rounds=[[3, 2]]"
    )
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
    assert [line["row"] for line in trials(here / "out")] == ["er"] * 4


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
    assert "syngap: search: missing" in refused("core50-nc", "--trials", "3")
    assert "methods: unknown" in refused("tiny.yaml", "--methods", "quux")
    without = ("--set", "methods.adam={}", "--methods", "adam")
    assert "search.spaces.adam: missing" in refused("tiny.yaml", *without)
    assert "--trials" in refused("tiny.yaml", "--trials", "0")
    assert "--data: there is no folder" in refused("tiny.yaml", "--data", "nowhere")
    taken = refused("tiny.yaml", "--set", "search.seeds=[100, 0]")
    assert "search.seeds: 0 is a seed of the table, which would flatter the result" in taken
    shorter = refused("tiny.yaml", "--set", "search.stream.epochs=2")
    assert "search.stream.epochs: a search runs on the table's own stream, as long as" in shorter
    few = ("--set", "search.spaces.er={momentum: {choose: [0.0, 0.9]}}")
    assert "the spaces of momentum have no more than 2 trials" in refused("tiny.yaml", *few)


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
def test_worker_processes_give_the_same_as_this_one(
    here: Path, call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the runs that follow others are given out: with more workers than rows, too."""
    call(*TUNE[:3], "whole")
    monkeypatch.setattr(engine, "run_local", RUN_LOCAL)
    code, _, said = called(capsys, *TUNE, "--workers", "3")
    assert code == 0
    assert said.splitlines()[-1].startswith("12 of 12")
    assert trials(here / "out") == trials(here / "whole")
    found = loaded(here / "out/search.yaml")
    assert [each["at_a_time"] for each in found["environments"]] == [3]
    cost = found["cost"]["all"]
    assert cost["device_seconds"] == pytest.approx(cost["seconds"] / 3, abs=2e-3)
