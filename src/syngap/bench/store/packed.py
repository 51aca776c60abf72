"""Ended runs in two files: the form in which results are kept.

DIR/runs.jsonl               a line a run, sorted by row and seed: a diff shows which were added
    {"format": 1, "runs": 2}                               the first line
    {"part": DIGEST, "value": {…}}                         what several runs have in common
    {"config": [DIGEST, {"row": …, "seed": …}], "environment": [DIGEST, {"started": …}],
     "status": {…}, "accuracy": [[…]], "curves": DIGEST}   a run: parts, and what is its own
DIR/curves.jsonl.gz          a line a run: evaluations within tasks, summaries
    {"row": …, "seed": …, "initial": […], "record": [[step, task, end, accuracy, newest], …],
     "summaries": [{"steps": […], "columns": {NAME: […]}}]}
    {"row": …, "seed": …, "points": [{"step": …, "share": …, …}, …]}   of a fine-tuning run

The digest of a run's curves is in its line, so that the two files cannot be of different runs
without notice, and a diff of the first shows what changed in the second.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from syngap.bench.config.reading import check_format, reading, text_in
from syngap.bench.errors import UserError
from syngap.bench.finetuning.point import Point
from syngap.bench.metrics import Evaluation
from syngap.bench.options import plain
from syngap.bench.storage import remove, write
from syngap.bench.store.outcome import (
    Environment,
    RecordedConfig,
    Run,
    Status,
    check_accuracy,
    check_follows,
    check_point,
    evaluation_of,
    summary_of,
)
from syngap.messages import count_of

__all__ = ["ENDED", "FILES", "are_same", "is_packed", "read_packed", "write_packed"]

FORMAT = 1
FILES = ("curves.jsonl.gz", "runs.jsonl")  # in this order: see `write_packed`
ENDED = ("done", "failed")  # states of runs that can be packed

MOST = 1 << 27  # bytes of a file, decompressed and with parts put in
LONGEST_LINE = 1 << 25
_CHUNK = 1 << 20
_OWN = {"config": ("row", "seed"), "environment": ("started",)}
_EVALUATION = ("step", "task", "end", "accuracy", "newest")

Key = tuple[str, int]


def is_packed(directory: Path) -> bool:
    """Return whether `directory` holds packed runs."""
    return os.path.lexists(directory / FILES[1])


def read_packed(directory: Path) -> list[Run]:
    """Return the runs that are packed in `directory`, sorted by row and seed.

    Raises:
        UserError: in one line that names the file, where it is not as `write_packed` wrote it.
    """
    curves, path = (directory / name for name in FILES)
    with reading(path):
        _check_no_link(path)
        runs = _runs(directory, text_in(path, MOST), path)
    missing = {key for key, (_, digest) in runs.items() if digest is not None}
    with reading(curves):
        for line in _lines(_decompressed(curves), curves) if missing else ():
            value = json.loads(line)
            key = value["row"], value["seed"]
            if key in missing and _digest(line) == runs[key][1]:
                runs[key] = _with_curves(runs[key][0], value), None
                missing.remove(key)
    if missing:
        row, seed = min(missing)
        raise UserError(
            f"{curves}: does not hold the curves of row {row}, seed {seed} that belong to "
            f"{path.name}; restore both files, or keep the runs again in an empty folder"
        )
    return [runs[key][0] for key in sorted(runs)]


def write_packed(directory: Path, runs: Iterable[Run]) -> int:
    """Pack `runs` in `directory`, in place of those that are there.

    Args:
        directory: it exists.
        runs: all of them have ended, and no two have the same row and seed.

    Returns:
        How many of the files are new or changed.
    """
    texts = _texts(runs)
    for name, text in texts.items():
        if len(text.encode()) > MOST or max(map(len, text.split("\n"))) > LONGEST_LINE:
            raise UserError(
                f"{directory / name}: not written, it would be too large to be read again; "
                f"a file may have {MOST} bytes and a run {LONGEST_LINE}: keep fewer runs together"
            )
    written = 0
    for name in FILES:  # curves first: curves without a run are not read
        path = directory / name
        if name in texts and texts[name] != _text_there(path):
            compressed = name.endswith(".gz")
            content = _compressed(texts[name]) if compressed else texts[name].encode()
            write(path, content, within=directory)
            written += 1
    if FILES[0] not in texts:
        remove(directory / FILES[0], within=directory)
    return written


def are_same(one: Run, other: Run) -> bool:
    """Return whether two runs are packed as the same bytes: NaN is equal to NaN there."""
    return _texts([one]) == _texts([other])


# Writing ------------------------------------------------------------------------------------------


def _texts(runs: Iterable[Run]) -> dict[str, str]:
    """Return what the files hold, by their names."""
    parts: dict[str, str] = {}
    lines: dict[Key, tuple[str, str | None]] = {}
    for run in runs:
        if run.status.state not in ENDED:
            raise UserError(f"{run.path}: has not ended, and only runs that have can be packed")
        if (run.row, run.seed) in lines:
            raise UserError(f"{run.path}: a second run of row {run.row} with seed {run.seed}")
        curves = _curves_line(run)
        line: dict[str, Any] = {}
        for name, value in (("config", run.config), ("environment", run.environment)):
            line[name], part = _shared(value.entries, _OWN[name])
            parts |= part
        line |= {"status": run.status.as_mapping(), "accuracy": run.accuracy}
        if curves is not None:
            line["curves"] = _digest(curves)
        lines[run.row, run.seed] = _json(line), curves
    ordered = [lines[key] for key in sorted(lines)]
    head = _json({"format": FORMAT, "runs": len(ordered)})
    texts = {FILES[1]: _joined([head, *(parts[name] for name in sorted(parts))])}
    texts[FILES[1]] += _joined(line for line, _ in ordered)
    if any(curves for _, curves in ordered):
        head = _json({"format": FORMAT})
        texts[FILES[0]] = _joined([head, *(curves for _, curves in ordered if curves)])
    return texts


def _shared(value: Mapping[str, Any], own: Sequence[str]) -> tuple[list[Any], dict[str, str]]:
    """Return a reference with what is a run's own, and the line of the part that it refers to."""
    common = {name: None if name in own else inner for name, inner in value.items()}
    digest = _digest(_json(common))
    mine = {name: value[name] for name in own if name in value}
    return [digest, mine], {digest: _json({"part": digest, "value": common})}


def _curves_line(run: Run) -> str | None:
    if run.points:
        points = [point.as_mapping() for point in run.points]
        return _json({"row": run.row, "seed": run.seed, "points": points})
    if run.initial is None and not run.record and not run.summaries:
        return None
    return _json(
        {
            "row": run.row,
            "seed": run.seed,
            "initial": run.initial,
            "record": [[getattr(one, name) for name in _EVALUATION] for one in run.record],
            "summaries": [
                {"steps": steps, "columns": {name: _column(values) for name, values in columns}}
                for steps, columns in _columns(run.summaries)
            ],
        }
    )


def _columns(
    summaries: Mapping[int, Mapping[str, float]],
) -> Iterator[tuple[list[int], list[tuple[str, list[float]]]]]:
    """Yield steps whose summaries have the same names, and the values by name."""
    for names, group in groupby(summaries.items(), key=lambda item: tuple(item[1])):
        steps, found = zip(*group, strict=True)
        yield list(steps), [(name, [summary[name] for summary in found]) for name in names]


def _column(values: Sequence[float]) -> Any:
    """Return values as they are written: those of single precision need half as many digits."""
    short = [_short(value) for value in values]
    return list(values) if None in short else {"single": short}


def _short(value: float) -> float | None:
    """Return the shortest number that rounds to `value` in single precision; None if none does."""
    if not math.isfinite(value):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if _rounded([short]) == [value]:
                return short
        except OverflowError:
            return None
    return None


def _rounded(values: Sequence[float]) -> list[float]:
    form = f"<{len(values)}f"
    return list(struct.unpack(form, struct.pack(form, *values)))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:12]


def _compressed(text: str) -> bytes:
    """Return `text` compressed: without a name and a time, so that it has the same bytes again."""
    file = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, file, mtime=0) as compressed:
        compressed.write(text.encode())
    return file.getvalue()


def _text_there(path: Path) -> str | None:
    """Return what a file of an earlier `write_packed` holds, None where it is something else."""
    try:
        if path.is_symlink() or not path.is_file():
            return None
        return _decompressed(path) if path.suffix == ".gz" else text_in(path, MOST)
    except (OSError, ValueError, UserError):
        return None


# Reading ------------------------------------------------------------------------------------------


def _check_no_link(path: Path) -> None:
    if path.is_symlink():
        raise UserError(f"{path}: is a link, and packed runs are read from their own folder")


def _decompressed(path: Path) -> str:
    """Return the text in a compressed file, having made no more of it than `MOST` bytes."""
    _check_no_link(path)
    if not path.is_file():
        raise UserError(f"{path}: is not a plain file")
    content = bytearray()
    try:
        with gzip.open(path) as file:
            while chunk := file.read(_CHUNK):
                content += chunk
                if len(content) > MOST:
                    raise UserError(
                        f"{path}: refused, it holds more than {MOST} bytes when decompressed"
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"it is cut off or damaged: {error}") from error
    return content.decode()


def _lines(text: str, path: Path) -> Iterator[str]:
    """Return the lines after the first, which says the format."""
    *lines, end = text.split("\n")
    if end or not lines:
        raise ValueError("it is cut off")
    if max(map(len, lines)) > LONGEST_LINE:
        raise ValueError(f"a line of more than {LONGEST_LINE} letters")
    head = json.loads(lines[0])
    if "format" not in head:
        raise ValueError("'format' is missing")
    check_format(head, path, known=FORMAT)
    return iter(lines[1:])


def _runs(directory: Path, text: str, path: Path) -> dict[Key, tuple[Run, str | None]]:
    """Return runs without their curves, and the digests of those."""
    parts: dict[str, str] = {}
    runs: dict[Key, tuple[Run, str | None]] = {}
    size = 0
    for line in _lines(text, path):
        found = json.loads(line)
        if "part" in found:
            parts[found["part"]] = line
            continue
        values = {}
        for name in _OWN:
            digest, own = found[name]
            size += len(parts[digest])
            if size > MOST:
                raise ValueError(f"it stands for more than {MOST} bytes")
            values[name] = plain({**json.loads(parts[digest])["value"], **own})
        run = _run(directory, values, found)
        if (run.row, run.seed) in runs:
            raise ValueError(f"row {run.row}, seed {run.seed} is there twice")
        runs[run.row, run.seed] = run, found.get("curves")
    if (said := json.loads(text.partition("\n")[0])["runs"]) != len(runs):
        count = count_of(len(runs), "run")
        raise ValueError(f"it holds {count}, and its first line says {said!a:.80}")
    return runs


def _run(directory: Path, values: Mapping[str, dict[str, Any]], line: Mapping[str, Any]) -> Run:
    config = RecordedConfig.from_mapping(values["config"])
    status, accuracy = Status.from_mapping(plain(line["status"])), line["accuracy"]
    if status.state not in ENDED:
        raise ValueError(f"state is {status.entries.get('state')!a:.80}, expected one of {ENDED}")
    check_accuracy(accuracy, len(accuracy[0]) if accuracy else 0)
    return Run(
        path=directory / f"{config.row}-{config.seed}".replace("/", "-"),
        config=config,
        status=status,
        environment=Environment(values["environment"]),
        accuracy=[list(map(float, row)) for row in accuracy],
    )


def _with_curves(run: Run, line: Mapping[str, Any]) -> Run:
    if "points" in line:
        points: list[Point] = []
        for found in line["points"]:
            point = Point.from_mapping(found)
            check_point(point, points)
            points.append(point)
        return replace(run, points=points)
    record: list[Evaluation] = []
    for values in line["record"]:
        evaluation = evaluation_of(dict(zip(_EVALUATION, values, strict=True)))
        if not evaluation.step:
            raise ValueError("an evaluation at step 0 in the record")
        check_follows(evaluation, record, run.accuracy)
        record.append(evaluation)
    initial = line["initial"]
    if initial is not None:
        check_accuracy([initial], len((run.accuracy or [initial])[0]))
    summaries: dict[int, dict[str, float]] = {}
    for group in line["summaries"]:
        steps = group["steps"]
        columns = {name: _values(column) for name, column in group["columns"].items()}
        if any(len(values) != len(steps) for values in columns.values()):
            raise ValueError("a summary without a value for every step")
        for place, step in enumerate(steps):
            if type(step) is not int or step < 0 or step in summaries:
                raise ValueError(f"a summary at step {step!a:.80}")
            summaries[step] = summary_of({name: of[place] for name, of in columns.items()})
    initial = None if initial is None else tuple(map(float, initial))
    return replace(run, initial=initial, record=record, summaries=summaries)


def _values(column: Any) -> list[float]:
    values: list[float] = column["single"] if isinstance(column, dict) else column
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise ValueError("a summary that is not names with numbers")
    return _rounded(values) if isinstance(column, dict) else values
