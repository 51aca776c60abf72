"""From an experiment and a folder to the runs that are still to be done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from syngap.bench.config.component import Component, entry
from syngap.bench.config.experiment import Experiment, complete_run, with_earlier_defaults
from syngap.bench.config.finetuning import (
    AnyExperiment,
    FinetuningExperiment,
    check_equal_trials,
    parse_experiment,
)
from syngap.bench.config.reading import LARGE
from syngap.bench.errors import UserError
from syngap.bench.methods.average import lag_note
from syngap.bench.options import shown
from syngap.bench.runner.finetuning_run import FinetuningJob, check_buildable
from syngap.bench.runner.loggers import registry as loggers
from syngap.bench.runner.run import Job, method_factory, stream_of
from syngap.bench.storage import clean, make_folder, read, strays
from syngap.bench.store.environment import require_compiler, resolve_device
from syngap.bench.store.folder_reader import (
    Run,
    read_environment,
    read_runs,
    read_status,
    read_yaml,
)
from syngap.bench.store.folder_writer import restore
from syngap.bench.store.layout import CHECKPOINTS, CONFIG, EXPERIMENT, run_folders
from syngap.bench.store.packed import is_packed
from syngap.bench.store.records import alone_in, write_yaml
from syngap.bench.store.removal import is_run_of, remove_run

__all__ = ["AnyJob", "Plan", "check_equal", "is_done", "jobs_of", "make_plan"]

AnyJob: TypeAlias = Job | FinetuningJob
IfThere: TypeAlias = Literal["refuse", "resume", "replace"]
_NAMED = 5  # of many paths in one message


class _Written(NamedTuple):
    """A file as it was written once: equal commands write equal bytes, to another file each."""

    inode: int
    changed: int
    content: bytes


@dataclass(frozen=True)
class Plan:
    """What is to be done in `out`.

    Args:
        experiment: with the rows and seeds that were asked for there before.
        out: the folder.
        jobs: the runs to do.
        done: those that need not be done again.
        steps: how many a row's runs have.
        stale: folders of runs to remove first.
        others: folders that hold a config.yaml and no run of this experiment: they stay.
        notes: what the user should know before the runs.
        recorded: runs of a record, which are written to their folders first: these are done too.
        before: experiment.yaml in `out` when the plan was made; None where it was not there.
    """

    experiment: AnyExperiment
    out: Path
    jobs: list[AnyJob]
    done: list[AnyJob]
    steps: dict[str, int]
    stale: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recorded: list[Run] = field(default_factory=list)
    before: _Written | None = None

    @contextmanager
    def begin(self, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
        """Make the folder, remove what is to be replaced, and let nobody else in meanwhile.

        Args:
            say: is called with what stays there because syngap did not write it.
        """
        with self._writing():
            make_folder(self.out, within=self.out)
        with alone_in(self.out):
            if _experiment_in(self.out) != self.before:
                raise UserError(
                    f"{self.out}: another process has begun runs there since this one looked; "
                    "the same command again takes them into account"
                )
            with self._writing():
                left = [*self.others]
                for folder in self.stale:
                    left += self._remove(folder)
                if left:
                    more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
                    named = ", ".join(map(str, left[:_NAMED]))
                    say(f"--fresh removes files of runs alone and left {named}{more}")
                clean(self.out, within=self.out)
                mapping = self.experiment.as_mapping()
                write_yaml(self.out / EXPERIMENT, mapping, within=self.out)
                for run in self.recorded:
                    folder = self.out / run.path.name
                    self._remove(folder)  # one that did not end
                    restore(run, folder)
            yield

    def _remove(self, folder: Path) -> list[Path]:
        """Remove a run, once no worker of a killed command is in it; return what else is there."""
        with alone_in(folder, wait=True) if folder.is_dir() else nullcontext():
            return remove_run(folder, loggers.names(), within=self.out)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # asking for permission does not find every reason
            reason = error.strerror or error
            raise UserError(f"{self.out}: cannot be written ({reason})") from error


def make_plan(
    experiment: AnyExperiment,
    out: Path,
    *,
    data: Path | None = None,
    if_there: IfThere = "refuse",
    device: str | None = None,
    record: Path | None = None,
) -> Plan:
    """Return the plan, having checked all that can be checked before the first step.

    Nothing is written or removed until the plan is begun.

    Args:
        experiment: what to run.
        out: where.
        data: where data sets are.
        if_there: what to do with earlier runs in `out`: refuse to begin, go on with them, or
            remove them first.
        device: what the runs will have, where they are done on other machines.
        record: a folder of results with runs of the same experiment, which need not be done again.
    """
    if isinstance(experiment, Experiment):
        experiment = replace(experiment, search=None)  # no run depends on it
    jobs = jobs_of(experiment, out, data, device)
    before = _experiment_in(out)  # first: what comes after this is noticed when the plan is begun
    earlier = _earlier(experiment, out, if_there)
    _check_writable(out)
    steps, notes = _check_buildable(jobs)
    merged, stale, others, done = experiment, list[Path](), list[Path](), list[AnyJob]()
    if earlier and if_there == "replace":
        found = run_folders(out)
        stale = [folder for folder in found if is_run_of(experiment.name, folder)]
        others = [folder for folder in found if folder not in stale]
        for job in jobs:
            _check_ours(job.folder)
            if job.folder in others:
                raise UserError(
                    f"{job.folder}: its config.yaml is not that of this run, and --fresh removes "
                    "runs alone; move the folder away, or give another --out"
                )
    else:
        merged = _merged(experiment, earlier, out) if earlier else experiment
        done = [job for job in jobs if is_done(job)]
    recorded: list[Run] = []
    to_do = [job for job in jobs if job not in done]
    if record is not None:
        _check_record(record, experiment, out)
        taken = _recorded(to_do, record)
        recorded = [run for _, run in taken]
        done += [job for job, _ in taken]
        to_do = [job for job in jobs if job not in done]
        if to_do and not recorded:
            notes.append(f"{record} has no finished run of these")
    if to_do and device is None and experiment.training.compiled:
        require_compiler(resolve_device(experiment.training.device))
    notes = notes if to_do else []
    return Plan(merged, out, to_do, done, steps, stale, others, notes, recorded, before)


def _check_record(record: Path, experiment: AnyExperiment, out: Path) -> None:
    """Refuse a record of another experiment, and one that the runs would be written over."""
    if record.resolve() == out.resolve():
        raise UserError(f"{out}: --out and --from are the same folder; give another --out")
    if (record / EXPERIMENT).is_file():
        name = read_yaml(record / EXPERIMENT).get("name")
        if name != experiment.name:
            raise UserError(
                f'{record}: holds runs of {shown(name)}, not of "{experiment.name}"; '
                "leave out --from, or give the record of this experiment"
            )


def _recorded(jobs: list[AnyJob], record: Path) -> list[tuple[AnyJob, Run]]:
    """Return the jobs that a record has finished runs of; UserError where these had other options.

    Their device is among the options: numbers of a CPU and of a GPU differ.
    """
    hint = f"leave out --from, or run {record / EXPERIMENT} on the same kind of device"
    found = {run.path.name: run for run in read_runs(record) if run.done}
    taken = [(job, found[job.name]) for job in jobs if job.name in found]
    for job, run in taken:
        before = _complete(job, run.config.as_mapping(), run.environment.device)
        check_equal(run.path, before, job.config.as_mapping(), hint)
    return taken


def jobs_of(
    experiment: AnyExperiment, out: Path, data: Path | None, device: str | None = None
) -> list[AnyJob]:
    """Return every run of the experiment, on `device` or on the one that is chosen here."""
    device = device or resolve_device(experiment.training.device).type
    # What "auto" stands for here: going on elsewhere would give other numbers.
    if isinstance(experiment, FinetuningExperiment):
        return [
            FinetuningJob(out / run.name, run.on_device(device), data) for run in experiment.runs()
        ]
    return [Job(out / run.name, run.on_device(device), data) for run in experiment.runs()]


def _experiment_in(out: Path) -> _Written | None:
    path = out / EXPERIMENT
    try:
        state = path.stat()  # first: who replaces it between the two is noticed
        return _Written(state.st_ino, state.st_mtime_ns, read(path, LARGE))
    except (OSError, UserError):  # not there, or nothing that `_earlier` lets through
        return None


def _earlier(experiment: AnyExperiment, out: Path, if_there: IfThere) -> dict[str, Any] | None:
    """Return what experiment.yaml in `out` says, None where nothing is there yet."""
    try:
        found = {*out.iterdir()} - {*strays(out), out / "landscapes"}
        inside = sorted(path.name for path in found)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise UserError(f"{out}: is not a folder") from None
    except OSError as error:
        raise UserError(f"{out}: cannot be read ({error.strerror})") from error
    if not inside:
        return None
    if EXPERIMENT not in inside:
        raise UserError(f"{out}: holds other things ({inside[0]}) and no runs; give another --out")
    if is_packed(out):
        raise UserError(f"{out}: holds packed results, and runs need a folder; give another --out")
    earlier = read_yaml(out / EXPERIMENT)
    if earlier.get("name") != experiment.name:
        raise UserError(
            f"{out}: holds runs of another experiment, {shown(earlier.get('name'))}, "
            f'not "{experiment.name}"; give another --out'
        )
    if if_there == "refuse":
        raise UserError(
            f"{out}: holds runs already; --resume goes on with them, --fresh removes them, "
            "or give another --out"
        )
    return earlier


def _check_writable(out: Path) -> None:
    there = out
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{out}: no permission to write in {there}")


def _check_buildable(jobs: list[AnyJob]) -> tuple[dict[str, int], list[str]]:
    """Load the data and make each method once, so that a mistake shows before the first run.

    Returns:
        How many steps a row's runs have, and what is to be said of the rows.
    """
    if tuned := [job for job in jobs if isinstance(job, FinetuningJob)]:
        return check_buildable(tuned), []
    return _check_streams([job for job in jobs if isinstance(job, Job)])


def _check_streams(jobs: list[Job]) -> tuple[dict[str, int], list[str]]:
    steps: dict[str, int] = {}
    notes: list[str] = []
    stream = stream_of(jobs[0].config, jobs[0].data)
    for job in jobs:
        row = job.config.row
        if row not in steps:
            method = method_factory(job.config, stream, torch.device("cpu"))()
            try:
                method.state_dict()
            except TypeError as error:  # better now than at the first checkpoint
                raise UserError(f"methods.{row}: {error}") from error
            batches = stream.present(method.sees)
            steps[row] = len(batches)
            average = entry(job.config.method.options, "average", float, int) or 0.0
            if note := lag_note(average, batches.ends, f"methods.{row}.average"):
                notes.append(note)
    return steps, notes


def is_done(job: AnyJob) -> bool:
    """Return whether a run has ended; UserError where it was begun with other options."""
    path = job.folder / CONFIG
    _check_ours(job.folder)
    if not path.is_file():
        return False
    before = _complete(job, read_yaml(path), read_environment(job.folder).device)
    check_equal(path, before, job.config.as_mapping())
    return read_status(job.folder).state == "done"


def _check_ours(folder: Path) -> None:
    """Refuse a run whose folder leads elsewhere: going on would write there."""
    inside = [each for each in (folder, folder / CHECKPOINTS) if each.is_dir()]
    half_written = {stray for each in inside for stray in strays(each)}  # which will be removed
    for path in (folder, *(path for each in inside for path in each.iterdir())):
        if path in half_written:
            continue
        if path.is_symlink():
            raise UserError(
                f"{path}: is a link, and a run goes on in its own folder; move it there"
            )
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path}: is neither a file nor a folder")


def _complete(job: AnyJob, before: dict[str, Any], ran_on: str | None) -> dict[str, Any]:
    """Return the configuration of an earlier run as this version would have written it."""
    if isinstance(job, FinetuningJob):
        return job.config.complete(before)
    found = complete_run(before, job.config)
    training, now = found.get("training"), job.config.training
    if isinstance(training, dict) and training["device"] == "auto" != now.device:
        # The first runs did not say what it stood for; what they ran on, they did.
        return {**found, "training": {**training, "device": "cpu" if ran_on == "cpu" else "cuda"}}
    return found


def check_equal(
    path: Path, before: Any, now: Any, hint: str = "give another --out, or --fresh"
) -> None:
    """Refuse to go on where what `path` says is not what is asked for now."""
    before, now = json.loads(json.dumps([before, now]))  # lists and tuples are the same in a file
    if before != now:
        raise UserError(f"{path}: {_difference(before, now)}; {hint}")


def _difference(before: Any, now: Any, path: str = "") -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *before]:
            if before.get(key) != now.get(key):
                inner = f"{path}.{key}" if path else str(key)
                return _difference(before.get(key), now.get(key), inner)
    return f"{path or 'the configuration'} was {shown(before)} there and is {shown(now)} now"


def _merged(experiment: AnyExperiment, earlier: dict[str, Any], out: Path) -> AnyExperiment:
    """Return the experiment with the rows and seeds that were asked for before as well.

    Everything else must be as it was, or the table would compare what cannot be compared.
    """
    path = out / EXPERIMENT
    try:
        before = parse_experiment(with_earlier_defaults(earlier))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    rows = {**before.methods, **experiment.methods}
    shared = [row for row in experiment.methods if row in before.methods]
    was, now = before.as_mapping(), experiment.as_mapping()
    for mapping in (was, now):
        mapping["methods"] = {row: mapping["methods"][row] for row in shared}
        del mapping["seeds"]
    check_equal(path, was, now)
    if isinstance(experiment, FinetuningExperiment):
        check_equal_trials({row: part for row, part in rows.items() if isinstance(part, Component)})
    seeds = sorted({*before.seeds, *experiment.seeds})
    return replace(experiment, methods=rows, seeds=seeds)
