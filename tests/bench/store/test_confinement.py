"""Nothing outside of the folder that a command names is written, renamed or removed.

audit.py calls the commands and watches them; here is what must hold.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
import yaml
from checkout import ROOT
from refused import refused
from safetensors.torch import save
from tiny import called, job, results, run_inline, tree, written
from typer.main import get_command

from syngap.bench import cli, storage
from syngap.bench.runner import local as engine
from syngap.bench.runner.local import run_here
from syngap.bench.runner.loggers import LoggedRun
from syngap.bench.store.removal import is_run_of, remove_run
from syngap.bench.training import checkpoint

pytestmark = pytest.mark.skipif(os.name != "posix", reason="plants links and pipes")
SUPPORT = ROOT / "tests/support"
SOURCE = ROOT / "src" / "syngap"
COMMANDS = sorted(get_command(cli.app).commands)  # type: ignore[attr-defined]
OFTEN = "training.checkpoint_seconds=0"
Captured = pytest.CaptureFixture[str]


# Every command, watched ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What came of each command; one process calls them all."""
    folder = tmp_path_factory.mktemp("audit")
    cache = str(folder / "cache")
    os.mkdir(cache)
    for fonts in Path(matplotlib.get_cachedir()).glob("fontlist-*.json"):
        shutil.copy(fonts, cache)  # to look for fonts takes seconds
    environment = {
        **{name: value for name, value in os.environ.items() if name != "SYNGAP_DATA"},
        "HOME": cache,
        "XDG_CACHE_HOME": cache,
        "MPLCONFIGDIR": cache,
        "COLUMNS": "200",
        "TMPDIR": str(folder / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "audit.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("audit")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_changes_nothing_outside_of_the_folder_it_names(
    command: str, audited: dict[str, list[dict[str, Any]]]
) -> None:
    """Whatever is planted there. A command that audit.py does not know fails here."""
    for outcome in audited[command]:
        assert outcome["outside"] == [], outcome
        assert outcome["code"] in (0, 1, 2), outcome
        assert outcome["code"] or outcome["strays"] == [], outcome
        last = outcome["said"].rstrip("\n").rpartition("\n")[2]
        assert outcome["code"] != 2 or last.startswith("syngap: "), outcome
        harmless = outcome["planted"].startswith(("nothing", "temporary names"))
        assert not harmless or outcome["code"] == 0, outcome


# Names by which files are changed, and the module that may use them.
CHANGES = {
    *("mkdir", "makedirs", "unlink", "remove", "rmdir", "removedirs", "rename", "renames"),
    *("replace", "rmtree", "move", "copyfile", "copy", "copy2", "copytree", "touch", "chmod"),
    *("write_text", "write_bytes", "symlink_to", "hardlink_to", "symlink", "link", "truncate"),
    *("save_file", "savez", "savez_compressed", "extractall", "mkfifo", "mkstemp", "mkdtemp"),
}
MODULES = {"os", "shutil", "tempfile", "np", "numpy", "safetensors"}
METHODS = {"mkdir", "unlink", "rmdir", "touch", "write_text", "write_bytes", "symlink_to", "chmod"}


def changes_of_files(path: Path) -> Iterator[str]:
    """Calls in a module that change files in another way than by `syngap.bench.storage`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        given = [part.value for part in (*node.args, *(k.value for k in node.keywords))
                 if isinstance(part, ast.Constant)]  # fmt: skip
        modes = [text for text in given if isinstance(text, str) and set(text) <= set("rwaxbt+")]
        if name == "open" and any(set(mode) & set("wax+") for mode in modes):
            yield f"{path.name}:{node.lineno} open"
        elif (owner in MODULES and name in CHANGES) or name in METHODS:
            yield f"{path.name}:{node.lineno} {name}"


def test_files_are_changed_by_one_module_alone() -> None:
    assert len([*changes_of_files(SOURCE / "bench/storage.py")]) > 5, "the search finds such calls"
    found = [
        each
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "storage.py"
        for each in changes_of_files(path)
    ]
    assert found == []


# The rule itself ----------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside that of the user, with a file in it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").write_text("mine")
    (tmp_path / "named").mkdir()
    return tmp_path / "outside"


OPERATIONS = {
    "write": lambda path, within: storage.write(path, b"x", within=within),
    "create": lambda path, within: storage.create(path, within=within).close(),
    "append": lambda path, within: storage.append(path, within=within).close(),
    "make_folder": lambda path, within: storage.make_folder(path, within=within),
    "remove": lambda path, within: storage.remove(path, within=within),
    "remove_tree": lambda path, within: storage.remove_tree(path, within=within),
    "move": lambda path, within: storage.move(path, path.with_name("moved"), within=within),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_goes_through_a_link_to_a_folder(operation: str, outside: Path) -> None:
    named = outside.parent / "named"
    (named / "er-0").symlink_to(outside)
    before = tree(outside)
    with refused("er-0", "is a link"):
        OPERATIONS[operation](named / "er-0" / "mine", named)
    with pytest.raises(ValueError, match=r"does not lie below|not in the subpath"):
        OPERATIONS[operation](named / ".." / "outside" / "mine", named)
    assert tree(outside) == before


def test_the_folder_that_the_user_names_may_be_a_link(outside: Path) -> None:
    named = outside.parent / "link"
    named.symlink_to(outside)
    storage.write(named / "new.txt", b"x", within=named)
    assert (outside / "new.txt").read_bytes() == b"x"


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_half_written_files_of_every_kind_and_naming_are_removed(kind: str, outside: Path) -> None:
    named = outside.parent / "named"
    strays = [named / f".index.html.{end}" for end in ("1", "4194304", "syngap-" + "0f" * 8)]
    for stray in strays:
        if kind == "pipe":
            os.mkfifo(stray)
        else:
            stray.symlink_to(outside / ("mine" if kind == "link" else "none"))
    kept = [named / ".index.html", named / ".index.html.swp", named / ".other.html.bak"]
    for path in kept:
        path.write_text("mine")
    assert storage.strays(named) == sorted(strays)
    storage.write(named / "index.html", b"page", within=named)
    assert sorted(named.iterdir()) == sorted([named / "index.html", *kept])
    assert tree(outside) == {"mine": b"mine"}


def test_a_file_that_another_process_takes_for_a_stray_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.replace, []

    def replaced(old: Path, new: Path) -> None:
        calls.append(old)
        if len(calls) == 1:
            old.unlink()
        real(old, new)

    monkeypatch.setattr(os, "replace", replaced)
    storage.write(tmp_path / "a.json", b"{}", within=tmp_path)
    assert tree(tmp_path) == {"a.json": b"{}"}
    assert len({*calls}) == 2, "each under a name of its own"


def test_a_file_with_a_second_name_is_not_appended_to(outside: Path) -> None:
    named = outside.parent / "named"
    os.link(outside / "mine", named / "metrics.jsonl")
    with refused("metrics.jsonl", "hard link"):
        storage.append(named / "metrics.jsonl", within=named)


def test_a_logger_notes_its_end_in_the_run_folder_alone(outside: Path) -> None:
    run = LoggedRun(outside.parent / "named" / "er-0", {}, "0" * 16)
    run.folder.mkdir()
    run.mark("mine").symlink_to(outside / "created")
    run.note_complete("mine")
    assert run.mark("mine").is_file()
    assert tree(outside) == {"mine": b"mine"}


# --fresh ------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Path:
    """Two runs in out/, done in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    written(tmp_path, OFTEN)
    assert called(capsys, "run", "tiny.yaml", "--out", "out")[0] == 0
    return tmp_path / "out"


FRESH = ("run", "tiny.yaml", "--out", "out", "--methods", "er", "--fresh")


def test_fresh_touches_nothing_behind_a_link(runs: Path, capsys: Captured) -> None:
    shared = runs.parent / "shared"
    (runs / "er-0").rename(shared)
    (runs / "er-0").symlink_to(shared)
    before = tree(runs.parent)
    code, _, said = called(capsys, *FRESH)
    assert (code, said.count("\n")) == (2, 1)
    assert "out/er-0: is a link" in said
    assert tree(runs.parent) == before
    (runs / "er-0").unlink()
    (runs / "sgd-0").rename(shared / "sgd-0")
    (runs / "sgd-0").symlink_to(shared / "sgd-0")  # of a row that is not run now
    kept = tree(shared)
    code, _, said = called(capsys, *FRESH)
    assert code == 0
    assert said.splitlines()[0] == "--fresh removes files of runs alone and left out/sgd-0"
    assert tree(shared) == kept


def test_fresh_removes_files_of_runs_and_leaves_and_names_the_rest(
    runs: Path, capsys: Captured
) -> None:
    (runs / "thesis").mkdir()
    (runs / "thesis/config.yaml").write_text("title: on forgetting\n")
    (runs / "thesis/thesis.tex").write_text("words")
    (runs / "sgd-0/notes.txt").write_text("mine")
    (runs / "sgd-0/checkpoint/best").mkdir()
    code, printed, said = called(capsys, *FRESH)
    assert code == 0, said
    assert said.splitlines()[0] == (
        "--fresh removes files of runs alone and left out/thesis, out/sgd-0/checkpoint, "
        "out/sgd-0/notes.txt"
    )
    assert [*tree(runs / "thesis")] == ["config.yaml", "thesis.tex"]
    assert [*tree(runs / "sgd-0")] == ["checkpoint", "checkpoint/best", "notes.txt"]
    assert "ER" in printed


def test_fresh_does_not_begin_in_a_folder_that_holds_no_run(runs: Path, capsys: Captured) -> None:
    (runs / "er-0/config.yaml").write_text("title: on forgetting\n")
    before = tree(runs)
    code, _, said = called(capsys, *FRESH)
    assert (code, said.count("\n")) == (2, 1)
    assert "out/er-0: its config.yaml is not that of this run" in said
    assert tree(runs) == before


@pytest.mark.parametrize(
    ("change", "ours"),
    [
        ({}, True),
        ({"row": "sgd"}, False),
        ({"seed": 1}, False),
        ({"seed": "0"}, False),
        ({"experiment": "other"}, False),
        ({"format": 10**6}, False),
    ],
)
def test_a_run_is_what_its_configuration_and_its_name_agree_on(
    change: dict[str, Any], ours: bool, runs: Path
) -> None:
    path = runs / "er-0/config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    assert is_run_of("tiny", runs / "er-0") is ours


def test_nothing_is_left_of_a_run_that_is_removed(runs: Path) -> None:
    for name in (".tensorboard", "events.out.tfevents.1.host", ".status.json.77", "error.txt"):
        (runs / "er-0" / name).write_text("")
    assert remove_run(runs / "er-0", ["tensorboard"], within=runs) == []
    assert not (runs / "er-0").exists()


# Sizes --------------------------------------------------------------------------------------------


def stopped(folder: Path) -> list[Path]:
    """Leave a run as if it had been killed after its fourth step; return its checkpoints."""

    def tell(step: int, accuracy: float | None) -> None:
        if step > 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syngap.bench.store.folder_writer._TELL_EVERY", 0.0)
        with pytest.raises(KeyboardInterrupt):
            run_here(job(folder, OFTEN), tell)
    return sorted((folder / "checkpoint").glob("step-*"))


@pytest.mark.parametrize("kind", ["sparse", "longer than its header says", "folder"])
def test_a_checkpoint_that_cannot_be_one_is_not_read_and_the_one_before_it_is_taken(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, here = tmp_path / "whole", tmp_path / "er-0"
    run_here(job(whole, OFTEN))
    newest = stopped(here)[-1]
    planted = newest.with_name("step-000000005.safetensors")
    if kind == "folder":
        planted.mkdir()
        (planted / "thesis.tex").write_text("words")
    else:
        planted.write_bytes(b"" if kind == "sparse" else newest.read_bytes())
        os.truncate(planted, 200 << 30)  # takes no room
    run_here(job(here, OFTEN))
    assert f"going on from {newest.name}" in caplog.text
    assert results(here) == results(whole)
    assert len([*here.rglob("thesis.tex")]) == (kind == "folder"), "it is not ours to remove"


def test_a_checkpoint_larger_than_the_memory_is_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = stopped(tmp_path / "er-0")[-1]
    monkeypatch.setattr(checkpoint, "_free_memory", lambda: 1000.0)
    with refused(newest.name, "GB of memory", "remove the file to go on"):
        run_here(job(tmp_path / "er-0", OFTEN))
    assert newest.is_file()


def test_a_pipe_in_the_place_of_a_checkpoint_is_no_state(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(save({"x": torch.ones(1)}))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("pipe", "link"):
        with pytest.raises(ValueError, match="not a plain file"):
            checkpoint.read_state(tmp_path / name)
