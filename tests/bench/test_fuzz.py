"""Whatever is read, only a clear error may come of it: the corpus, and a few new inputs each time.

How the corpus came about, and how to look for more: docs/fuzzing.md.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest
from checkout import ROOT
from fuzz import guard
from fuzz.fuzz import NAMES
from fuzz.guard import Broken, Sandbox, Step
from fuzz.mutations import tree_changed
from fuzz.targets import TARGETS, hurried
from fuzz.trees import Special, Tree, corpus, dumped, loaded

from syngap.bench.errors import UserError

CORPUS = ROOT / "tests/support/fuzz/corpus"
INPUTS = {
    "configuration": 20,
    "settings": 30,
    "runfolder": 5,
    "checkpoint": 10,
    "cifar100": 60,
    "core50": 30,
}


@cache
def bases(target: str) -> dict[str, Tree]:
    return TARGETS[target].bases()


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    for name in ("HOME", "XDG_CACHE_HOME", "COLUMNS", "SYNGAP_DATA"):
        monkeypatch.setenv(name, "")  # and back again afterwards
    monkeypatch.chdir(tmp_path)
    with hurried():
        yield Sandbox(tmp_path / "sandbox")


def steps(target: str) -> list[Step]:
    """What is done with an input; figures take longer than all else together."""
    return [step for step in TARGETS[target].steps if step.name != "figures"]


@pytest.mark.slow
@pytest.mark.parametrize("target", NAMES)
def test_what_is_known_to_be_hostile_gives_a_clear_error(target: str, sandbox: Sandbox) -> None:
    for name, tree in corpus(CORPUS / f"{target}.jsonl", bases(target)).items():
        assert sandbox.tried(tree, steps(target))[0] is None, name


@pytest.mark.parametrize("target", NAMES)
def test_valid_inputs_are_read(target: str, sandbox: Sandbox) -> None:
    for name, tree in bases(target).items():
        finding, said = sandbox.tried(tree, TARGETS[target].steps[:1])
        assert (finding, said) == (None, [f"{TARGETS[target].steps[0].name}: done"]), name


@pytest.mark.parametrize("target", NAMES)
def test_nothing_but_a_clear_error_comes_out(target: str, sandbox: Sandbox) -> None:
    chance, trees = Random(0), list(bases(target).values())
    for _ in range(INPUTS[target]):
        tree = tree_changed(chance.choice(trees), chance, trees, TARGETS[target].shape)
        finding, _ = sandbox.tried(tree, steps(target))
        assert finding is None, f"{finding}\n{dumped(tree, bases(target))[:3000]}"


def test_the_corpus_is_small_and_covers_every_target() -> None:
    files = sorted(CORPUS.iterdir())
    assert [path.name for path in files] == sorted(f"{target}.jsonl" for target in NAMES)
    assert all(corpus(CORPUS / f"{target}.jsonl", bases(target)) for target in NAMES)
    assert sum(path.stat().st_size for path in files) < 300_000


# The judge itself ---------------------------------------------------------------------------------


def _fails(place: Path) -> None:
    raise KeyError("row")


def _writes(place: Path) -> None:
    (place / ".." / "outside" / "canary").write_text("gone")


def _says_what_a_terminal_obeys(place: Path) -> None:
    error = UserError("x")
    error.args = ("\x1b[2J",)
    raise error


@pytest.mark.parametrize(
    ("does", "kind"),
    [
        (_fails, "KeyError"),
        (_writes, "changed"),
        (_says_what_a_terminal_obeys, "unclear"),
        (lambda place: time.sleep(9), "Hang"),
        (lambda place: (place / "pipe").read_text(), "Hang"),
    ],
)
def test_what_must_not_happen_is_noticed(
    does: object, kind: str, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "SECONDS", 0.2)
    finding, _ = sandbox.tried({"pipe": Special("fifo")}, [Step("do", does)])  # type: ignore[arg-type]
    assert finding is not None
    assert finding.kind == kind


def test_a_refusal_in_one_line_is_no_finding(sandbox: Sandbox) -> None:
    def refuse(place: Path) -> None:
        raise UserError("mine.yaml: no such option")

    assert sandbox.tried({}, [Step("do", refuse)]) == (None, ["do: mine.yaml: no such option"])


def test_exit_codes_without_a_line_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.cli, "main", lambda arguments: 2)
    with pytest.raises(Broken, match="exit code 2"):
        guard.called("report")


def test_inputs_are_kept_as_what_they_change(tmp_path: Path) -> None:
    base: dict[str, Tree] = {"one": {"a": b"1", "b": b"2"}, "other": {"c": b"\xff"}}
    tree: Tree = {"a": b"1", "c": Special("link", "{outside}"), "d": os.urandom(3000)}
    text = dumped(tree, base, "mine")
    assert text.count("\n") == 1
    assert loaded(text, base) == tree
    (tmp_path / "some.jsonl").write_text(text + dumped(base["one"], base, "other"))
    assert corpus(tmp_path / "some.jsonl", base) == {"mine": tree, "other": base["one"]}
    (tmp_path / "some.jsonl").write_text(text + text)
    with pytest.raises(ValueError, match="two inputs have the same name"):
        corpus(tmp_path / "some.jsonl", base)
    assert sorted(json.loads(text)["changes"]) == ["b", "c", "d"]
