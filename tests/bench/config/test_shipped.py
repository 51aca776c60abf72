"""What ships: every row can be made and learns, protocols are what they are said to be."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from importlib.resources import files
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT
from tiny import called

from syngap.bench import streams
from syngap.bench.config.component import Component
from syngap.bench.config.experiment import Experiment, read, shipped
from syngap.bench.runner.run import method_factory
from syngap.bench.streams import Batch, Pixels
from syngap.bench.streams.transform import Transform

DOCS = ROOT / "docs" / "running.md"
CPU = torch.device("cpu")
CORE50 = (23980, 11979, 11993, 11990, 11987, 11990, 11993, 11989, 11993)  # as its lists say

ON_IMAGES = [name for name in shipped() if not name.startswith("digits")]
each = pytest.mark.parametrize("name", shipped())
each_on_images = pytest.mark.parametrize("name", ON_IMAGES)


def experiment(name: str) -> Experiment:
    return Experiment.from_mapping(read(name))


def comment(name: str) -> str:
    """What the file says before it begins, in one line."""
    text = (files("syngap.bench.config") / "shipped" / f"{name}.yaml").read_text(encoding="utf-8")
    head = text.partition("name:")[0]
    return " ".join(line.lstrip("# ") for line in head.splitlines())


def classes(of: Experiment) -> int:
    if of.stream.name == "cifar100":
        return {"classes": 100, "superclasses": 20}[of.stream.options["labels"]]
    return {"digits": 10, "core50": 50, "folder": 100}[of.stream.name]


def samples(of: Experiment) -> list[int]:
    """How many are learned in each task."""
    if of.stream.name == "digits":
        tasks = streams.registry.get("digits")(0, None, tasks=of.stream.options["tasks"])
        return torch.bincount(tasks.train.task).tolist()
    if of.stream.name == "core50":
        return list(CORE50)
    if of.stream.name == "folder":  # COIL-100
        learned = 72 - round(72 * of.stream.options["holdout"])
        return [100 // of.stream.options["tasks"] * learned] * of.stream.options["tasks"]
    tasks = 5 if of.stream.options["labels"] == "superclasses" else of.stream.options["tasks"]
    return [50_000 // tasks] * tasks


def steps(of: Experiment) -> int:
    batch, epochs = of.stream.options["batch"], of.stream.options["epochs"]
    return epochs * sum(math.ceil(count / batch) for count in samples(of))


# Rows ---------------------------------------------------------------------------------------------


@each
def test_every_row_can_be_made_and_learns_from_what_arrives(name: str) -> None:
    asked = experiment(name)
    small = {"mlp": {"hidden": [4]}, "resnet18": {"width": 2}}[asked.model.name]
    shape = (1, 8, 8) if asked.stream.name == "digits" else (3, 32, 32)
    stream: Any = SimpleNamespace(
        shape=shape,
        classes=classes(asked),
        transform=Transform(Pixels(255.0), augments=True),
        sample_bytes=lambda: math.prod(shape),
    )
    chance = torch.Generator().manual_seed(0)
    batches = [
        Batch(
            torch.randint(256, (4, *shape), generator=chance, dtype=torch.uint8),
            torch.randint(classes(asked), (4,), generator=chance),
        )
        for _ in range(2)
    ]
    for run in asked.select(None, [0]).runs():
        method = method_factory(replace(run, model=asked.model.with_options(small)), stream, CPU)()
        before = [value.detach().clone() for value in method.learner.parameters()]
        for batch in batches:
            method.step(batch)
        after = method.learner.parameters()
        moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
        assert any(moved), run.row
        assert all(value.isfinite().all() for value in after), run.row


@each
def test_every_table_has_the_row_to_compare_with_and_the_upper_bound(name: str) -> None:
    rows = experiment(name).methods
    assert {"er", "syngap", "joint"} <= set(rows)
    for row, method in rows.items():
        if row in ("er", "syngap", "joint"):
            assert method.name == row
    joint = [row for row, method in rows.items() if method.name == "joint"]
    assert joint[0] == "joint", "the first is what INT is relative to"
    assert not rows["joint"].options["average"]


@each
def test_buffers_hold_20_for_each_class_unless_the_file_says_otherwise(name: str) -> None:
    asked, said = experiment(name), comment(name)
    usual = 20 * classes(asked)
    others = set()
    for method in asked.methods.values():
        if method.options.get("buffer") not in (None, 0, usual):
            others.add(method.options["buffer"])
    for buffer in others:
        assert "20 n" in said, f"{buffer} is not {usual}"
        assert re.search(rf"\b(buffer is|hold|have) {buffer}\b", said), f"{buffer} is not {usual}"


# Protocols ----------------------------------------------------------------------------------------


@each_on_images
def test_images_are_learned_by_one_protocol(name: str) -> None:
    asked = experiment(name)
    assert asked.model == Component("resnet18", {"width": 64, "norm": "batch"})
    assert asked.training.precision == "bf16"
    assert asked.stream.options["batch"] == 64
    assert asked.stream.options["augment"] is True
    assert (asked.stream.options["order"], asked.stream.options["blur"]) == ("shuffled", 0.0)
    assert (asked.stream.options["first"], asked.stream.options["validation"]) == (None, 0.0)
    assert asked.stream.options["remainder"] == "even"
    epochs = {"online-cifar100": 1, "epochs20-cifar100": 20}.get(name, 5)
    assert asked.stream.options["epochs"] == epochs
    assert {method.options.get("replay", 64) for method in asked.methods.values()} == {64}
    assert asked.seeds == ([0, 1, 2] if name == "epochs20-cifar100" else [0, 1, 2, 3, 4])


ABLATIONS = {
    "unbounded": {"bounded": False},
    "low_alpha": {"retention": 0.5},
    "true_labels": {"estimator": "empirical"},
    "per_tensor": {"scope": "tensor"},
    "no_buffer": {"buffer": 0},
    **{f"alpha{value}": {"retention": value} for value in (0.9, 0.99, 0.9999)},
    **{f"tau{value}": {"consolidation": value} for value in (0.03, 0.05, 0.2, 0.3, 0.5, 0.9)},
}


def test_an_ablation_changes_one_thing() -> None:
    rows = dict(experiment("table2-ablation").methods)
    full, without, joint = rows.pop("syngap"), rows.pop("er"), rows.pop("joint")
    changed = {
        row: {key: value for key, value in method.options.items() if value != full.options[key]}
        for row, method in rows.items()
    }
    assert changed == ABLATIONS
    assert {full.name, *(method.name for method in rows.values())} == {"syngap"}
    assert [method.options["lr"] for method in (full, without, joint)] == [0.3, 0.3, 0.1]
    assert all(full.options[key] == value for key, value in without.options.items())


def test_the_ablation_is_that_of_the_shared_table() -> None:
    shared, ablation = experiment("table1-cifar100-shared"), experiment("table2-ablation")
    for part in ("stream", "model", "training", "seeds"):
        assert getattr(ablation, part) == getattr(shared, part), part
    for row in ("er", "syngap"):
        assert ablation.methods[row] == shared.methods[row]


@pytest.mark.parametrize(("name", "epochs"), [("online-cifar100", 1), ("epochs20-cifar100", 20)])
def test_other_lengths_differ_in_their_epochs_alone(name: str, epochs: int) -> None:
    shared, other = experiment("table1-cifar100-shared"), experiment(name)
    assert other.stream == shared.stream.with_options({"epochs": epochs})
    assert other.model == shared.model
    assert replace(other.training, evaluate_every=0) == shared.training


def test_peers_learn_the_digits_of_the_demo() -> None:
    demo, peers = experiment("digits"), experiment("digits-peers")
    assert (peers.stream, peers.model, peers.training) == (demo.stream, demo.model, demo.training)
    assert peers.seeds[: len(demo.seeds)] == demo.seeds
    assert peers.training.evaluate_every, "accuracy at any time, not only at the ends of tasks"
    assert peers.search is not None
    untuned = {row for row in peers.methods if row not in peers.search.spaces}
    assert {row for row in untuned if not row.endswith("_huber")} == {"derpp_auto"}, "advised"


SEARCHED = [name for name in shipped() if experiment(name).search]


def test_what_is_searched_covers_lengths_memories_and_kinds_of_streams() -> None:
    wanted = {"buffers-cifar100", "coil100-nc", "digits", "domain-cifar100", "epochs20-cifar100"}
    assert {*wanted, "digits-peers", "online-cifar100", "table1-cifar100-tuned"} == {*SEARCHED}


@pytest.mark.parametrize("name", [name for name in SEARCHED if name in ON_IMAGES])
def test_a_searched_table_searches_every_row_and_says_what_that_takes(name: str) -> None:
    asked = experiment(name)
    assert asked.search is not None
    assert {*asked.search.spaces} == {*asked.methods}
    runs = len(asked.methods) * asked.search.runs
    said = f"{asked.search.counts[0][0]} trials and {asked.search.runs} runs a row, {runs} runs "
    assert said in comment(name)
    assert re.search(r"minutes of an H200", comment(name))


@pytest.mark.parametrize("name", [name for name in SEARCHED if name in ON_IMAGES])
def test_averaged_and_taught_rows_stand_beside_plain_ones(name: str) -> None:
    asked = experiment(name)
    assert asked.search is not None
    assert {"er_average", "er_ace_average", "er_taught", "er_ace_taught"} <= {*asked.methods}
    for row, method in asked.methods.items():
        for option in ("average", "teacher"):
            value = method.options.get(option)
            assert (option in asked.search.spaces[row]) == bool(value), (row, option)


@pytest.mark.parametrize("name", [name for name in SEARCHED if name in ON_IMAGES])
def test_a_searched_table_has_accuracy_within_tasks_at_little_cost(name: str) -> None:
    asked = experiment(name)
    batch, epochs = asked.stream.options["batch"], asked.stream.options["epochs"]
    ends = [0, *accumulate(epochs * math.ceil(count / batch) for count in samples(asked))]
    every = asked.training.evaluate_every
    within = [step for step in range(every, ends[-1], every) if step not in ends]
    places = {step - max(end for end in ends if end < step) for step in within}
    assert len(places) >= 2, "one place in a task says little of an average that lags"
    tested = {"coil100-nc": 1800}.get(name, 10_000)
    assert len(within) * tested < 2 * batch * ends[-1], "fewer samples than are learned"


def test_core50_compares_all_methods_on_the_official_split() -> None:
    core50 = experiment("core50-nc")
    names = [method.name for method in core50.methods.values()]
    assert len(names) == 10
    assert set(names) == {
        *(method.name for method in experiment("table1-cifar100-shared").methods.values())
    }
    assert core50.stream.options["split"] == "sessions"


# What the documentation says of them --------------------------------------------------------------


def documented() -> dict[str, tuple[str, str]]:
    """Rows × seeds and steps by name, from the table in the documentation."""
    table = DOCS.read_text(encoding="utf-8").partition("| experiment | question |")[2]
    lines = re.findall(
        r"^\| `([\w.-]+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|", table, flags=re.MULTILINE
    )
    return {name: (runs.strip(), steps.strip()) for name, runs, steps in lines}


def test_the_documentation_lists_what_ships() -> None:
    assert {*documented()} == {*shipped()}


@pytest.mark.parametrize("command", ["run", "tune", "landscape"])
def test_the_help_names_the_command_that_lists_what_ships(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = " ".join(called(capsys, command, "--help")[1].split())
    assert "a name from the list that `syngap doctor` prints" in printed
    listed = f"experiments: {', '.join(shipped())}"
    assert listed in called(capsys, "doctor")[1].splitlines()


@each
def test_the_documentation_knows_runs_and_steps(name: str) -> None:
    asked = experiment(name)
    assert documented()[name] == (
        f"{len(asked.methods)} × {len(asked.seeds)}",
        f"{steps(asked):,}",
    )
