"""A configuration is complete, reads back as what it was, and is refused in one line or taken."""

from __future__ import annotations

import copy
import datetime
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from arbitrary import KEYS, VALUES, WORDS
from hypothesis import assume, example, given
from hypothesis import strategies as st
from refused import taken
from tiny import TINY, called, job, results, run_inline, tiny, written

from syngap.bench import methods, models, streams
from syngap.bench.config.experiment import (
    Experiment,
    Training,
    complete_method,
    parse_yaml,
    read,
    seeds_of,
    shipped,
    with_earlier_defaults,
    with_settings,
)
from syngap.bench.config.finetuning import parse_experiment
from syngap.bench.errors import UserError
from syngap.bench.options import signature
from syngap.bench.runner import local as engine
from syngap.bench.runner.plan import is_done
from syngap.bench.runner.recorded import repeat_experiment
from syngap.bench.store.folder_reader import read_runs

# Round trips --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped())
def test_what_ships_is_an_experiment_and_reads_back_as_itself(name: str) -> None:
    experiment = Experiment.from_mapping(read(name))
    assert experiment.name == name, "its folder is called like the command"
    mapping = experiment.as_mapping()
    assert Experiment.from_mapping(mapping) == experiment
    assert Experiment.from_mapping(mapping).as_mapping() == mapping
    text = yaml.safe_dump(mapping, sort_keys=False)
    assert Experiment.from_mapping(yaml.safe_load(text)) == experiment
    assert list(yaml.safe_load(text)["methods"]) == list(experiment.methods), "the table's order"


@pytest.mark.parametrize("name", shipped())
def test_what_ships_says_every_seed_and_row_once(name: str) -> None:
    runs = Experiment.from_mapping(read(name)).runs()
    assert len({(run.row, run.seed) for run in runs}) == len(runs)


def test_there_is_something_that_ships() -> None:
    assert "digits" in shipped()


def test_names_stand_for_options_left_at_their_defaults() -> None:
    short = Experiment.from_mapping(
        {"stream": "digits", "model": "mlp", "methods": {"er": None}, "seeds": "0..2"}
    )
    long = Experiment.from_mapping(
        {
            "name": "experiment",
            "stream": {"name": "digits"},
            "model": {"name": "mlp", "hidden": [100]},
            "training": {},
            "methods": {"er": {"method": "er", "lr": "1e-1"}},
            "seeds": [0, 1, 2],
        }
    )
    assert short == long


def test_a_row_is_named_apart_from_its_method() -> None:
    experiment = Experiment.from_mapping(tiny("methods={a: {method: er}, b: {method: er, lr: 1}}"))
    methods = experiment.methods.values()
    assert [(method.name, method.options["lr"]) for method in methods] == [("er", 0.1), ("er", 1.0)]
    assert [run.row for run in experiment.runs()] == ["a", "b"]


def test_selecting_keeps_the_order_of_the_experiment() -> None:
    experiment = Experiment.from_mapping(tiny("methods.adam=", "seeds=[4, 2]"))
    some = experiment.select(["adam", "sgd"], None)
    assert list(some.methods) == ["sgd", "adam"]
    assert some.seeds == [4, 2]
    assert experiment.select(None, [7]).seeds == [7]
    assert experiment.select(None, None) == experiment


# config.yaml --------------------------------------------------------------------------------------


def test_the_configuration_of_a_run_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option of everything is there, so that a later default changes no earlier run."""
    monkeypatch.setattr(engine, "run_local", run_inline)
    assert called(capsys, "run", written(tmp_path), "--out", tmp_path / "out")[0] == 0
    for row in ("sgd", "er"):
        config = yaml.safe_load((tmp_path / f"out/{row}-0/config.yaml").read_text())
        assert list(config) == [
            *("format", "experiment", "row", "seed", "stream", "model", "training", "method"),
        ]
        assert set(config["stream"]) == {"name", *streams.options("digits")}
        assert set(config["model"]) == {"name", *signature(models.registry.get("mlp"))}
        assert set(config["training"]) == set(signature(Training))
        assert set(config["method"]) == {"name", *signature(methods.registry.get(row))}
        assert (config["experiment"], config["row"], config["seed"]) == ("tiny", row, 0)


def test_a_run_can_be_done_again_from_its_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "run_local", run_inline)
    command = ["run", written(tmp_path), "--methods", "er", "--seeds", "3"]
    assert called(capsys, *command, "--out", tmp_path / "out")[0] == 0
    config = yaml.safe_load((tmp_path / "out/er-3/config.yaml").read_text())
    method = config["method"]
    again = {
        "name": "again",
        **{part: config[part] for part in ("stream", "model", "training")},
        "methods": {"mine": {"method": method.pop("name"), **method}},
        "seeds": config["seed"],
    }
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(again))
    command = ["run", str(tmp_path / "again.yaml"), "--out", tmp_path / "again"]
    assert called(capsys, *command)[0] == 0
    assert results(tmp_path / "again/mine-3") == results(tmp_path / "out/er-3")


def test_an_experiment_can_be_run_from_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "run_local", run_inline)
    assert called(capsys, "run", written(tmp_path), "--out", tmp_path / "out")[0] == 0
    left = tmp_path / "out/experiment.yaml"
    assert called(capsys, "run", left, "--out", tmp_path / "again")[0] == 0
    assert results(tmp_path / "again/er-0") == results(tmp_path / "out/er-0")
    assert (tmp_path / "again/experiment.yaml").read_bytes() == left.read_bytes()


def test_an_option_that_came_later_than_a_run_is_at_its_default_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "run_local", run_inline)
    command = ["run", written(tmp_path), "--methods", "er", "--out", tmp_path / "out"]
    assert called(capsys, *command)[0] == 0
    left = [tmp_path / "out/er-0/config.yaml", tmp_path / "out/experiment.yaml"]
    for path in left:
        mapping = yaml.safe_load(path.read_text())
        method = mapping["method"] if "method" in mapping else mapping["methods"]["er"]
        del mapping["stream"]["validation"], mapping["training"]["threads"], method["memory"]
        path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    code, _, said = called(capsys, *command, "--resume")
    assert (code, said.partition(",")[0]) == (0, "1 of 1 run already done")
    for setting in ("stream.validation=0.1", "training.threads=2", "methods.er.memory=balanced"):
        code, _, said = called(capsys, *command, "--resume", "--set", setting)
        assert code == 2
        assert "there and is" in said


def test_a_run_that_does_not_say_remainder_had_short_last_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even ones came later and are the default: a table must not mix the two."""
    monkeypatch.setattr(engine, "run_local", run_inline)
    command = ["run", written(tmp_path), "--out", tmp_path / "out"]
    short = ("--set", "stream.remainder=short")
    assert called(capsys, *command, "--methods", "er", *short)[0] == 0
    for path in (tmp_path / "out/er-0/config.yaml", tmp_path / "out/experiment.yaml"):
        mapping = yaml.safe_load(path.read_text())
        assert mapping["stream"].pop("remainder") == "short"
        path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    for rows in ("er", "sgd"):
        code, _, said = called(capsys, *command, "--methods", rows, "--resume")
        assert code == 2
        assert 'stream.remainder was "short" there and is "even" now' in said
    code, _, said = called(capsys, *command, "--methods", "er", *short, "--resume")
    assert (code, said.partition(",")[0]) == (0, "1 of 1 run already done")
    recorded = repeat_experiment(read_runs(tmp_path / "out"), ["er"], 1)
    assert recorded.stream.options["remainder"] == "short"


def test_an_option_without_a_default_that_a_run_lacks_is_missed(tmp_path: Path) -> None:
    """Whatever it was, it cannot be told from what is asked for now."""
    here = job(tmp_path, "stream={name: npz, path: data.npz, tasks: 2}")
    mapping = here.config.as_mapping()
    del mapping["stream"]["path"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(mapping))
    with pytest.raises(UserError, match=r"stream\.path was null there"):
        is_done(here)


@pytest.mark.parametrize(("ran_on", "device"), [("cpu", "cpu"), ("NVIDIA H200", "cuda")])
def test_the_device_of_a_run_that_said_auto_is_the_one_it_ran_on(
    ran_on: str, device: str, tmp_path: Path
) -> None:
    here = job(tmp_path, f"training.device={device}")
    before = here.config.on_device("auto").as_mapping()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before))
    (tmp_path / "environment.json").write_text(json.dumps({"device": ran_on}))
    (tmp_path / "status.json").write_text(json.dumps({"state": "done"}))
    assert is_done(here)
    other = {"cpu": "cuda", "cuda": "cpu"}[device]
    with pytest.raises(UserError, match=f'device was "{device}" there and is "{other}" now'):
        is_done(job(tmp_path, f"training.device={other}"))


# Settings -----------------------------------------------------------------------------------------


def test_settings_leave_what_they_change_alone() -> None:
    before = copy.deepcopy(TINY)
    changed = with_settings(
        TINY,
        [
            *("stream.epochs=3", "methods.er.lr=9", "methods.adam.lr=1", "model.hidden=[1, 2]"),
            *("training.threads=2", "name=other", "seeds=[5]"),
        ],
    )
    assert before == TINY
    assert changed["stream"] == {"name": "digits", "batch": 100, "first": 2, "epochs": 3}
    assert changed["methods"]["er"] == {"lr": 9, "buffer": 20, "replay": 10}
    assert changed["methods"]["sgd"] == TINY["methods"]["sgd"]
    assert (changed["name"], changed["seeds"]) == ("other", [5])


def test_a_setting_for_one_row_leaves_rows_that_share_its_options_alone() -> None:
    """As YAML's aliases make them share."""
    shared = {"lr": 0.3}
    changed = with_settings({"methods": {"er": shared, "er_ace": shared}}, ["methods.er.lr=9"])
    assert changed == {"methods": {"er": {"lr": 9}, "er_ace": {"lr": 0.3}}}
    assert shared == {"lr": 0.3}


def test_a_setting_may_add_a_row_of_another_name() -> None:
    changed = with_settings(TINY, ["methods.er_slow={method: er, lr: 0.03}"])
    assert list(Experiment.from_mapping(changed).methods) == ["sgd", "er", "er_slow"]
    changed = with_settings(TINY, ["methods.er_slow.lr=0.03", "methods.er_slow.method=er"])
    assert list(Experiment.from_mapping(changed).methods) == ["sgd", "er", "er_slow"]


def test_later_settings_win() -> None:
    assert with_settings({}, ["a=1", "a=2"]) == {"a": 2}
    assert with_settings({}, ["a.b=1", "a={c: 2}", "a.d=3"]) == {"a": {"c": 2, "d": 3}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.3", 0.3),
        ("[1, 2]", [1, 2]),
        ("true", True),
        ("", None),
        ("a=b", "a=b"),
        ('"3"', "3"),
        ("{x: 1}", {"x": 1}),
    ],
)
def test_values_are_yaml(text: str, value: Any) -> None:
    assert with_settings({}, [f"a.b={text}"]) == {"a": {"b": value}}


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("3", [3]),
        ("0..4", [0, 1, 2, 3, 4]),
        ("0,3,7", [0, 3, 7]),
        ("5, 1..2", [5, 1, 2]),
        ("4..4", [4]),
    ],
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert seeds_of(text) == seeds


# Anything at all ----------------------------------------------------------------------------------


@given(VALUES)
@example({"stream": {"name": "digits", None: 1}, "model": "mlp", "methods": {"er": {}}})
@example({"stream": {datetime.date(2000, 1, 1): 1}, "model": "mlp", "methods": {"er": {}}})
@example({"str\neam": 1})
def test_anything_is_an_experiment_or_refused_in_one_line(value: Any) -> None:
    taken(Experiment.from_mapping, value)


@given(st.data())
def test_anything_in_the_place_of_something_is_taken_or_refused_in_one_line(data: Any) -> None:
    mapping = copy.deepcopy(TINY)
    place: Any = mapping
    while True:
        key = data.draw(st.sampled_from(sorted(place)) | KEYS)
        if not isinstance(place.get(key), dict) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(VALUES)
    experiment = taken(Experiment.from_mapping, mapping)
    if experiment is not None:
        assert Experiment.from_mapping(experiment.as_mapping()) == experiment
        yaml.safe_dump(experiment.as_mapping())


SETTINGS = st.one_of(
    st.text(),
    st.tuples(st.lists(WORDS | st.text(max_size=3), max_size=4), st.text()).map(
        lambda pair: f"{'.'.join(pair[0])}={pair[1]}"
    ),
)


@given(st.lists(SETTINGS, max_size=3), st.none() | VALUES)
@example(["methods.er.lr=!!timestamp x"], None)
@example(["methods={a\n: 1}"], None)
@example(['methods={"a\\nb": 1}'], None)
@example(["methods.er=&a [*a]"], None)
@example(["stre\nam.name.x=1"], None)
@example(["a=1"], {"methods": "er"})
@example(["methods.err.lr=1"], {"methods": {1: None, "er": None}})
@example(["methods={err: }"], {"methods": 3})
def test_any_setting_is_taken_or_refused_in_one_line(settings: list[str], value: Any) -> None:
    mapping = value if isinstance(value, dict) else TINY
    changed = taken(with_settings, mapping, settings)
    if changed is not None:
        taken(Experiment.from_mapping, changed)


@given(st.text() | st.text("0123456789.,- ", max_size=12))
def test_any_seeds_are_taken_or_refused_in_one_line(text: str) -> None:
    seeds = taken(seeds_of, text)
    if seeds is not None:
        assert seeds
        assert all(type(seed) is int and seed >= 0 for seed in seeds)
        assert len(set(seeds)) == len(seeds)


@given(st.text())
@example("digits\n")
def test_any_name_is_that_of_an_experiment_or_refused_in_one_line(name: str) -> None:
    assume(not name.endswith((".yaml", ".yml")))
    assert (taken(read, name) is not None) == (name in shipped())


SEARCH = {
    "seeds": "100..104",
    "stream": {"validation": 0.2},
    "spaces": {"sgd": {"lr": {"log": [0.1, 1.0]}}},
}
SECTIONS: dict[str, Any] = {"model": {}, "training": {}, "methods": {"sgd": {"lr": 0.1}}}


@pytest.mark.parametrize(
    "whole",
    [
        {**SECTIONS, "stream": {"name": "digits"}, "model": {"name": "mlp"}, "search": SEARCH},
        {**SECTIONS, "texts": {"name": "python"}, "model": {"name": "byte"}, "anchors": {}},
    ],
    ids=["stream", "finetuning"],
)
def test_where_names_with_values_are_expected_an_example_is_shown_that_is_accepted(
    whole: dict[str, Any],
) -> None:
    """Of the whole file, too, and where a part that is needed is left empty."""

    def parts(content: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        if not isinstance(content, dict):
            return []
        return [path, *(each for key in content for each in parts(content[key], (*path, key)))]

    def put(value: Any, path: tuple[str, ...]) -> Any:
        changed = {"": copy.deepcopy(whole)}
        place: Any = changed
        *parents, last = ("", *path)
        for key in parents:
            place = place[key]
        place[last] = value
        return changed[""]

    def refusal(raw: Any) -> str:
        try:
            parse_experiment(with_settings(raw, []) if isinstance(raw, dict) else raw)
        except UserError as error:
            return str(error)
        return ""

    assert refusal(whole) == ""
    shown = set()
    for path, wrong in product(parts(whole), (None, 3, ["a"])):
        said, _, example = refusal(put(wrong, path)).partition(", such as ")
        if "names with values" in said or "needs stream" in said:
            place = () if "needs stream" in said else path
            assert refusal(put(yaml.safe_load(example), place)) == ""
            shown.add(path)
    assert {path for path in parts(whole) if len(path) < 2} <= shown


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"line 3: not YAML \(er is there twice\)"):
        parse_yaml("methods:\n  er: {lr: 0.1}\n  er: {lr: 0.2}\n", "mine.yaml")
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2}", "mine.yaml")["b"] == {"x": 2}


def test_a_stream_given_by_its_name_alone_can_be_set() -> None:
    given = {"stream": "digits", "model": "mlp"}
    assert with_settings(given, ["stream.epochs=2", "model.hidden=[5]"]) == {
        "stream": {"name": "digits", "epochs": 2},
        "model": {"name": "mlp", "hidden": [5]},
    }


def test_what_earlier_versions_did_without_saying() -> None:
    run = {"stream": {"batch": 64}, "training": {}, "method": {"name": "syngap", "every": 8}}
    then = with_earlier_defaults(run)
    assert then["stream"] == {"remainder": "short", "batch": 64}
    assert then["training"] == {"captured": False}
    assert then["method"] == {"name": "syngap", "every": 8, "warmup": 0}
    for name in ("cnn", "resnet18"):  # of which one had no norms
        then = with_earlier_defaults({"model": {"name": name, "width": 4}})
        assert then["model"].get("norm") == {"cnn": "none"}.get(name)
    said = {
        "model": {"name": "cnn", "norm": "group"},
        "stream": {"remainder": "even"},
        "training": {"captured": True},
        "methods": {"a": {"every": 8, "warmup": 5}, "b": {"every": 1}, "c": {"lr": 0.1}},
    }
    assert with_earlier_defaults(said) == said
    rows = {"syngap": {"every": 8}, "a": {"method": "syngap", "every": 8}, "er": {"every": 8}}
    assert [
        row
        for row, on in with_earlier_defaults({"methods": rows})["methods"].items()
        if "warmup" in on
    ] == [
        "syngap",
        "a",  # others may have an option of that name and none called warmup
    ]
    assert with_earlier_defaults({"method": {"name": "er", "every": 8}})["method"] == {
        "name": "er",
        "every": 8,
    }


def test_options_that_came_later_stand_behind_those_that_are_said() -> None:
    """So a label is the same where a method's package is installed and where it is not."""
    given = {"name": "er", "replay": 8, "lr": 0.3}
    assert list(complete_method(given))[:3] == list(given)
    assert complete_method(given)["average"] == 0.0
    unknown = {"name": "of another package", "b": 1, "a": 2}
    assert complete_method(unknown) == unknown
