"""What strangers may send: each is refused or made harmless, and says so in one line.

Pickles are in test_pickles.py, archives of data sets in test_download.py, damaged checkpoints in
test_checkpoint.py, what a browser makes of hostile names in test_page_in_browser.py, and all the
rest in the corpus of test_fuzz.py.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import sys
import tarfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fuzz.guard import limited
from refused import refused
from runfolders import DEMO, Made, write_experiment, write_run
from tiny import called, job, results, state, written

from syngap.bench.config.reading import SMALL
from syngap.bench.errors import UserError
from syngap.bench.reporting.page import page, write_page
from syngap.bench.runner.local import run_here
from syngap.bench.store.folder_reader import read_runs, read_status, read_yaml
from syngap.bench.store.keep import keep, search_of
from syngap.bench.streams.arrays import npz
from syngap.bench.streams.cifar100 import cifar100

Captured = pytest.CaptureFixture[str]
ESCAPE = "\x1b]0;owned\x07"
# Nine strings, nine lists of those, nine lists of these …: 9 ** 10 values in 400 bytes.
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


class Runs:
    """A pickle of it creates a file, where somebody loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_every_defence_names_a_test_that_there_is() -> None:
    here = Path(__file__)
    text = (here.parents[3] / "SECURITY.md").read_text(encoding="utf-8")
    places = {path.name: path for path in here.parents[2].rglob("test_*.py")}
    named = re.findall(r"`((?:test_\w+\.py)?(?:::\w+)?)`", text)
    assert len(named) > 15
    for place in named:
        file, _, test = place.partition("::")
        held = places[file or here.name].read_text()
        assert f"def {test}(" in held if test else held, place


# Checkpoints --------------------------------------------------------------------------------------


def test_a_pickle_in_the_place_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    here, clean = job(tmp_path / "er-0"), job(tmp_path / "clean")
    checkpoint = here.folder / "checkpoint"
    run_here(clean)
    checkpoint.mkdir(parents=True)
    (here.folder / "config.yaml").write_text(yaml.safe_dump(here.config.as_mapping()))
    save = checkpoint / "step-000000001.safetensors"
    save.write_bytes(pickle.dumps(Runs(tmp_path / "owned")))
    run_here(here)
    assert not (tmp_path / "owned").exists()
    assert state(here.folder) == "done"
    assert results(here.folder) == results(clean.folder)


@pytest.mark.parametrize("what", ["er-0", "er-0/checkpoint", "er-0/metrics.jsonl"])
def test_a_run_folder_that_leads_elsewhere_is_not_gone_on_with(what: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "metrics.jsonl").write_text("mine\n")
    here = job(tmp_path / "runs" / "er-0")
    (tmp_path / "runs" / what).parent.mkdir(parents=True)
    aim = outside / "metrics.jsonl" if what.endswith(".jsonl") else outside
    (tmp_path / "runs" / what).symlink_to(aim)
    with refused(what.rpartition("/")[2], "is a link"):
        run_here(here)
    assert (outside / "metrics.jsonl").read_text() == "mine\n"
    assert [path.name for path in outside.iterdir()] == ["metrics.jsonl"]


# Archives and data --------------------------------------------------------------------------------


def packed(place: Path, name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> Path:
    """Write an archive of CIFAR-100 with one member, which may claim a size that it has not."""
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, "../../owned"
    content = member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    (place / "cifar-100-binary.tar.gz").write_bytes(gzip.compress(content, 1))
    return place


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("../owned", tarfile.REGTYPE, "would leave the folder"),
        ("/owned", tarfile.REGTYPE, "would leave the folder"),
        ("cifar-100-binary/train.bin", tarfile.SYMTYPE, "is no plain file"),
        ("cifar-100-binary/train.bin", tarfile.LNKTYPE, "is no plain file"),
        ("cifar-100-binary/train.bin", tarfile.CHRTYPE, "is no plain file"),
    ],
)
def test_an_archive_that_is_read_where_it_lies_leads_nowhere(
    name: str, kind: bytes, why: str, tmp_path: Path
) -> None:
    with refused("cifar-100-binary.tar.gz", why):
        cifar100(0, packed(tmp_path, name, kind))


@pytest.mark.parametrize("name", ["cifar-100-binary/train.bin", "nobody-wants-it"])
def test_members_larger_than_expected_are_not_even_passed_over(name: str, tmp_path: Path) -> None:
    with refused("larger than expected"):
        cifar100(0, packed(tmp_path, name, size=1 << 40))


def test_arrays_that_are_packed_too_well_are_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = np.zeros((400, 999), np.float32), np.arange(400) % 2
    np.savez_compressed(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert npz(0, tmp_path, path="data.npz", tasks=2).classes == 2
    monkeypatch.setattr(sys.modules[npz.__module__], "TRUSTED_BYTES", 0)
    with refused("data.npz", "would become 3203200"):
        npz(0, tmp_path, path="data.npz", tasks=2)


# Configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("name: !!python/object/apply:os.mkdir [owned]", "not YAML"),
        (f"{LAUGHS}name: *j", "stands for more than"),
        (f"{LAUGHS}methods: {{<<: [*j, *j]}}", "stands for more than"),
        ("name: &a [*a]", "holds itself"),
        ("name: " + "[" * 200 + "]" * 200, "nested too deep"),
        (f"name: {json.dumps(ESCAPE)}", "\\u001b"),
        ("name: ../owned", "expected a name"),
        ("methods: {../owned: {method: sgd}}", "expected a name"),
    ],
)
def test_a_hostile_configuration_is_refused_in_one_line(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    given = yaml.safe_load(Path(written(tmp_path)).read_text())
    key = text.rpartition("\n")[2].partition(":")[0]
    del given[key]
    (tmp_path / "mine.yaml").write_text(f"{text}\n{yaml.safe_dump(given)}")
    code, out, err = called(capsys, "run", "mine.yaml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert why in err
    assert ESCAPE not in err
    assert not (tmp_path / "owned").exists()


# Run folders and their pages ----------------------------------------------------------------------

HOSTILE = "</script></title><script>owned()</script><img src=x onerror=owned()>{{data}}"


class Elements(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_whatever_a_run_folder_says_its_page_is_made_of_the_same_elements(tmp_path: Path) -> None:
    def elements(name: str, text: str) -> list[tuple[str, dict[str, str | None]]]:
        runs = write_experiment(tmp_path / name, {"er": DEMO["er"]}, (0,), extra={text: [text]})
        write_run(runs, f"a{text}".replace("/", "-"), DEMO["er"], 0)
        write_run(runs, "b", Made("sgd", options={"memory": text}), 0, state="failed", error=text)
        environment = runs / "er-0" / "environment.json"
        environment.write_text(json.dumps({text: text}))
        return Elements(page(read_runs(runs), text)).found

    harmless, hostile = elements("harmless", "text"), elements("hostile", HOSTILE)
    assert hostile == harmless
    assert [tag for tag, _ in hostile].count("script") == 2  # the data and the program
    assert not any(name.startswith("on") for _, attributes in hostile for name in attributes)


def test_what_a_terminal_would_obey_is_spelled_out(tmp_path: Path, capsys: Captured) -> None:
    runs = write_experiment(tmp_path / "runs", {"er": DEMO["er"]}, (0,))
    write_run(runs, "a", Made("sgd", options={"memory": [ESCAPE]}), 0, state="failed", error=ESCAPE)
    write_run(runs, "b", Made("sgd", options={"memory": []}), 0)
    code, out, err = called(capsys, "report", runs)
    assert code == 0
    assert "\\u001b]0;owned" in out
    assert "\x1b" not in out + err


@pytest.mark.parametrize("name", ["../owned", "/owned", ESCAPE, ["a"], ""])
def test_a_folder_is_not_kept_by_a_name_that_leads_elsewhere(name: object, tmp_path: Path) -> None:
    runs = write_experiment(tmp_path / "runs", {"er": DEMO["er"]}, (0,), extra={"experiment": name})
    with refused("config.yaml", "experiment"):
        read_runs(runs)
    (runs / "search.yaml").write_text(yaml.safe_dump({"experiment": name}))
    with refused("search.yaml", "experiment"):
        search_of(runs)


def test_a_page_is_not_written_through_a_link(tmp_path: Path) -> None:
    runs = write_experiment(tmp_path / "runs", {"er": DEMO["er"]}, (0,))
    (tmp_path / "mine").write_text("mine")
    (runs / "index.html").symlink_to(tmp_path / "mine")
    write_page(read_runs(runs), runs / "index.html", "title")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (runs / "index.html").read_text().startswith("<!doctype html>")


def test_what_a_link_leads_to_is_not_published(tmp_path: Path) -> None:
    run_here(job(tmp_path / "runs" / "er-0"))
    asked = {"name": "tiny", "stream": "digits", "model": "mlp", "methods": {"er": None}}
    (tmp_path / "runs" / "experiment.yaml").write_text(yaml.safe_dump(asked))
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    (tmp_path / "runs" / "more.json").symlink_to(tmp_path / "secret.json")
    keep(tmp_path / "runs", tmp_path / "kept")
    assert (tmp_path / "kept" / "experiment.yaml").is_file()
    assert not (tmp_path / "kept" / "more.json").exists()


def test_files_that_fill_the_memory_are_not_read(tmp_path: Path) -> None:
    for name in ("status.json", "config.yaml"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)  # takes no room
    with refused("status.json", f"up to {SMALL} are read"):
        read_status(tmp_path)
    with refused("config.yaml", f"up to {SMALL} are read"):
        read_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize("name", ["config.yaml", "status.json", "metrics.jsonl", "accuracy.csv"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes to put there")
def test_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    runs = write_experiment(tmp_path, {"er": DEMO["er"]}, (0,))
    (runs / "er-0" / name).unlink()
    os.mkfifo(runs / "er-0" / name)
    with refused(name, "not a plain file"), limited(seconds=5):
        read_runs(runs)


def test_messages_are_one_line_that_does_nothing() -> None:
    assert str(UserError(f"a{ESCAPE}\n\tb\u202e")) == "a\\u001b]0;owned\\u0007 b\\u202e"
    assert str(pickle.loads(pickle.dumps(UserError("a\x1b")))) == "a\\u001b"
    assert io.StringIO(str(UserError("über — ≥"))).read() == "über — ≥"
