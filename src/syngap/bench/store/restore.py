"""A packed run as the folder that it was, without its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from syngap.bench.metrics import Evaluation
from syngap.bench.storage import make_folder, write
from syngap.bench.store.folder_reader import Run, csv_of
from syngap.bench.store.layout import ACCURACY, CONFIG, ENVIRONMENT, METRICS, STATUS
from syngap.bench.store.records import write_json, write_yaml

__all__ = ["restore"]


def restore(run: Run, folder: Path) -> None:
    """Write a finished run to its folder, so that it need not be done again.

    Args:
        run: that was kept.
        folder: of the run, in the folder of its experiment; no other run is in it.
    """
    home = folder.parent
    make_folder(folder, within=home)
    write_json(folder / ENVIRONMENT, run.environment.as_mapping(), within=home)
    lines = "".join(f"{json.dumps(line)}\n" for line in _lines(run))
    write(folder / METRICS, lines.encode(), within=home)
    if run.accuracy:
        ends = [evaluation.task + 1 for evaluation in run.record if evaluation.end]
        learned = ends or range(1, len(run.accuracy) + 1)
        rows = zip(learned, run.accuracy, strict=True)
        write(folder / ACCURACY, csv_of(rows, len(run.accuracy[0])).encode(), within=home)
    write_json(folder / STATUS, run.status.as_mapping(), within=home)
    write_yaml(folder / CONFIG, run.config.as_mapping(), within=home)  # last: now it is a run


def _lines(run: Run) -> Iterator[dict[str, Any]]:
    for point in run.points:
        yield point.as_mapping()
    first = [] if run.initial is None else [Evaluation(0, 0, False, run.initial)]
    for evaluation in (*first, *run.record):
        yield {**asdict(evaluation), "summary": run.summaries.get(evaluation.step, {})}
