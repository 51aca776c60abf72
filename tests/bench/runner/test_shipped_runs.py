"""Commands that ship end in a table: on real COIL-100, and on its frames in CORe50's layout."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from PIL import Image
from realdata import unpacked
from tiny import called, run_inline

from syngap.bench.runner import local as engine

SETTINGS = (
    "model.width=2",
    "stream.epochs=1",
    "training.device=cpu",
    "training.precision=fp32",  # bf16 is slow on a CPU
)
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]
LABELS = {"ER", "Joint"}


@pytest.fixture(scope="module")
def coil() -> Path:
    """The folder around coil100."""
    return unpacked("coil100")


def coil_as_core50(coil: Path, root: Path) -> None:
    """COIL-100's objects 1 to 50 in CORe50's layout: a session is one pose.

    Sessions are 30 degrees apart. It has CORe50's names and counts of objects and sessions, and
    nothing of its backgrounds and hands.
    """
    for session, thing in product(range(1, 12), range(1, 51)):
        folder = root / "core50_32x32" / f"s{session}" / f"o{thing}"
        folder.mkdir(parents=True)
        degrees = 30 * (session - 1)
        with Image.open(coil / "coil100" / f"obj{thing:03d}" / f"{degrees:03d}.png") as view:
            image = view.resize((32, 32), Image.Resampling.BOX)
        image.save(folder / f"C_{session:02d}_{thing:02d}_000.png", compress_level=1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder on a machine without data sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SYNGAP_DATA", raising=False)
    return tmp_path


@pytest.fixture
def call(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line, with its runs in this process: a worker takes seconds to start."""
    monkeypatch.setattr(engine, "run_local", run_inline)
    return lambda *arguments: called(capsys, *arguments)


def accuracy(run: Path) -> list[list[float]]:
    """R, a list for each line."""
    with (run / "accuracy.csv").open(newline="") as file:
        return [[float(value) for value in line[1:]] for line in list(csv.reader(file))[1:]]


def steps(run: Path) -> int:
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "done"
    return int(status["steps"])


@pytest.mark.slow
def test_core50_nc_ends_in_a_table_on_coil100_frames_in_core50s_layout(
    coil: Path, here: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    """These are COIL-100 frames in CORe50's layout, not CORe50: the command works, no result.

    That every row of the experiment learns: test_shipped.py.
    """
    coil_as_core50(coil, here / "data")
    with pytest.warns(match="holds 550 of 164866 frames: results will not be CORe50's"):
        code, printed, said = call(
            *("run", "core50-nc", "--data", "data", "--seeds", "0", "--methods", "er,joint"),
            *SMALL,
        )
    assert code == 0, said
    assert {line.split()[0] for line in printed.splitlines() if line.strip()} >= LABELS
    assert "Not in these numbers" not in printed
    runs = here / "runs" / "core50-nc"
    # 400 frames of the other eight sessions: 80 in the first task, 40 in each of eight.
    for run in runs.glob("*-0"):
        tasks = 1 if run.name == "joint-0" else 9
        assert steps(run) == (7 if tasks == 1 else 2 + 8 * 1), run
        assert [len(line) for line in accuracy(run)] == [9] * tasks, run
    assert len([*runs.glob("*-0")]) == len(LABELS)


@pytest.mark.slow
def test_coil100_nc_needs_only_the_folder_around_coil100(
    coil: Path, here: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    for view in (coil / "coil100").glob("obj*/*.png"):
        if int(view.stem) % 30 == 0:  # a sixth of the views; to read all takes most of the time
            copy = here / "data" / view.relative_to(coil)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(view, copy)
    code, _, said = call(
        *("run", "coil100-nc", "--data", "data", "--seeds", "0", "--methods", "syngap", *SMALL),
        *("--set", "stream.first=1"),
    )
    assert code == 0, said
    run = here / "runs" / "coil100-nc" / "syngap-0"
    assert steps(run) == 2  # 90 views, 64 at a time
    assert [len(line) for line in accuracy(run)] == [1]


def test_coil100_nc_says_what_is_missing(
    here: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    code, printed, said = call("run", "coil100-nc", "--data", here)
    assert (code, printed) == (2, "")
    assert said.startswith("syngap: stream.path: there is no ")
    assert str(here / "coil100") in said
