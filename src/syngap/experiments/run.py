"""One run, from its configuration to its folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syngap import methods, models, seeds, streams
from syngap.errors import UserError
from syngap.experiments.config import Training
from syngap.experiments.environment import arithmetic, chosen_device
from syngap.experiments.journal import FolderJournal, Tell
from syngap.methods import Learner, Method
from syngap.streams import Stream
from syngap.training import train

__all__ = ["Job", "beginning", "execute", "stream_of"]


@dataclass(frozen=True)
class Job:
    """A run to be done: its folder, its configuration, and where the data are on this machine."""

    folder: Path
    config: dict[str, Any]
    data: Path | None = None

    @property
    def name(self) -> str:
        """METHOD-SEED."""
        return self.folder.name


def execute(job: Job, tell: Tell) -> None:
    """Do a run, or what is left of it."""
    training = Training(**job.config["training"])
    with arithmetic(training.threads, training.deterministic):
        _execute(job, training, tell)


def _execute(job: Job, training: Training, tell: Tell) -> None:
    device = chosen_device(training.device)
    stream = stream_of(job.config, job.data)
    begin = beginning(job.config, stream, device)
    stream = stream.presented(begin().sees).to(device)
    with FolderJournal(
        job.folder,
        steps=len(stream),
        tasks=stream.tasks,
        checkpoint_seconds=training.checkpoint_seconds,
        fingerprint=stream.fingerprint(),
        tell=tell,
    ) as journal:
        begin = _heard(begin, journal)
        method = train(stream, begin, journal, evaluate_every=training.evaluate_every)
        journal.close(method.learner.judged)


def _heard(begin: Callable[[], Method], journal: FolderJournal) -> Callable[[], Method]:
    """Return `begin`, with networks that are heard of while they are judged, however long it takes.

    Between steps the loop itself tells the journal.
    """

    def after_forward(model: nn.Module, inputs: Any, outputs: Any) -> None:
        if not model.training:
            journal.alive()

    def heard() -> Method:
        method = begin()
        method.learner.judged.register_forward_hook(after_forward)
        return method

    return heard


def stream_of(config: dict[str, Any], data: Path | None) -> Stream:
    """Return the stream of a run: its data set, in the order of its seed."""
    options = {key: value for key, value in config["stream"].items() if key != "name"}
    return streams.load(config["stream"]["name"], seed=config["seed"], data=data, **options)


def beginning(config: dict[str, Any], stream: Stream, device: torch.device) -> Callable[[], Method]:
    """Return a function that makes the run's method with a fresh network, the same each time."""
    network, method, seed = dict(config["model"]), dict(config["method"]), config["seed"]
    training = Training(**config["training"])
    build = models.registry.get(network.pop("name"))
    kind = methods.registry.get(method.pop("name"))

    def begin() -> Method:
        torch.manual_seed(seeds.derived(seed, "network"))
        try:
            learner = Learner(
                build(stream.shape, stream.classes, **network),
                stream.transform,
                seed=seed,
                device=device,
                precision=training.precision,
                captured=training.captured and device.type == "cuda",
                non_finite=training.non_finite,
            )
        except UserError as error:
            raise UserError(f"model: {error}") from error
        except (RuntimeError, MemoryError) as error:  # more than there is room for
            first = str(error).partition("\n")[0]
            raise UserError(f"model: {config['model']['name']} cannot be made ({first})") from error
        try:
            made: Method = kind(learner, **method)
        except UserError as error:
            raise UserError(f"methods.{config['row']}.{error}") from error
        return made

    return begin
