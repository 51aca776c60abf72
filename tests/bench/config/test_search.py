"""The section `search` is taken as it is meant, or refused in one line that names the key."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
import yaml
from arbitrary import VALUES
from hypothesis import given
from hypothesis import strategies as st
from refused import refused, taken
from tiny import SEARCH, tiny

from syngap.bench.config.experiment import Experiment, complete_method, read, with_settings
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


def test_the_stream_has_validation_samples_while_searching_and_is_else_the_table_s() -> None:
    experiment = searched("stream.epochs=3", "search.stream.validation=0.3")
    search = search_of(experiment)
    assert search.stream == experiment.stream.with_options({"validation": 0.3})
    assert experiment.stream.options["validation"] == 0.0
    assert search.as_mapping()["stream"] == {"validation": 0.3}


def test_what_is_left_out_has_the_defaults() -> None:
    """16 trials and twice 4 more; a third of them with three seeds, two with five."""
    few = ("search.trials=", "search.added=", "search.rounds=", "search.seeds=100..104")
    search = search_of(searched(*few))
    assert (search.trials, search.added) == (16, [4, 4])
    assert search.counts == [(24, 1), (8, 3), (2, 5)]
    assert search.runs == 24 + 8 * 2 + 2 * 2


@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 9), max_size=3),
    st.lists(st.integers(1, 30) | st.floats(0.01, 0.99), max_size=3),
)
def test_the_number_of_runs_is_that_of_the_pairs_of_trial_and_seed(
    trials: int, added: list[int], parts: list[Any]
) -> None:
    rounds = [[part, 2 + 2 * place] for place, part in enumerate(parts)]
    seeds = list(range(100, 101 + (rounds[-1][1] - 1 if rounds else 0)))
    numbers = {"trials": trials, "added": added, "rounds": rounds, "seeds": seeds}
    search = search_of(Experiment.from_mapping({**tiny(), "search": {**SEARCH, **numbers}}))
    pairs = set()
    for number, count in search.counts:
        assert 1 <= number <= trials + sum(added)
        pairs |= {(trial, seed) for trial in range(number) for seed in range(count)}
    assert search.runs == len(pairs)


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
    assert [type(value) for value in spaces["replay"].values] == [int, int]


def test_a_row_of_another_name_has_the_options_of_its_method() -> None:
    experiment = searched(
        "methods.slow={method: syngap}", "search.spaces.slow={consolidation: {log: [0.1, 0.5]}}"
    )
    assert search_of(experiment).spaces["slow"]["consolidation"].values == [0.1, 0.5]


def test_a_value_beside_a_space_reads_back_as_itself_and_has_its_option_s_type() -> None:
    experiment = searched("search.spaces.er.average={decay: [0.9, 0.99], or: 0}")
    space = search_of(experiment).spaces["er"]["average"]
    assert (space, type(space.off)) == (Space("decay", [0.9, 0.99], 0.0), float)
    mapping = yaml.safe_load(yaml.safe_dump(experiment.as_mapping()))
    assert Experiment.from_mapping(mapping) == experiment
    assert mapping["search"]["spaces"]["er"]["average"] == {"decay": [0.9, 0.99], "or": 0.0}


def test_the_shipped_search_gives_all_rows_the_same_chance() -> None:
    experiment = Experiment.from_mapping(read("table1-cifar100-tuned"))
    shared = Experiment.from_mapping(read("table1-cifar100-shared"))
    search = search_of(experiment)
    assert list(search.spaces) == list(experiment.methods), "joint training too"
    assert (experiment.stream, experiment.model) == (shared.stream, shared.model)
    assert replace(experiment.training, evaluate_every=0) == shared.training
    assert {row for row in shared.methods if "_lr" not in row} <= {*experiment.methods}
    assert search.stream == experiment.stream.with_options({"validation": 0.1})
    for row, spaces in search.spaces.items():
        method = experiment.methods[row]
        default = complete_method({"name": method.name})
        assert "lr" in spaces
        if method.options.get("buffer") or method.name == "joint":
            assert "momentum" in spaces
        for option, space in spaces.items():
            assert holds(space, method.options[option]), (row, option)
            if option not in ("average", "teacher"):  # which are off by default
                assert holds(space, default[option]), (row, option)
    for row, lr, momentum in (("er", 0.01, 0.9), ("er_ace", 0.03, 0.0)):
        spaces = search.spaces[row]
        assert holds(spaces["lr"], lr), "which is better than what an earlier search found"
        assert holds(spaces["momentum"], momentum)
    runs = len(search.spaces) * search.runs
    said = (files("syngap.bench.config") / "shipped/table1-cifar100-tuned.yaml").read_text()
    assert (
        f"{search.counts[0][0]} trials and {search.runs} runs a row, {runs} runs in all: " in said
    )
    assert f"{runs * 9 / 60:.0f} minutes of an H200 at 9 s a run" in said


GATED = {"er": "syngap", "er_ace": "gated_er_ace", "derpp": "gated_derpp"}


@pytest.mark.parametrize("loss", GATED)
def test_the_tuned_table_has_every_loss_with_and_without_gate_average_and_teacher(
    loss: str,
) -> None:
    experiment = Experiment.from_mapping(read("table1-cifar100-tuned"))
    spaces = search_of(experiment).spaces
    for row, name, directions in (
        (loss, loss, None),
        (GATED[loss], GATED[loss], False),
        (f"directions_{loss}", GATED[loss], True),
    ):
        own = {*spaces[row]}
        assert not own & {"average", "teacher"}
        assert {*spaces[f"{row}_average"]} == own | {"average"}
        assert {*spaces[f"{row}_taught"]} == own | {"average", "teacher"}
        for ending, average, teacher in (("", 0, 0), ("_average", 1, 0), ("_taught", 1, 1)):
            method = experiment.methods[f"{row}{ending}"]
            options = method.options
            assert (method.name, options.get("directions")) == (name, directions)
            assert (bool(options["average"]), bool(options["teacher"])) == (average, teacher)


def holds(space: Space, value: Any) -> bool:
    if space.kind == "choose" or value == space.off:
        return value in [*space.values, space.off]
    return bool(space.values[0] <= value <= space.values[1])


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("search=3", ["search: got 3, expected names"]),
        ("search.trial=3", ["search.trial: unknown option", '"trials"']),
        ("search.quux=3", ["search.quux: unknown option", "rounds, seeds, stream, spaces"]),
        ("search.trials=0", ["search.trials: got 0, expected a whole number from 1 to 10000"]),
        ("search.added=3", ["search.added: got 3, expected a list, each a whole number"]),
        ("search.added=[0]", ["search.added: got [0], expected a list"]),
        ("search.rounds=3", ["search.rounds: got 3, expected pairs", "[[0.33, 3], [2, 5]]"]),
        ("search.rounds=[2, 2]", ["search.rounds: got [2, 2], expected pairs"]),
        ("search.rounds=[[0, 2]]", ["search.rounds: got 0, expected a whole number"]),
        ("search.rounds=[[2, 1]]", ["search.rounds: got [[2, 1]], expected more seeds in every"]),
        ("search.rounds=[[4, 2], [2, 2]]", ["search.rounds: got", "more seeds in every round"]),
        (
            "search.rounds=[[2, 3]]",
            ["got 2 seeds, and the last of search.rounds needs 3, such as 100..102"],
        ),
        ("search.seeds=", ["search.seeds: missing"]),
        ("search.stream=", ["search.stream: missing"]),
        ("search.spaces=", ["search.spaces: missing"]),
        ("search.seeds=[7, 7]", ["search.seeds: got [7, 7], expected different"]),
        ("search.seeds=x", ['search.seeds: got "x", expected numbers such as']),
        ("search.seeds=[100, 0]", ["search.seeds: 0 ", "table"]),
        ("search.stream.validation=0", ["search.stream.validation: got 0.0, expected a share"]),
        ("search.stream={}", ["search.stream.validation: got 0.0, expected a share"]),
        ("search.stream.first=1", ["search.stream.first: a search runs", "as long as the table"]),
        ("search.stream.epochs=2", ["search.stream.epochs: a search runs on the table's own"]),
        ("search.stream.validation=7", ["search.stream.validation: got 7, expected a number be"]),
        ("search.stream.epoch=1", ["search.stream.epoch: unknown option", '"epochs"']),
        ("search.stream.name=npz", ["search.stream.name: unknown option"]),
        ("search.stream=[1]", ["search.stream: got [1], expected names"]),
        ("search.stream.tasks=2", ["search.stream.tasks: a search runs on the table's own"]),
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
        ("search.spaces.er.momentum={decay: [0, 1]}", ["er.momentum: got 1, expected"]),
        ("search.spaces.er.lr={decay: [0.1, 1]}", ["er.lr.decay: got", "numbers below 1"]),
        ("search.spaces.er.average={decay: [0, 0.9], or: 1}", ["er.average: got 1, expected"]),
        ("search.spaces.er.lr={or: 0.1}", ["er.lr: got", "expected {log: [low, high]}"]),
        ("search.spaces.er.momentum={choose: [0, 0.0]}", ["er.momentum.choose: got", "different"]),
        ("search.spaces.er.momentum={choose: [0, 1]}", ["er.momentum: got 1, expected"]),
        ("search.spaces.er.memory={log: [reservoir, balanced]}", ["er.memory.log: got", "choose"]),
        ("search.spaces.er.memory={choose: [reservoir, big]}", ['er.memory: got "big", expected']),
        ("search.spaces.er.buffer={uniform: [1, 2.5]}", ["er.buffer: got 2.5, expected a whole"]),
        ("search.spaces.er.lr.start=0.1", ["er.lr.start: is gone", "default and the value of the"]),
    ],
)
def test_searches_that_cannot_be(setting: str, words: list[str]) -> None:
    with refused(*words):
        searched(setting)


def test_test_samples_of_the_table_cannot_come_into_a_search_by_another_split() -> None:
    settings = ("stream={name: core50, split: sessions}", "search.stream={validation: 0.2}")
    assert search_of(searched(*settings)).stream.options["split"] == "sessions"
    with refused("search.stream.split: a search runs on the table's own stream"):
        searched(*settings, "search.stream.split=frames")


def test_what_is_held_out_by_the_seed_must_be_held_out_by_a_number() -> None:
    """Otherwise a trial, which has another seed, learns from what the table tests on."""
    settings = ("stream={name: folder, path: images, tasks: 2}", "search.stream={validation: 0.2}")
    with refused("stream.holdout_seed: missing", "test samples"):
        searched(*settings)
    assert (
        search_of(searched(*settings, "stream.holdout_seed=0")).stream.options["holdout_seed"] == 0
    )
    with refused("search.stream.holdout_seed: a search runs on the table's own stream"):
        searched(*settings, "stream.holdout_seed=0", "search.stream.holdout_seed=1")


def test_seeds_that_were_chosen_by_cannot_be_asked_for_later() -> None:
    experiment = searched()
    assert experiment.select(None, [0, 8]).seeds == [0, 8]
    with refused("--seeds: 100 is a seed of the experiment's search, ", "give others"):
        experiment.select(None, [0, 100])
    with refused("--seeds: 7, 100 are seeds of the experiment's search"):
        searched().select(None, [7, 0, 100])


@given(VALUES)
def test_anything_is_a_search_or_refused_in_one_line(value: Any) -> None:
    taken(Experiment.from_mapping, {**tiny(), "search": value})


@given(st.sampled_from(["trials", "added", "rounds", "seeds", "stream", "spaces"]), VALUES)
def test_anything_in_a_search_is_taken_or_refused_in_one_line(key: str, value: Any) -> None:
    experiment = taken(Experiment.from_mapping, {**tiny(), "search": {**SEARCH, key: value}})
    if experiment is not None:
        assert Experiment.from_mapping(experiment.as_mapping()) == experiment


@given(VALUES)
def test_anything_is_a_space_or_refused_in_one_line(value: Any) -> None:
    for space in (value, {"log": [0.1, 1.0], "or": value}, {"decay": value}):
        spaces = {"er": {"lr": space}}
        taken(Experiment.from_mapping, {**tiny(), "search": {**SEARCH, "spaces": spaces}})


# A space ------------------------------------------------------------------------------------------


@given(st.floats(-6, 6), st.floats(0.001, 6), st.floats(0, 1), st.booleans())
def test_values_are_short_and_within_their_bounds(
    exponent: float, width: float, way: float, logarithmic: bool
) -> None:
    low, high = 10**exponent, 10 ** (exponent + width)
    space = Space("log" if logarithmic else "uniform", [low, high])
    drawn = low * (high / low) ** way if logarithmic else low + way * (high - low)
    value = space.at(min(way, 1 - 1e-9))
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
        (Space("decay", [0.9, 0.999]), 0.99, ""),
        (Space("decay", [0.9, 0.999]), 0.9985, "upper"),
        (Space("decay", [0.9, 0.999], 0.0), 0.0, ""),
        (Space("log", [0.1, 1.0]), 0.0, ""),
        (Space("log", [0.1, 1.0]), 0.01, "lower"),
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


SPACES = [
    Space("log", [0.01, 1.0]),
    Space("uniform", [5, 20]),
    Space("uniform", [0.1, 0.9]),
    Space("decay", [0.9, 0.999], 0.0),
    Space("choose", [True, False]),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_what_is_drawn_is_in_the_space_and_of_its_type(space: Space) -> None:
    drawn = [space.at(place / 60) for place in range(60)]
    near = [space.near(value, place / 60) for place, value in enumerate(drawn)]
    for value in drawn + near:
        assert holds(space, value)
        assert type(value) is type(space.values[0])
    if space.off is not None:
        assert drawn.count(space.off) == 20
    if space.kind != "choose":
        middle = sorted(value for value in drawn if value != space.off)
        assert (space.edge(middle[0]), space.edge(middle[-1])) == ("lower", "upper")


@pytest.mark.parametrize("space", SPACES[:4], ids=str)
@pytest.mark.parametrize("edge", ["lower", "upper"])
def test_a_space_is_widened_at_the_edge_alone_and_within_what_is_allowed(
    space: Space, edge: str
) -> None:
    low, high = space.values
    value = low if edge == "lower" else high
    found = space.widened(value, lambda bound: True)
    assert found is not None
    wider, new = found
    assert wider.values == ([new.values[0], high] if edge == "lower" else [low, new.values[1]])
    assert new.values == ([wider.values[0], low] if edge == "lower" else [high, wider.values[1]])
    assert new.values[0] < new.values[1]
    assert wider.off == space.off
    assert not holds(new, 0.5 * (low + high))
    assert space.widened(value, lambda bound: False) is None
    assert space.widened(space.near(space._between(0.5), 0.5), lambda bound: True) is None


def test_a_space_is_widened_as_far_as_the_option_allows_and_to_what_lies_outside() -> None:
    found = Space("uniform", [0.0, 0.9]).widened(0.9, lambda bound: bound < 1)
    assert found is not None
    assert found[0].values == [0.0, 0.975], "a third and a sixth more would be above 1"
    found = Space("log", [0.01, 1.0]).widened(0.0001, lambda bound: True)
    assert found is not None
    assert found[0].values[0] < 0.0001
    assert Space("choose", [1, 2, 3]).widened(3, lambda bound: True) is None
