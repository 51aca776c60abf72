"""Configurations and records travel as objects: only files hold mappings of anything."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pickle
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from tiny import job, tiny

import syngap.bench
from syngap.bench.config.component import Component
from syngap.bench.config.experiment import Experiment
from syngap.bench.config.run_config import RunConfig, Training
from syngap.bench.errors import UserError

PACKAGES = ("config", "store", "runner", "tuning", "landscapes")


def data_classes() -> dict[str, type]:
    """Every dataclass of the packages that configurations and records go through, by its name."""
    found = {}
    for package in PACKAGES:
        path = [str(Path(syngap.bench.__file__).parent / package)]
        for module in pkgutil.iter_modules(path, f"syngap.bench.{package}."):
            for kind in vars(importlib.import_module(module.name)).values():
                ours = isinstance(kind, type) and kind.__module__.startswith("syngap.bench.")
                if ours and dataclasses.is_dataclass(kind):
                    found[kind.__name__] = kind
    return found


def maps_to_anything(hint: Any) -> bool:
    """Whether a mapping with values of any type is part of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return (mapping and Any in arguments) or any(map(maps_to_anything, arguments))


def test_no_object_carries_a_mapping_of_anything() -> None:
    """What is in it could not be checked: a misspelt name would show in the middle of a run."""
    kinds = data_classes()
    assert {"Experiment", "Job", "Planned", "Run", "RunConfig", "Search", "Trial"} <= {*kinds}
    assert [
        f"{kind.__name__}.{field}"
        for kind in kinds.values()
        for field, hint in get_type_hints(kind).items()
        if maps_to_anything(hint)
    ] == []


def test_a_run_names_what_it_is_made_of() -> None:
    (run,) = Experiment.from_mapping(tiny("stream.epochs=3")).select(["er"], [5]).runs()
    assert (run.experiment, run.row, run.seed, run.name) == ("tiny", "er", 5, "er-5")
    assert (run.stream.name, run.stream.options["epochs"]) == ("digits", 3)
    assert (run.model.name, run.model.options["hidden"]) == ("mlp", [8])
    assert (run.method.name, run.method.options["lr"]) == ("er", 0.3)
    assert run.training == Training(device="cpu")


def test_a_run_is_the_same_in_another_process(tmp_path: Path) -> None:
    here = job(tmp_path)
    assert pickle.loads(pickle.dumps(here)) == here


def test_a_changed_copy_leaves_the_run_alone() -> None:
    (run,) = Experiment.from_mapping(tiny()).select(["er"], None).runs()
    before = json.dumps(run.as_mapping())
    other = dataclasses.replace(run.on_device("cuda"), method=run.method.with_options({"lr": 1.0}))
    assert (other.training.device, other.method.options["lr"]) == ("cuda", 1.0)
    assert json.dumps(run.as_mapping()) == before


def test_a_device_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match=r'training\.device: got "tpu", expected one of "auto"'):
        Training().on_device("tpu")


def test_a_component_reads_back_as_itself_wherever_its_name_stands() -> None:
    component = Component("er", {"lr": 0.1, "replay": 8})
    assert Component.from_mapping(component.as_mapping()) == component
    assert Component.from_mapping({"lr": 0.1, "name": "er", "replay": 8}) == component


def test_a_run_says_all_of_its_parts() -> None:
    """A field that is added is in config.yaml too, or a run would not be known by it."""
    (run,) = Experiment.from_mapping(tiny()).select(["er"], None).runs()
    names = [field.name for field in dataclasses.fields(RunConfig)]
    assert list(run.as_mapping()) == ["format", *names]
