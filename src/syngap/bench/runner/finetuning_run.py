"""One fine-tuning run, from its configuration to its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syngap.bench.config.component import Component, Value
from syngap.bench.config.finetuning import FinetuningRun
from syngap.bench.errors import UserError
from syngap.bench.finetuning import methods
from syngap.bench.finetuning.loop import train
from syngap.bench.finetuning.model_tasks import TASKS
from syngap.bench.finetuning.models import Making
from syngap.bench.finetuning.setting import Setting
from syngap.bench.methods.compiler import compiler_errors_refused
from syngap.bench.registry import Registry
from syngap.bench.store.environment import arithmetic, resolve_device
from syngap.bench.store.folder_writer import FolderJournal, Tell
from syngap.bench.store.shared import digests, share_folder_in, share_in

__all__ = ["FinetuningJob", "check_buildable", "execute_finetuning"]


@dataclass(frozen=True)
class FinetuningJob:
    """A run to be done: its folder, its configuration, and where data and models are."""

    folder: Path
    config: FinetuningRun
    data: Path | None = None

    @property
    def name(self) -> str:
        """ROW-SEED."""
        return self.folder.name


def execute_finetuning(job: FinetuningJob, tell: Tell) -> None:
    """Do a run, or what is left of it."""
    config, training = job.config, job.config.training
    source = _source(config, job.data)
    with (
        arithmetic(training.threads, training.deterministic),
        compiler_errors_refused() if training.compiled else nullcontext(),
        FolderJournal(
            job.folder,
            steps=training.steps,
            tasks=0,
            checkpoint_seconds=training.checkpoint_seconds,
            fingerprint=json.dumps({config.task: source.fingerprint, "files": _files(job)}),
            tell=tell,
        ) as journal,
    ):
        setting = _setting(job, source)
        kind = methods.registry.get(config.method.name)
        seconds = train(
            setting,
            lambda: kind(setting, **config.method.options),
            journal,
            steps=training.steps,
            batch=training.batch,
            warmup=training.warmup,
            evaluations=training.evaluations,
            shares=training.shares,
            compiled=training.compiled,
        )
        journal.close(None, seconds)


def check_buildable(jobs: Sequence[FinetuningJob]) -> dict[str, int]:
    """Load the data and import each method once; return how many steps a row's runs have."""
    first = jobs[0].config
    _source(first, jobs[0].data)
    TASKS[first.task].models.get(first.model.name)
    for name in {job.config.method.name: None for job in jobs}:
        methods.registry.get(name).check()  # type: ignore[attr-defined]
    return {job.config.row: job.config.training.steps for job in jobs}


_loaded: dict[str, tuple[Making[Any], Any]] = {}
"""What the last run of this process tuned: loading may take longer than a run. None changes it."""


def _setting(job: FinetuningJob, source: Any) -> Setting:
    config = job.config
    making, model = _load(job, source)
    return TASKS[config.task].make_setting(
        model,
        making,
        anchors=config.anchors,
        windows=config.training.windows,
        precision=config.training.precision,
    )


def _load(job: FinetuningJob, source: Any) -> tuple[Making[Any], Any]:
    """Return the model before tuning, and what it was made from."""
    config, device = job.config, resolve_device(job.config.training.device)
    of_model: dict[str, Value] = {"model": config.model.as_mapping()}
    if files := _files(job):
        of_model["files"] = files
    depends_on: dict[str, Value] = {
        config.task: config.source.as_mapping(),
        "contents": source.fingerprint,
        **of_model,
        "anchors": config.anchors.count,
        "prompt": config.anchors.prompt,
        "seed": config.seed,
        "device": device.type,
    }
    out = job.folder.parent
    key = json.dumps([str(out.absolute()), str(job.data), depends_on])
    if key not in _loaded:
        _loaded.clear()
        making = Making(
            source,
            config.seed,
            device,
            job.data,
            share_in(out, depends_on, of_model),
            share_folder_in(out, of_model),
        )
        _loaded[key] = making, _made("model", TASKS[config.task].models, config.model, making)
    return _loaded[key]


def _source(config: FinetuningRun, data: Path | None) -> Any:
    """Return texts or images. Texts are read for each run: files may have been exchanged."""
    return _made(config.task, TASKS[config.task].sources, config.source, data)


def _files(job: FinetuningJob) -> dict[str, Value]:
    """Return digests of the files of a run's model, its tokenizer's among them."""
    return digests(job.config.model.options, job.data)


def _made(part: str, registry: Registry, component: Component, source: Any) -> Any:
    """Return what a component of the configuration stands for, made from what is given."""
    try:
        return registry.get(component.name)(source, **component.options)
    except UserError as error:
        raise UserError(f"{part}.{error}") from error
