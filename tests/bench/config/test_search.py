"""The section `search` is taken as it is meant, or refused in one line that names the key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from arbitrary import VALUES
from hypothesis import given
from hypothesis import strategies as st
from refused import refused, taken
from tiny import SEARCH, tiny

from syngap.bench.config.experiment import Experiment, read, with_settings
from syngap.bench.config.search import Search
from syngap.bench.config.space import Space


def searched(*settings: str) -> Experiment:
    given = with_settings({**tiny(), "search": SEARCH}, settings)
    return Experiment.from_mapping(given)


def search_of(experiment: Experiment) -> Search:
    assert experiment.search is not None
    return experiment.search


# Taken --------------------------------------------------------------------------------------------


def test_a_search_reads_back_as_itself() -> None:
    experiment = searched()
    mapping = yaml.safe_load(yaml.safe_dump(experiment.as_mapping()))
    assert Experiment.from_mapping(mapping) == experiment
    assert mapping["search"] == SEARCH


def test_the_stream_is_changed_while_searching_and_only_then() -> None:
    experiment = searched("search.stream.epochs=3")
    search = search_of(experiment)
    assert search.stream == experiment.stream.with_options({"validation": 0.2, "epochs": 3})
    assert experiment.stream.options["validation"] == 0.0
    assert search.as_mapping()["stream"] == {"validation": 0.2, "epochs": 3}


def test_runs_do_not_depend_on_the_search() -> None:
    assert searched().runs() == Experiment.from_mapping(tiny()).runs()
    assert searched("search=").search is None


def test_choosing_rows_chooses_their_spaces() -> None:
    some = searched().select(["er"], None)
    assert list(search_of(some).spaces) == ["er"]
    assert Experiment.from_mapping(some.as_mapping()) == some


def test_values_are_of_the_type_of_their_option() -> None:
    spaces = search_of(searched()).spaces["er"]
    assert spaces["lr"] == Space("log", [0.01, 1.0])
    assert type(spaces["lr"].values[1]) is float
    assert [type(value) for value in spaces["buffer"].values] == [int, int]


def test_a_row_of_another_name_has_the_options_of_its_method() -> None:
    experiment = searched(
        "methods.slow={method: syngap}", "search.spaces.slow={consolidation: {log: [0.1, 0.5]}}"
    )
    assert search_of(experiment).spaces["slow"]["consolidation"].values == [0.1, 0.5]


def test_a_start_reads_back_as_itself_and_has_its_option_s_type() -> None:
    experiment = searched(
        "search.spaces.er.lr={log: [1e-2, 1], start: 1e-1}",  # text, to YAML
        "search.spaces.er.buffer={uniform: [10, 40], start: 10}",
        "search.spaces.er.momentum={choose: [0, 0.9], start: 0}",
    )
    spaces = search_of(experiment).spaces["er"]
    starts = {option: space.start for option, space in spaces.items()}
    assert starts == {"lr": 0.1, "buffer": 10, "momentum": 0.0}
    assert [type(start) for start in starts.values()] == [float, int, float]
    mapping = yaml.safe_load(yaml.safe_dump(experiment.as_mapping()))
    assert Experiment.from_mapping(mapping) == experiment
    assert mapping["search"]["spaces"]["er"] == {
        "lr": {"log": [0.01, 1.0], "start": 0.1},
        "buffer": {"uniform": [10, 40], "start": 10},
        "momentum": {"choose": [0.0, 0.9], "start": 0.0},
    }


def test_no_start_is_none_and_is_not_written() -> None:
    experiment = searched("search.spaces.er.lr={log: [0.01, 1], start: }")
    assert search_of(experiment).spaces["er"]["lr"].start is None
    assert experiment.as_mapping()["search"]["spaces"]["er"]["lr"] == {"log": [0.01, 1.0]}


def test_the_shipped_search_gives_all_rows_the_same_chance() -> None:
    experiment = Experiment.from_mapping(read("table1-cifar100-tuned"))
    shared = Experiment.from_mapping(read("table1-cifar100-shared"))
    search = search_of(experiment)
    assert list(search.spaces) == list(experiment.methods)
    assert all("lr" in spaces for spaces in search.spaces.values())
    for row in ("er", "er_ace", "derpp", "syngap", "joint"):
        assert search.spaces[row]["momentum"].values == [0.0, 0.9]
    assert (experiment.stream, experiment.model) == (shared.stream, shared.model)
    assert experiment.training == shared.training
    assert {*experiment.methods} == {row for row in shared.methods if "_lr" not in row}
    for row, spaces in search.spaces.items():
        for option, space in spaces.items():
            value = experiment.methods[row].options[option]
            low, high = min(space.values), max(space.values)
            assert low <= value <= high, "what stands in the table could have been found"
            assert space.kind != "choose" or value in space.values
            assert space.start is not None, "every row begins with what was known to be good"
    changed = experiment.stream.with_options({"validation": 0.1, "epochs": 2})
    assert search.stream == changed, "all ten tasks"


# Refused ------------------------------------------------------------------------------------------

ALONE = "search.spaces.sgd"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("search=3", ["search: got 3, expected names"]),
        ("search.trial=3", ["search.trial: unknown option", '"trials"']),
        ("search.quux=3", ["search.quux: unknown option", "trials, seeds, stream, spaces"]),
        ("search.trials=0", ["search.trials: got 0, expected a whole number from 1 to 10000"]),
        ("search.trials=", ["search.trials: missing"]),
        ("search.seeds=", ["search.seeds: missing"]),
        ("search.stream=", ["search.stream: missing"]),
        ("search.spaces=", ["search.spaces: missing"]),
        ("search.seeds=[7, 7]", ["search.seeds: got [7, 7], expected different"]),
        ("search.seeds=x", ['search.seeds: got "x", expected numbers such as']),
        ("search.seeds=[100, 0]", ["search.seeds: 0 ", "table"]),
        ("search.stream.validation=0", ["search.stream.validation: got 0.0, expected a share"]),
        ("search.stream={first: 1}", ["search.stream.validation: got 0.0, expected a share"]),
        ("search.stream.validation=7", ["search.stream.validation: got 7, expected a number be"]),
        ("search.stream.epoch=1", ["search.stream.epoch: unknown option", '"epochs"']),
        ("search.stream.name=npz", ["search.stream.name: unknown option"]),
        ("search.stream=[1]", ["search.stream: got [1], expected names"]),
        ("search.stream.tasks=2", ["search.stream.tasks: is of the data set", "epochs, batch"]),
        ("stream.validation=0.1", ["stream.validation: got 0.1", "belongs into search.stream"]),
        ("search.spaces=[er]", ["search.spaces: got", "expected names"]),
        ("search.spaces.err={}", ["search.spaces.err: unknown row", '"er"']),
        ("search.spaces.er={}", ["search.spaces.er: missing"]),
        ("search.spaces.er=3", ["search.spaces.er: got 3, expected names"]),
        ("search.spaces.er.momentun={}", ["search.spaces.er.momentun: unknown", '"momentum"']),
        ("search.spaces.er.lr=0.3", ["search.spaces.er.lr: got 0.3, expected {log: [low, high]}"]),
        ("search.spaces.er.lr={log: [1]}", ["search.spaces.er.lr: got", "{log: [low, high]}"]),
        ("search.spaces.er.lr={log: [1, 2, 3]}", ["search.spaces.er.lr: got", "[low, high]"]),
        ("search.spaces.er.lr={lgo: [1, 2]}", ["search.spaces.er.lr: got", "{log: [low, high]}"]),
        ("search.spaces.er.lr={log: [1, 2], choose: [1, 2]}", ["search.spaces.er.lr: got"]),
        ("search.spaces.er.lr={choose: [1]}", ["search.spaces.er.lr: got", "{choose: [one, ot"]),
        ("search.spaces.er.lr={log: [0, 1]}", ["search.spaces.er.lr: got 0, expected a positive"]),
        ("search.spaces.er.lr={log: [2, 1]}", ["search.spaces.er.lr.log: got [2.0, 1.0]", "first"]),
        ("search.spaces.er.lr={log: [fast, 1]}", ['search.spaces.er.lr: got "fast", expected']),
        ("search.spaces.er.momentum={log: [0, 0.9]}", ["er.momentum.log: got", "positive"]),
        ("search.spaces.er.momentum={choose: [0, 0.0]}", ["er.momentum.choose: got", "different"]),
        ("search.spaces.er.momentum={choose: [0, 1]}", ["er.momentum: got 1, expected"]),
        ("search.spaces.er.memory={log: [reservoir, balanced]}", ["er.memory.log: got", "choose"]),
        ("search.spaces.er.memory={choose: [reservoir, big]}", ['er.memory: got "big", expected']),
        ("search.spaces.er.buffer={uniform: [1, 2.5]}", ["er.buffer: got 2.5, expected a whole"]),
        (f"{ALONE}={{lr: {{log: [0.1, 1], start: 2}}}}", ["sgd.lr.start: got 2.0", "[0.1, 1.0]"]),
        (f"{ALONE}={{lr: {{log: [0.1, 1], start: 0.01}}}}", ["sgd.lr.start: got 0.01", "between"]),
        (
            f"{ALONE}={{lr: {{uniform: [0.1, 1], start: 0}}}}",
            ["sgd.lr.start: got 0, expected a po"],
        ),
        (f"{ALONE}={{lr: {{log: [0.1, 1], start: fast}}}}", ['sgd.lr.start: got "fast", expected']),
        (f"{ALONE}={{lr: {{log: [0.1, 1], start: true}}}}", ["sgd.lr.start: got true, expected a"]),
        (
            f"{ALONE}={{lr: {{choose: [0.1, 1], start: 0.5}}}}",
            ["sgd.lr.start: got 0.5", "one of [0."],
        ),
        (
            f"{ALONE}={{lr: {{choose: [0.1, 1], start: true}}}}",
            ["sgd.lr.start: got true, expected"],
        ),
        (f"{ALONE}={{lr: {{start: 0.1}}}}", ["sgd.lr: got", "expected {log: [low, high]}"]),
        ("search.spaces.er.lr.start=0.1", ["er.buffer.start: missing", "all have"]),
        ("search.spaces.er.buffer.start=10.5", ["er.buffer.start: got 10.5, expected a whole"]),
    ],
)
def test_searches_that_cannot_be(setting: str, words: list[str]) -> None:
    with refused(*words):
        searched(setting)


def test_test_samples_of_the_table_cannot_come_into_a_search_by_another_split() -> None:
    settings = ("stream={name: core50, split: sessions}", "search.stream={validation: 0.2}")
    assert search_of(searched(*settings)).stream.options["split"] == "sessions"
    with refused("search.stream.split: is of the data set", "test samples"):
        searched(*settings, "search.stream.split=frames")


def test_what_is_held_out_by_the_seed_must_be_held_out_by_a_number() -> None:
    """Otherwise a trial, which has another seed, learns from what the table tests on."""
    settings = ("stream={name: folder, path: images, tasks: 2}", "search.stream={validation: 0.2}")
    with refused("stream.holdout_seed: missing", "test samples"):
        searched(*settings)
    assert (
        search_of(searched(*settings, "stream.holdout_seed=0")).stream.options["holdout_seed"] == 0
    )
    with refused("search.stream.holdout_seed: is of the data set"):
        searched(*settings, "stream.holdout_seed=0", "search.stream.holdout_seed=1")


def test_seeds_that_were_chosen_by_cannot_be_asked_for_later() -> None:
    experiment = searched()
    assert experiment.select(None, [0, 7]).seeds == [0, 7]
    with refused("--seeds: 100 is a seed of the experiment's search, ", "give others"):
        experiment.select(None, [0, 100])
    with refused("--seeds: 7, 100 are seeds of the experiment's search"):
        searched("search.seeds=[100, 7]").select(None, [7, 0, 100])


@given(VALUES)
def test_anything_is_a_search_or_refused_in_one_line(value: Any) -> None:
    taken(Experiment.from_mapping, {**tiny(), "search": value})


@given(st.sampled_from(["trials", "seeds", "stream", "spaces"]), VALUES)
def test_anything_in_a_search_is_taken_or_refused_in_one_line(key: str, value: Any) -> None:
    experiment = taken(Experiment.from_mapping, {**tiny(), "search": {**SEARCH, key: value}})
    if experiment is not None:
        assert Experiment.from_mapping(experiment.as_mapping()) == experiment


@given(VALUES)
def test_anything_is_a_space_or_refused_in_one_line(value: Any) -> None:
    for space in (value, {"log": [0.1, 1.0], "start": value}, {"choose": [1, 2], "start": value}):
        spaces = {"er": {"lr": space}}
        taken(Experiment.from_mapping, {**tiny(), "search": {**SEARCH, "spaces": spaces}})


# A space ------------------------------------------------------------------------------------------


@given(st.floats(-6, 6), st.floats(0.001, 6), st.floats(0, 1), st.booleans())
def test_values_are_short_and_within_their_bounds(
    exponent: float, width: float, way: float, logarithmic: bool
) -> None:
    low, high = 10**exponent, 10 ** (exponent + width)
    space = Space("log" if logarithmic else "uniform", [low, high])
    drawn = min(max(low + way * (high - low), low), high)
    value = space.value(drawn)
    assert low <= value <= high
    assert value in (low, high) or (
        len(f"{value:e}".partition("e")[0].rstrip("0")) <= len("1.23")
        and math.isclose(value, drawn, rel_tol=0.006)
    )


@pytest.mark.parametrize(
    ("space", "value", "edge"),
    [
        (Space("log", [0.01, 1.0]), 0.0101, "lower"),
        (Space("log", [0.01, 1.0]), 0.05, ""),
        (Space("log", [0.01, 1.0]), 1.0, "upper"),
        (Space("uniform", [0.0, 1.0]), 0.03, "lower"),
        (Space("uniform", [0, 100]), 50, ""),
        (Space("uniform", [0, 100]), 97, "upper"),
        (Space("choose", [0.9, 0.99, 0.999]), 0.9, "lower"),
        (Space("choose", [0.9, 0.999, 0.99]), 0.999, "upper"),
        (Space("choose", [0.9, 0.99, 0.999]), 0.99, ""),
        (Space("choose", [0.0, 0.9]), 0.9, ""),
        (Space("choose", ["a", "b", "c"]), "a", ""),
    ],
    ids=str,
)
def test_the_edge_of_a_space_is_known(space: Space, value: Any, edge: str) -> None:
    assert space.edge(value) == edge
