"""One run, from its configuration to its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syngap.bench import methods, models, seeds, streams
from syngap.bench.config.component import Options
from syngap.bench.config.run_config import RunConfig, Training
from syngap.bench.errors import UserError
from syngap.bench.memory import Memory
from syngap.bench.methods import Learner, Method
from syngap.bench.methods.compiler import compiler_errors_refused
from syngap.bench.store.environment import arithmetic, memory_limit, resolve_device
from syngap.bench.store.folder_writer import FolderJournal, Tell
from syngap.bench.streams import Stream
from syngap.bench.training import train

__all__ = ["Job", "execute", "method_factory", "stream_of"]


@dataclass(frozen=True)
class Job:
    """A run to be done: its folder, its configuration, and where the data are on this machine."""

    folder: Path
    config: RunConfig
    data: Path | None = None

    @property
    def name(self) -> str:
        """METHOD-SEED."""
        return self.folder.name


def execute(job: Job, tell: Tell) -> None:
    """Do a run, or what is left of it."""
    training = job.config.training
    refused = compiler_errors_refused() if training.compiled else nullcontext()
    with arithmetic(training.threads, training.deterministic), refused:
        _execute(job, training, tell)


def _execute(job: Job, training: Training, tell: Tell) -> None:
    device = resolve_device(training.device)
    stream = stream_of(job.config, job.data)
    begin = method_factory(job.config, stream, device)
    stream = stream.present(begin().sees).to(device)
    with FolderJournal(
        job.folder,
        steps=len(stream),
        tasks=stream.tasks,
        checkpoint_seconds=training.checkpoint_seconds,
        fingerprint=stream.fingerprint(),
        tell=tell,
    ) as journal:
        begin = _report_evaluation(begin, journal)
        method = train(stream, begin, journal, evaluate_every=training.evaluate_every)
        journal.close(method.learner.evaluated_model)


def _report_evaluation(begin: Callable[[], Method], journal: FolderJournal) -> Callable[[], Method]:
    """Return `begin` with learners that report to the journal while they evaluate.

    So a long evaluation does not look like a run that hangs. Between steps the loop reports.
    """

    def begin_with_report() -> Method:
        method = begin()
        method.learner.report = journal.alive
        return method

    return begin_with_report


def stream_of(config: RunConfig, data: Path | None) -> Stream:
    """Return the stream of a run: its data set, in the order of its seed."""
    options: dict[str, Any] = dict(config.stream.options)
    return streams.load(config.stream.name, seed=config.seed, data=data, **options)


def method_factory(config: RunConfig, stream: Stream, device: torch.device) -> Callable[[], Method]:
    """Return a function that makes the run's method with a fresh network, the same each time.

    UserError where the network, or the samples that the method is to keep, need more memory than
    the machine has.
    """
    training = config.training
    network = models.registry.get(config.model.name)
    kind = methods.registry.get(config.method.name)

    def build() -> nn.Module:
        module: nn.Module = network(stream.shape, stream.classes, **config.model.options)
        return module

    def begin() -> Method:
        torch.manual_seed(seeds.derive(config.seed, "network"))
        with _making("model: ", config.model.name):
            learner = Learner(
                build(),
                stream.transform,
                seed=config.seed,
                device=device,
                precision=training.precision,
                captured=training.captured and device.type == "cuda",
                channels_last=training.channels_last,
                compiled=training.compiled,
                non_finite=training.non_finite,
            )
        with _making(f"methods.{config.row}.", "method"):
            method: Method = kind(learner, **config.method.options)
            _check_memories(method, config.method.options, stream)
        return method

    with _making("model: ", config.model.name):
        _check_network(build, config.model.name)
    return begin


@contextmanager
def _making(path: str, name: str) -> Iterator[None]:
    """Let an error say by `path` which part of the configuration it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}{error}") from error
    except (RuntimeError, MemoryError) as error:  # more than there is room for
        first = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path}{name} cannot be made ({first})") from error


def _check_network(build: Callable[[], nn.Module], name: str) -> None:
    """Refuse a network that the machine cannot hold, before any of it is allocated."""
    try:
        with torch.device("meta"):
            parameters = list(build().parameters())
    except Exception as error:
        if "overflow" in str(error):  # its size has more than 64 bits
            raise UserError(f"{name} cannot be made ({error}); make it smaller") from error
        return  # it looks at its values, or cannot be built: then the build will say why
    needed = 2 * sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    if needed > (limit := memory_limit()):
        count = sum(parameter.numel() for parameter in parameters)
        raise UserError(
            f"{name} cannot be made ({count:,} parameters and their gradients need {needed:,} "
            f"bytes, this machine has {limit:,.0f}); make it smaller"
        )


def _check_memories(method: Method, options: Options, stream: Stream) -> None:
    """Refuse to keep more samples than the machine can hold; they are allocated at the first."""
    for attribute, memory in vars(method).items():
        if isinstance(memory, Memory) and memory.size:
            needed = memory.size * stream.sample_bytes()
            if needed > (limit := memory_limit()):
                named = [option for option, value in options.items() if value == memory.size]
                raise UserError(
                    f"{(named or [attribute])[0]}: got {memory.size}, and so many samples need "
                    f"{needed:,} bytes, this machine has {limit:,.0f}; keep fewer"
                )
