"""Packed runs are the runs that were packed, and a packed file that nobody wrote is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzz.guard import limited
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused
from runfolders import DEMO, LAYERS, Made, write_experiment, write_run
from tiny import tree

from syngap.bench.finetuning.point import Point
from syngap.bench.metrics import Evaluation
from syngap.bench.store import packed
from syngap.bench.store.folder_reader import read_run, read_runs
from syngap.bench.store.folder_writer import restore
from syngap.bench.store.outcome import Environment, RecordedConfig, Run, Status
from syngap.bench.store.packed import are_same, is_packed, read_packed, write_packed

RUNS, CURVES = "runs.jsonl", "curves.jsonl.gz"


@pytest.fixture(autouse=True, scope="module")
def unsynced() -> Iterator[None]:
    """A loss of power is not what is tried here, and syncs take most of the time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        yield


# Any runs -----------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(
    lambda text: text.isprintable() and bool(text.strip())
)
WHOLE = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | WHOLE | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.dictionaries(TEXT, PLAIN, max_size=4)
SAID = (
    st.floats(width=32, max_value=2.0**127, min_value=-(2.0**127))
    | st.floats(-1e40, 1e40)
    | st.sampled_from([math.nan, math.inf, -math.inf, -0.0])
)


@st.composite
def runs_of(draw: st.DrawFn) -> list[Run]:
    """Runs as they can be read: done or failed, joint, without evaluations, with any numbers."""
    keys = draw(st.lists(st.tuples(NAMES, st.integers(0, 99)), unique=True, max_size=4))
    return [draw(run_of(row, seed) | finetuning_run_of(row, seed)) for row, seed in keys]


@st.composite
def run_of(draw: st.DrawFn, row: str, seed: int) -> Run:
    tasks = draw(st.integers(1, 3))
    percents = st.lists(st.floats(0, 100), min_size=tasks, max_size=tasks)
    steps = sorted(draw(st.sets(st.integers(1, 10**6), max_size=4)))
    record = [
        Evaluation(
            step,
            draw(st.integers(0, tasks - 1)),
            draw(st.booleans()),
            tuple(draw(percents)),
            draw(st.none() | st.floats(0, 100)),
        )
        for step in steps
    ]
    said = st.dictionaries(NAMES, SAID, min_size=1, max_size=3)
    config = {
        **draw(ENTRIES),
        "row": row,
        "experiment": "any",
        "seed": seed,
        "method": {"name": draw(NAMES), "lr": draw(FINITE)},
    }
    status = {"state": draw(st.sampled_from(["done", "failed"])), "seconds": draw(st.floats(0, 9))}
    return Run(
        path=Path(),
        config=RecordedConfig.from_mapping(config),
        status=Status({**status, "error": draw(st.none() | TEXT)}),
        environment=Environment(
            {**draw(ENTRIES), **draw(st.sampled_from([{}, {"started": "now"}]))}
        ),
        accuracy=draw(st.lists(percents, max_size=tasks)),
        initial=draw(st.none() | percents.map(tuple)),
        record=record,
        summaries={
            step: draw(said)
            for step in sorted(draw(st.sets(st.sampled_from([0, *steps]), max_size=3)))
        },
    )


@st.composite
def finetuning_run_of(draw: st.DrawFn, row: str, seed: int) -> Run:
    """Losses may be infinite or NaN, and right answers are there or not."""
    kinds = draw(st.sampled_from([["english"], ["wiki", "python"]]))
    halves = st.tuples(st.floats(), st.floats())
    has_answers = draw(st.booleans())

    def by_kind() -> dict[str, tuple[float, float]]:
        return {kind: draw(halves) for kind in kinds}

    places = st.tuples(st.integers(1, 99), st.sampled_from([-1.0, -0.5, 0.0]))
    points = [
        Point(
            step,
            abs(share),
            draw(halves),
            by_kind(),
            seconds=draw(st.floats(1, 9)),
            setup=draw(st.floats(0, 1)),
            memory=draw(st.integers(0, 2**40)),
            exact=draw(halves) if has_answers else None,
            old_exact=by_kind() if has_answers else None,
        )
        for step, share in [(0, -1.0), *sorted(draw(st.sets(places, max_size=3)))]
    ]
    state = draw(st.sampled_from(["done", "failed"]))
    found = {"row": row, "seed": seed, "method": {"name": "kl", "lr": draw(FINITE)}}
    return Run(
        path=Path(),
        config=RecordedConfig.from_mapping({**found, "family": "kl", "texts": {"name": "python"}}),
        status=Status({"state": state, "seconds": draw(st.floats(0, 9))}),
        environment=Environment({"device": "cpu"}),
        accuracy=[],
        points=points,
    )


def comparable(run: Run) -> str:
    """Return all of a run but its path, in which NaN is equal to NaN and 1 is not 1.0."""
    return repr(replace(run, path=Path()))


@settings(deadline=None)
@given(runs_of())
def test_any_runs_are_read_as_they_were_packed(runs: list[Run]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_packed(directory, runs)
        found = read_packed(directory)
        wanted = sorted(runs, key=lambda run: (run.row, run.seed))
        assert list(map(comparable, found)) == list(map(comparable, wanted))
        before = tree(directory)
        assert write_packed(directory, reversed(found)) == 0
        assert tree(directory) == before


def as_in_a_folder(run: Run) -> Run:
    """Return a run with what its folder can hold: some letters are spaces in YAML."""
    entries = yaml.safe_load(yaml.safe_dump(run.config.as_mapping(), allow_unicode=True))
    entries.pop("format", None)  # by which a file says that it is of a later version
    said = {step: of for step, of in run.summaries.items() if step or run.initial is not None}
    return replace(run, config=RecordedConfig.from_mapping(entries), summaries=said)


@settings(deadline=None)
@given(runs_of())
def test_any_runs_are_read_as_they_were_restored(runs: list[Run]) -> None:
    """Each in a folder of its own: done and failed, of a stream or of fine-tuning."""
    with tempfile.TemporaryDirectory() as name:
        for place, run in enumerate(map(as_in_a_folder, runs)):
            restore(run, Path(name) / str(place))
            assert comparable(read_run(Path(name) / str(place))) == comparable(run)


def test_a_failed_run_that_lost_a_line_of_its_record_is_restored(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "folders", {"er": DEMO["er"]}, (0,))
    metrics = folder / "er-0" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    status = Status({"state": "failed", "error": "killed"})
    run = replace(read_run(folder / "er-0"), status=status)
    assert sum(each.end for each in run.record) == len(run.accuracy) - 1
    restore(run, tmp_path / "restored" / "er-0")
    assert comparable(read_run(tmp_path / "restored" / "er-0")) == comparable(run)


def test_made_up_runs_are_the_same_packed_and_in_folders(tmp_path: Path) -> None:
    folders = write_experiment(tmp_path / "folders", DEMO, every=20)
    for seed, error in ((3, None), (4, "FloatingPointError: the loss is not finite")):
        made = Made("syngap", layers=LAYERS)
        write_run(folders, "syngap", made, seed, state="failed", tasks_done=seed - 3, error=error)
    (folders / "er-2" / "metrics.jsonl").unlink()
    write_experiment(tmp_path / "packed", DEMO)
    expected = read_runs(folders)
    assert any(len(run.accuracy) == 1 for run in expected if run.row == "joint")
    for folder in (tmp_path / "packed").glob("*-*"):
        for path in folder.iterdir():
            path.unlink()
    write_packed(tmp_path / "packed", expected)
    found = read_runs(tmp_path / "packed")
    assert list(map(comparable, found)) == list(map(comparable, expected))


def test_a_run_that_is_added_is_one_line_more(tmp_path: Path) -> None:
    runs = read_runs(write_experiment(tmp_path / "folders", DEMO, every=50))
    (tmp_path / "packed").mkdir()
    write_packed(tmp_path / "packed", runs[:7] + runs[8:])
    before = (tmp_path / "packed" / RUNS).read_text().splitlines()
    write_packed(tmp_path / "packed", runs)
    after = (tmp_path / "packed" / RUNS).read_text().splitlines()
    assert len([line for line in after[1:] if line not in before]) == 1
    assert [line for line in after[1:] if line in before] == before[1:]


def test_what_runs_have_in_common_is_written_once(tmp_path: Path) -> None:
    made = {"er": Made("er", options={"memory": "m" * 5000})}
    extra = {"stream": {"name": "s" * 5000}}
    runs = read_runs(write_experiment(tmp_path / "folders", made, range(20), extra=extra, every=99))
    write_packed(tmp_path, runs)
    text = (tmp_path / RUNS).read_text()
    assert text.count("m" * 5000) == text.count("s" * 5000) == 1


def test_packed_bytes_say_nothing_of_when_and_where(tmp_path: Path) -> None:
    runs = read_runs(write_experiment(tmp_path / "folders", {"er": DEMO["er"]}, every=50))
    write_packed(tmp_path, runs)
    head = (tmp_path / CURVES).read_bytes()[:10]
    assert head == b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff"  # no name, no time, no system


def test_the_same_content_is_not_written_again(tmp_path: Path) -> None:
    """Whichever version of zlib compressed it."""
    runs = read_runs(write_experiment(tmp_path / "folders", {"er": DEMO["er"]}, every=50))
    write_packed(tmp_path, runs)
    content = gzip.decompress((tmp_path / CURVES).read_bytes())
    (tmp_path / CURVES).write_bytes(gzip.compress(content, 1))
    before = tree(tmp_path)
    assert write_packed(tmp_path, runs) == 0
    assert tree(tmp_path) == before


def test_runs_that_cannot_be_told_apart_or_go_on_are_not_packed(tmp_path: Path) -> None:
    run, *_ = read_runs(write_experiment(tmp_path / "folders", {"er": DEMO["er"]}, every=50))
    with refused("er-0: a second run of row er with seed 0"):
        write_packed(tmp_path, [run, run])
    with refused("er-0: has not ended"):
        write_packed(tmp_path, [replace(run, status=Status({"state": "running"}))])
    assert not is_packed(tmp_path)


def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = read_runs(write_experiment(tmp_path / "folders", {"er": DEMO["er"]}, every=50))
    for limit in ("MOST", "LONGEST_LINE"):
        with monkeypatch.context() as patch:
            patch.setattr(packed, limit, 300)
            with refused("too large to be read again", "keep fewer runs together"):
                write_packed(tmp_path, runs)
    assert not is_packed(tmp_path)


def test_not_a_number_is_no_other_content(tmp_path: Path) -> None:
    run, *_ = read_runs(write_experiment(tmp_path / "folders", {"er": DEMO["er"]}, every=50))
    one, same, other = (
        replace(run, summaries={5: {"mean": value}}) for value in (math.nan, float("nan"), 1.0)
    )
    assert are_same(one, same)
    assert not are_same(one, other)


# Files that nobody wrote --------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Packed runs of two rows with two seeds each."""
    made = {"er": DEMO["er"], "syngap": DEMO["syngap"]}
    folder = write_experiment(tmp_path / "folders", made, (0, 1), every=50)
    runs = read_runs(folder)
    (tmp_path / "kept").mkdir()
    write_packed(tmp_path / "kept", runs)
    (folder / "experiment.yaml").rename(tmp_path / "kept" / "experiment.yaml")
    assert read_runs(tmp_path / "kept")
    return tmp_path / "kept"


def rewrite(kept: Path, name: str, change: Callable[[list[Any]], object]) -> None:
    """Change the values in the lines of a packed file; digests of curves are made right again."""
    path = kept / name
    text = gzip.decompress(path.read_bytes()).decode() if name == CURVES else path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    change(lines)
    written = [json.dumps(line) for line in lines]
    text = "".join(f"{line}\n" for line in written)
    path.write_bytes(gzip.compress(text.encode()) if name == CURVES else text.encode())
    if name == CURVES:
        digests = {
            (line["row"], line["seed"]): hashlib.sha256(text.encode()).hexdigest()[:12]
            for line, text in zip(lines[1:], written[1:], strict=True)
        }

        def mend(lines: list[Any]) -> None:
            for line in lines:
                if "config" in line:
                    own = line["config"][1]
                    line["curves"] = digests[own["row"], own["seed"]]

        rewrite(kept, RUNS, mend)


def test_a_file_that_is_cut_off_anywhere_is_refused(kept: Path) -> None:
    for name in (RUNS, CURVES):
        whole = (kept / name).read_bytes()
        ends = {0, 1, 5, len(whole) // 2, len(whole) - 1, whole.rfind(b"\n", 0, -1) + 1}
        for end in sorted(ends):
            (kept / name).write_bytes(whole[:end])
            with refused(f"kept/{name}: not as syngap wrote it"):
                read_runs(kept)
        (kept / name).write_bytes(whole)


def test_what_a_newer_version_packed_is_refused(kept: Path) -> None:
    for name in (RUNS, CURVES):
        before = tree(kept)
        rewrite(kept, name, lambda lines: lines[0].update(format=2))
        with refused(f"kept/{name}: written by a newer syngap (format 2, this one reads 1)"):
            read_runs(kept)
        for path, content in before.items():
            (kept / path).write_bytes(content)


def each(of: str, change: Callable[[dict[str, Any]], object]) -> Callable[[list[Any]], object]:
    """Return a change of every line that has `of`."""

    def changed(lines: list[Any]) -> None:
        for line in lines:
            if of in line:
                change(line)

    return changed


HOSTILE: dict[str, tuple[str, Callable[[list[Any]], object]]] = {
    "no format": (RUNS, lambda lines: lines[0].pop("format")),
    "format that is text": (RUNS, lambda lines: lines[0].update(format="1")),
    "first line that is a list": (RUNS, lambda lines: lines.insert(0, [])),
    "a line that is a number": (RUNS, lambda lines: lines.append(5)),
    "a line that is text": (RUNS, lambda lines: lines.append("config")),
    "fewer runs than it says": (RUNS, lambda lines: lines.pop()),
    "a run twice": (RUNS, lambda lines: lines.append(lines[-1])),
    "no parts": (RUNS, lambda lines: lines.__setitem__(slice(1, 3), [])),
    "a part that is a list": (RUNS, each("part", lambda line: line.update(value=[]))),
    "a part with a list for a name": (RUNS, each("part", lambda line: line.update(part=[]))),
    "a configuration that is text": (RUNS, each("config", lambda line: line.update(config="er"))),
    "a configuration without a row": (RUNS, each("config", lambda line: line["config"][1].clear())),
    "a row that is a number": (RUNS, each("config", lambda line: line["config"][1].update(row=1))),
    "a seed of text": (RUNS, each("config", lambda line: line["config"][1].update(seed="0"))),
    "a seed below nought": (RUNS, each("config", lambda line: line["config"][1].update(seed=-1))),
    "NaN in a configuration": (
        RUNS,
        each("config", lambda line: line["config"][1].update(lr=math.nan)),
    ),
    "status that is a list": (RUNS, each("config", lambda line: line.update(status=["done"]))),
    "status of a run under way": (
        RUNS,
        each("config", lambda line: line["status"].update(state="running")),
    ),
    "seconds of text": (RUNS, each("config", lambda line: line["status"].update(seconds="1"))),
    "no accuracy": (RUNS, each("config", lambda line: line.pop("accuracy"))),
    "accuracy of 101 percent": (RUNS, each("config", lambda line: line.update(accuracy=[[101]]))),
    "accuracy that is no number": (
        RUNS,
        each("config", lambda line: line.update(accuracy=[[math.nan]])),
    ),
    "accuracy of text": (RUNS, each("config", lambda line: line.update(accuracy=["ab"]))),
    "accuracy of uneven rows": (
        RUNS,
        each("config", lambda line: line.update(accuracy=[[1], [1, 2]])),
    ),
    "digest of other curves": (RUNS, each("config", lambda line: line.update(curves="0" * 12))),
    "digest that is a list": (RUNS, each("config", lambda line: line.update(curves=[]))),
    "curves without a record": (CURVES, each("row", lambda line: line.pop("record"))),
    "a record of numbers": (CURVES, each("row", lambda line: line.update(record=[1, 2]))),
    "an evaluation too short": (CURVES, each("row", lambda line: line["record"][0].pop())),
    "an evaluation at step 0": (
        CURVES,
        each("row", lambda line: line["record"][0].__setitem__(0, 0)),
    ),
    "evaluations backwards": (CURVES, each("row", lambda line: line["record"].reverse())),
    "evaluations of other tasks": (
        CURVES,
        each("row", lambda line: line["record"][0].__setitem__(3, [1.0])),
    ),
    "initial accuracies of other tasks": (
        CURVES,
        each("row", lambda line: line.update(initial=[1.0])),
    ),
    "initial accuracies of text": (CURVES, each("row", lambda line: line.update(initial="abcde"))),
    "summaries of text": (CURVES, each("row", lambda line: line.update(summaries="abc"))),
    "summaries without steps": (
        CURVES,
        each("row", lambda line: line.update(summaries=[{"steps": [], "columns": {"a": [1.0]}}])),
    ),
    "summaries at a step of text": (
        CURVES,
        each("row", lambda line: line.update(summaries=[{"steps": "a", "columns": {"a": [1.0]}}])),
    ),
    "summaries of names": (
        CURVES,
        each("row", lambda line: line.update(summaries=[{"steps": [1], "columns": {"a": ["b"]}}])),
    ),
    "summaries of 10 to the 300": (
        CURVES,
        each(
            "row", lambda line: line.update(summaries=[{"steps": [1], "columns": {"a": [1e300]}}])
        ),
    ),
    "singles of 10 to the 300": (
        CURVES,
        each(
            "row",
            lambda line: line.update(
                summaries=[{"steps": [1], "columns": {"a": {"single": [1e300]}}}]
            ),
        ),
    ),
    "a summary twice": (
        CURVES,
        each("row", lambda line: line.update(summaries=[{"steps": [1, 1], "columns": {}}])),
    ),
    "names that a terminal obeys": (
        CURVES,
        each(
            "row", lambda line: line.update(summaries=[{"steps": [1], "columns": {"\x1b": [1.0]}}])
        ),
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_values_of_another_kind_are_refused_in_one_line(case: str, kept: Path) -> None:
    name, change = HOSTILE[case]
    rewrite(kept, name, change)
    named = CURVES if case.startswith("digest") else name
    with refused(f"kept/{named}: "):
        read_runs(kept)


def test_curves_of_other_runs_are_not_taken_for_theirs(kept: Path) -> None:
    whole = gzip.decompress((kept / CURVES).read_bytes()).decode().splitlines(keepends=True)
    for lines in (whole[:-1], [*whole[:-1], whole[-1].replace("0.", "1.", 1)]):
        (kept / CURVES).write_bytes(gzip.compress("".join(lines).encode()))
        with refused("does not hold the curves of row syngap, seed 1", "restore both files"):
            read_runs(kept)
    (kept / CURVES).unlink()
    with refused(f"kept/{CURVES}"):
        read_runs(kept)


def test_more_curves_than_runs_are_what_a_kill_leaves(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Curves are written first: until their runs are, the results are those of before."""
    runs = read_runs(kept)
    write_packed(kept, runs[:-1])
    written = packed.write

    def killed(path: Path, content: bytes, *, within: Path) -> None:
        if path.name == RUNS:
            raise KeyboardInterrupt
        written(path, content, within=within)

    monkeypatch.setattr(packed, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        write_packed(kept, runs)
    assert list(map(comparable, read_runs(kept))) == list(map(comparable, runs[:-1]))


def test_what_fills_the_memory_is_not_decompressed(kept: Path) -> None:
    bomb = gzip.compress(bytes(1 << 24), 9) * 64  # a GiB in a MiB
    (kept / CURVES).write_bytes(bomb)
    with refused(f"kept/{CURVES}: refused, it holds more than"), limited(seconds=20):
        read_runs(kept)


def test_files_that_fill_the_memory_are_not_read(kept: Path) -> None:
    with (kept / RUNS).open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    with refused(f"kept/{RUNS}: refused, it has {1 << 40} bytes"), limited(seconds=5):
        read_runs(kept)


def test_parts_that_stand_for_more_than_fits_are_not_put_in(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (kept / RUNS).stat().st_size
    monkeypatch.setattr(packed, "MOST", size + 10_000)

    def grow(lines: list[Any]) -> None:
        for line in lines:
            if "part" in line and "method" in line["value"]:
                line["value"]["more"] = "x" * 4_000

    rewrite(kept, RUNS, grow)
    with refused(f"kept/{RUNS}: not as syngap wrote it (it stands for more than"):
        read_runs(kept)


def test_values_nested_without_end_are_refused(kept: Path) -> None:
    for name in (RUNS, CURVES):
        before = (kept / name).read_bytes()
        text = b'{"format":1,"runs":4}\n' + b"[" * 200_000 + b"\n"
        (kept / name).write_bytes(gzip.compress(text) if name == CURVES else text)
        with refused(f"kept/{name}: not as syngap wrote it"):
            read_runs(kept)
        (kept / name).write_bytes(before)


@pytest.mark.parametrize("name", [RUNS, CURVES])
def test_links_are_not_followed(name: str, kept: Path, tmp_path: Path) -> None:
    (kept / name).rename(tmp_path / "elsewhere")
    (kept / name).symlink_to(tmp_path / "elsewhere")
    with refused(f"kept/{name}: is a link"):
        read_runs(kept)
    (tmp_path / "elsewhere").unlink()
    with refused(f"kept/{name}: is a link"):
        read_runs(kept)


@pytest.mark.parametrize("name", [RUNS, CURVES])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes to put there")
def test_pipes_and_folders_are_not_read(name: str, kept: Path) -> None:
    (kept / name).unlink()
    os.mkfifo(kept / name)
    with refused(f"kept/{name}: is not a plain file"), limited(seconds=5):
        read_runs(kept)
    (kept / name).unlink()
    (kept / name).mkdir()
    with refused(f"kept/{name}: is not a plain file"):
        read_runs(kept)


def test_a_row_cannot_lead_elsewhere(kept: Path) -> None:
    rewrite(kept, RUNS, each("config", lambda line: line.pop("curves")))
    rows = iter(["/etc/passwd", "../../x", "..", "a/b"])

    def lead(line: dict[str, Any]) -> None:
        line["config"][1]["row"] = next(rows)

    rewrite(kept, RUNS, each("config", lead))
    found = read_runs(kept)
    assert len(found) == 4
    assert {run.path.parent for run in found} == {kept}
