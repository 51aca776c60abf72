"""Ended runs, added to published results: packed, and free of this machine's folders.

What is kept is text: of runs the configuration, environment, status, R and evaluations, packed as
`syngap.bench.store.packed` says, and whatever else a command wrote beside them as YAML, CSV or
JSON. Checkpoints and pages are not.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from syngap.bench.config.component import Value
from syngap.bench.config.experiment import is_shipped, read, with_earlier_defaults
from syngap.bench.config.finetuning import AnyExperiment, parse_experiment
from syngap.bench.config.reading import LARGE, reading, text_in
from syngap.bench.config.values import name_of
from syngap.bench.errors import UserError
from syngap.bench.finetuning.model_tasks import TASKS
from syngap.bench.options import shown
from syngap.bench.storage import check_inside, make_folder, remove, write
from syngap.bench.storage import read as read_bytes
from syngap.bench.store.environment import portable
from syngap.bench.store.folder_reader import Run, read_runs, read_yaml
from syngap.bench.store.layout import CHECKPOINTS, ENVIRONMENT, EXPERIMENT, run_folders
from syngap.bench.store.outcome import Environment
from syngap.bench.store.packed import ENDED, FILES, are_same, is_packed, write_packed
from syngap.bench.store.records import alone_in
from syngap.bench.store.search_record import SEARCH, TRIALS, read_record
from syngap.messages import count_of

__all__ = ["Kept", "SearchKept", "keep", "keep_search", "search_of"]

_TEXT = (".yaml", ".csv", ".json", ".jsonl")
_PARTS = ("stream", *TASKS, "model", "anchors", "training")  # that all runs share


@dataclass(frozen=True)
class Kept:
    """What `keep` did.

    Args:
        runs: names of the runs that were added, or were there with the same content.
        left_out: names of those that have not ended.
        written: how many files are new or changed.
        total: how many runs are there now, those that were kept before too.
    """

    runs: list[str]
    left_out: list[str]
    written: int
    total: int


@dataclass(frozen=True)
class SearchKept:
    """What `keep_search` did.

    Args:
        ended: whether the search has ended.
        runs: how many runs the record has; None where an earlier version wrote it.
        written: how many files are new or changed.
    """

    ended: bool
    runs: int | None
    written: int


def keep(runs: Path, to: Path, *, unfinished: bool = False, replaced: bool = False) -> Kept:
    """Add the runs in `runs` to the packed ones of the same experiment in `to`.

    A method's summaries are kept for the lowest seed of each row: they are by far the largest
    part. Nothing is written unless all of it can be.

    Args:
        runs: the folder that `syngap run` wrote, or packed runs.
        to: where results are kept.
        unfinished: keep failed runs too, and leave out those that have not ended; without it both
            are refused.
        replaced: replace runs and files that are there with another content; without it, a
            UserError, except for failed runs, which another try replaces.
    """
    if runs.resolve() == to.resolve():
        raise UserError(f"{to}: is where the runs are; give another folder")
    found = read_runs(runs)
    _check_finished(runs, found, unfinished)
    left_out = [run for run in found if run.status.state not in ENDED]
    kept = [_portable(run) for run in found if run not in left_out]
    _check_no_links([runs / EXPERIMENT, *(run.path for run in kept)])
    experiment = _read(runs / EXPERIMENT)
    others = {path.relative_to(runs): _content(path) for path in _others(runs, found)}
    make_folder(to, within=to)
    with alone_in(to):
        packed = _packed(to, kept, replaced)
        contents = {to / path: content for path, content in others.items()}
        contents[to / EXPERIMENT] = _experiment(experiment, to, packed)
        written = _put(contents, to, replaced) + write_packed(to, packed)
    added, missing = ([run.path.name for run in each] for each in (kept, left_out))
    return Kept(added, missing, written, len(packed))


def search_of(folder: Path) -> str | None:
    """Return the experiment that `syngap tune` wrote `folder` for, None where it did not."""
    if not (folder / SEARCH).is_file():
        return None
    searched = read_yaml(folder / SEARCH).get("experiment", folder.name)
    return name_of(searched, f"{folder / SEARCH}: experiment")


def keep_search(
    folder: Path, to: Path, *, unfinished: bool = False, replaced: bool = False
) -> SearchKept:
    """Copy the record of a search: how it is made, its trials, and what was chosen.

    Its runs are not needed for that, nor to go on with the search.

    Args:
        folder: the folder that `syngap tune` wrote.
        to: where the search is kept, such as results/NAME/search.
        unfinished: keep one that has not ended; without it, a UserError.
        replaced: write over files that are there with another content; without it, a UserError
            unless they are an earlier record of the same search, or of other rows, which stay.
    """
    # Trials first: where the search goes on meanwhile, search.yaml has all that they refer to.
    found = {name: _content(folder / name) for name in (TRIALS, SEARCH)}
    now, before = read_record(folder), read_record(to)
    ended = "chosen" in read_yaml(folder / SEARCH) if now is None else now.has_ended
    if not ended and not unfinished:
        raise UserError(
            f"{folder}: the search has not ended; syngap tune --resume goes on with it, "
            "--unfinished keeps what it has so far"
        )
    if now and before and now.continues(before):
        replaced = True
        if set(before.rows) - set(now.rows):
            found = now.with_rows_of(before).files()
    written = _put({to / name: content for name, content in found.items()}, to, replaced)
    remove(to / "tuned.yaml", within=to)  # which earlier versions kept; search.yaml has the same
    runs = sum(len(trial.runs) for trial in now.trials.values()) if now else None
    return SearchKept(ended, runs, written)


def _put(contents: dict[Path, bytes], to: Path, replaced: bool) -> int:
    """Write what is not in `to` yet, all or nothing; return how many files that were."""
    for place in contents:
        check_inside(place, to)
    changed = {place: content for place, content in contents.items() if _bytes_in(place) != content}
    others = [place for place in changed if place.exists() and place.name != EXPERIMENT]
    if others and not replaced:
        more = f" ({count_of(len(others) - 1, 'more file')} too)" if len(others) > 1 else ""
        raise UserError(f"{others[0]}: is there with another content{more}; --replace writes over")
    for place, content in changed.items():
        make_folder(place.parent, within=to)
        write(place, content, within=to)
    return len(changed)


def _check_finished(runs: Path, found: Sequence[Run], unfinished: bool) -> None:
    open_ones = [run for run in found if not run.done]
    if open_ones and not unfinished:
        first = f"{open_ones[0].path.name} is {open_ones[0].status.state or 'not begun'}"
        others = count_of(len(open_ones) - 1, "more run")
        more = f" ({others} unfinished)" if len(open_ones) > 1 else ""
        raise UserError(
            f"{runs}: {first}{more}; --unfinished keeps those that failed and leaves out the rest"
        )
    if all(not run.done for run in found):
        raise UserError(f"{runs}: no run has finished")


def _packed(to: Path, kept: Sequence[Run], replaced: bool) -> list[Run]:
    """Return the runs that are to be in `to`: those that are there and those that are added."""
    there = {(run.row, run.seed): run for run in _there(to)}
    added = {(run.row, run.seed): run for run in kept}
    lowest: dict[str, int] = {}
    for row, seed in (*there, *added):
        lowest[row] = min(seed, lowest.get(row, seed))

    def shortened(run: Run) -> Run:
        return run if run.seed == lowest[run.row] else replace(run, summaries={})

    others = [
        run
        for key, run in added.items()
        if key in there
        and there[key].done  # a failed run that was done again is replaced
        and not are_same(shortened(run), shortened(there[key]))
    ]
    if others and not replaced:
        more = f" ({count_of(len(others) - 1, 'more run')} too)" if len(others) > 1 else ""
        name = others[0].path.name
        raise UserError(f"{to}: {name} is there with another content{more}; --replace writes over")
    return [shortened(run) for run in {**there, **added}.values()]


def _there(to: Path) -> list[Run]:
    """Return the runs that were kept before; UserError where `to` holds something else."""
    if is_packed(to):
        return read_runs(to)
    if not (to / EXPERIMENT).is_file():
        inside = sorted(path.name for path in to.iterdir() if path.name != "search")
        if inside:
            raise UserError(f"{to}: holds other things ({inside[0]}) and no runs; give another")
    if folders := run_folders(to):
        raise UserError(
            f"{to}: holds run folders ({folders[0].name}) and results are packed; "
            f"`syngap keep {to} OTHER` packs them in another folder"
        )
    return []


def _portable(run: Run) -> Run:
    with reading(run.path):
        return replace(run, environment=_published(run.environment))


def _published(environment: Environment) -> Environment:
    """Return an environment whose command names no folder of this machine."""
    if "command" not in environment.entries:
        return environment
    if environment.command is None:  # what else it may be, nobody could make publishable
        raise ValueError(f"command is {environment.entries['command']!a:.80}, expected text")
    return environment.with_command(shlex.join(portable(shlex.split(environment.command))))


def _check_no_links(paths: Iterable[Path]) -> None:
    """Refuse links in what is to be kept: they could lead to what is not to be published."""
    for path in paths:
        for inner in (path, *(sorted(path.iterdir()) if path.is_dir() else ())):
            if inner.is_symlink():
                raise UserError(
                    f"{inner}: is a link, and what it leads to is not published; "
                    "remove it, or put the file itself there"
                )


def _others(runs: Path, found: Sequence[Run]) -> list[Path]:
    """Return texts that are no run's: those of landscapes and searches."""
    ours = {runs / EXPERIMENT, *(runs / name for name in FILES)}
    folders = {run.path for run in found}
    return sorted(
        path
        for path in runs.rglob("*")
        if path.suffix in _TEXT
        and path.is_file()
        and not path.is_symlink()  # which could lead to what is not to be published
        and path not in ours
        and not folders.intersection(path.parents)
        and not any(
            part == CHECKPOINTS or part.startswith(".") for part in path.relative_to(runs).parts
        )
    )


def _content(path: Path) -> bytes:
    with reading(path):
        content = text_in(path, LARGE)
        if path.name == ENVIRONMENT:
            found = _published(Environment(json.loads(content)))
            content = json.dumps(found.as_mapping(), indent=2, ensure_ascii=False) + "\n"
        return content.encode()


def _experiment(ours: AnyExperiment, to: Path, packed: Sequence[Run]) -> bytes:
    """Return experiment.yaml with the rows and seeds that have runs, in the order that ships."""
    path = to / EXPERIMENT
    ours = _only(ours, packed)
    if path.exists():
        ours = _merged(ours, _only(_read(path), packed), path)
    if is_shipped(ours.name):
        order = list(read(ours.name).get("methods", ()))
        place = {row: number for number, row in enumerate(order)}
        names = sorted(ours.methods, key=lambda row: place.get(row, len(order)))
        ours = replace(ours, methods={row: ours.methods[row] for row in names})
    return yaml.safe_dump(ours.as_mapping(), sort_keys=False, allow_unicode=True).encode()


def _only(experiment: AnyExperiment, runs: Sequence[Run]) -> AnyExperiment:
    """Return an experiment with the rows and seeds of these runs alone."""
    rows, seeds = {run.family for run in runs}, {run.seed for run in runs}
    return replace(
        experiment,
        methods={row: method for row, method in experiment.methods.items() if row in rows},
        seeds=[seed for seed in experiment.seeds if seed in seeds],
    )


def _read(path: Path) -> AnyExperiment:
    try:
        return parse_experiment(with_earlier_defaults(read_yaml(path)))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _merged(ours: AnyExperiment, before: AnyExperiment, path: Path) -> AnyExperiment:
    shared = [row for row in ours.methods if row in before.methods]
    if before.name != ours.name:
        raise _other_value(path, "name", before.name, ours.name)
    was, is_now = before.as_mapping(), ours.as_mapping()
    parts = [
        *((part, was.get(part, {}), is_now[part]) for part in _PARTS if part in is_now),
        *((f"methods.{row}", was["methods"][row], is_now["methods"][row]) for row in shared),
    ]
    for name, old, new in parts:
        for key in new:
            if old.get(key) != new[key]:
                raise _other_value(path, f"{name}.{key}", old.get(key), new[key])
    return replace(
        ours,
        methods={**before.methods, **ours.methods},
        seeds=sorted({*before.seeds, *ours.seeds}),
    )


def _other_value(path: Path, name: str, old: Value, new: Value) -> UserError:
    return UserError(f"{path}: {name} is {shown(old)} there and {shown(new)} in the runs")


def _bytes_in(place: Path) -> bytes | None:
    return read_bytes(place, LARGE) if place.is_file() else None
