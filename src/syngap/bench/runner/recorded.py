"""A recorded experiment, to be run again exactly as it was: read from its runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from syngap.bench.config.experiment import Experiment, complete_run, with_earlier_defaults
from syngap.bench.config.finetuning import FinetuningExperiment
from syngap.bench.config.run_config import RunConfig
from syngap.bench.errors import UserError
from syngap.bench.store.folder_reader import Run, read_yaml
from syngap.bench.store.layout import EXPERIMENT
from syngap.messages import nearest

__all__ = ["repeat_experiment", "repeat_finetuning", "select_rows"]

_USUAL = ("syngap", "er")
_USUAL_FINETUNING = ("adamw", "protect")


def select_rows(recorded: Sequence[Run], selected: Sequence[str] | None) -> list[str]:
    """Return the rows to run again: those asked for ("all" is all), else SynGAP's and ER's."""
    known = list(dict.fromkeys(run.row for run in recorded if run.done))
    if selected is None:
        return [row for row in _USUAL if row in known] or known
    if list(selected) == ["all"]:
        return known
    for row in selected:
        if row not in known:
            hint = nearest(row, known) or f"; there are {', '.join(known)}"
            raise UserError(f'--row: no finished run of "{row}" is recorded{hint}')
    return list(selected)


def repeat_experiment(recorded: Sequence[Run], rows: Sequence[str], count: int) -> Experiment:
    """Return the experiment that runs `rows` again, with `count` of the seeds they share.

    Options that came later than the record take their defaults. The device is the recorded one
    where it is here, otherwise whichever there is.

    Args:
        recorded: every run that is recorded.
        rows: which of them.
        count: how many seeds, the lowest first.
    """
    done = {(run.row, run.seed): run for run in recorded if run.done}
    seeds = sorted(
        seed for seed in {seed for _, seed in done} if all((row, seed) in done for row in rows)
    )
    if len(seeds) < count:
        raise UserError(f"--seeds: {count} were asked for, {len(seeds)} are recorded for all rows")
    chosen = [done[row, seed] for seed in seeds[:count] for row in rows]
    experiment = replace(_recorded_experiment(chosen), seeds=seeds[:count])
    for run, config in zip(chosen, experiment.runs(), strict=True):
        _check_as_recorded(run, config)
    if experiment.training.device == "cuda" and not torch.cuda.is_available():
        return replace(experiment, training=experiment.training.on_device("auto"))
    return experiment


def repeat_finetuning(
    recorded: Sequence[Run], folder: Path, selected: Sequence[str] | None, count: int
) -> FinetuningExperiment:
    """Return the recorded fine-tuning experiment with some of its methods and seeds.

    Args:
        recorded: every run that is recorded.
        folder: where they are.
        selected: methods; None is AdamW and protect, "all" is all.
        count: how many seeds, the lowest first.
    """
    whole = FinetuningExperiment.from_mapping(read_yaml(folder / EXPERIMENT))
    known = [
        row for row in whole.methods if any(run.family == row and run.done for run in recorded)
    ]
    usual = [row for row in _USUAL_FINETUNING if row in known] or known
    rows = usual if selected is None else known if list(selected) == ["all"] else list(selected)
    seeds = sorted({run.seed for run in recorded if run.done})
    if len(seeds) < count:
        raise UserError(f"--seeds: {count} were asked for, {len(seeds)} are recorded")
    chosen = whole.select(rows, seeds[:count])
    if chosen.training.device == "cuda" and not torch.cuda.is_available():
        return replace(chosen, training=chosen.training.on_device("auto"))
    return chosen


def _recorded_experiment(runs: Sequence[Run]) -> Experiment:
    config = with_earlier_defaults(runs[0].config.entries)
    methods = {}
    for run in runs:
        method = run.config.method
        methods[run.row] = {"method": method.name, **method.options}
    try:
        return Experiment.from_mapping(
            {
                "name": config["experiment"],
                **{part: config[part] for part in ("stream", "model", "training")},
                "methods": methods,
            }
        )
    except (KeyError, UserError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{runs[0].path}: {reason}") from error


def _check_as_recorded(run: Run, config: RunConfig) -> None:
    """Refuse rows that were not recorded in one and the same setting."""
    was, now = json.loads(
        json.dumps([complete_run(run.config.entries, config), config.as_mapping()])
    )
    for part in ("stream", "model", "training", "method"):
        for option in {**was[part], **now[part]}:
            same = was[part].get(option) == now[part].get(option)
            if not same and option not in ("device", "checkpoint_seconds"):
                raise UserError(
                    f"{run.path}: {part}.{option} is not that of the other runs; "
                    "give a single --row"
                )
