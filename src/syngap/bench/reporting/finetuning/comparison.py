"""From the runs of a fine-tuning experiment to what each method learned and forgot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from syngap.bench.config.component import entry
from syngap.bench.errors import UserError
from syngap.bench.finetuning.frontier import (
    as_trained,
    best_new_loss,
    exact_match,
    good_rates,
    held_out_gain,
    relative_forgetting,
    same_start,
)
from syngap.bench.finetuning.model_tasks import TASKS, ModelTask, task_in
from syngap.bench.finetuning.point import Point
from syngap.bench.store.outcome import Run
from syngap.messages import count_of

__all__ = ["BASELINE", "Comparison", "Outcome", "Ratios", "Tried", "compare_methods"]

BASELINE = "adamw"
NAMES = {
    "adamw": "AdamW",
    "corda": "CorDA",
    "crispedit": "CrispEdit",
    "ewc": "EWC",
    "kl": "KL",
    "kronecker_ewc": "Kronecker EWC",
    "l2_sp": "L2-SP",
    "lora": "LoRA",
    "mofo": "MoFO",
    "osf": "OSF",
    "sgd": "SGD",
}
_OTHER = "other losses before the first step"
_SLACK = 1.05  # of AdamW's seconds: times of equal runs differ

Ratios = dict[str, list[float | None]]
"""Numbers by kind of old data, one a seed; mostly forgetting relative to AdamW."""


@dataclass(frozen=True)
class Tried:
    """The points of one method with one seed.

    Args:
        start: the evaluation before the first step.
        by_trial: those after it, by trial, those that are not finite left out.
        rates: the learning rate of each trial.
        diverged: how many were not finite.
    """

    start: Point
    by_trial: Mapping[str, Sequence[Point]]
    rates: Mapping[str, float]
    diverged: int = 0

    @property
    def points(self) -> list[Point]:
        """All points after the start."""
        return [point for points in self.by_trial.values() for point in points]

    @property
    def seconds(self) -> list[float]:
        """The seconds of each whole trial."""
        return [max(p.seconds for p in points) for points in self.by_trial.values() if points]

    def by_rate(self) -> dict[float, list[Point]]:
        """Return the points of each learning rate."""
        found: dict[float, list[Point]] = {}
        for trial, points in self.by_trial.items():
            found.setdefault(self.rates[trial], []).extend(points)
        return {rate: points for rate, points in found.items() if points}


@dataclass(frozen=True)
class Outcome:
    """What a method learned and forgot; lists have a number for each seed.

    Args:
        family: its row.
        method: its name in the registry.
        trials: how many it had with each seed.
        seeds: those of which all trials ended.
        new_losses: the best new loss that it reached, interpolated or not.
        exact: share of right answers on what is learned, where the new loss is lowest; None
            without any.
        old_exact: likewise by old kind.
        gains: what it learned at its best, relative to AdamW.
        trained: forgetting relative to AdamW at equal new loss, weights as trained.
        interpolated: the same, each evaluation with every share of interpolation.
        equal_time: the same, within the seconds of AdamW's longest trial, set-up counted.
        rates: learning rates at which, with every seed, it learns well and forgets little.
        seconds: of a trial, the median.
        memory: largest number of bytes on a GPU; 0 on a CPU.
        diverged: how many evaluations were not finite.
    """

    family: str
    method: str
    trials: int
    seeds: list[int]
    new_losses: list[float]
    exact: list[float | None]
    old_exact: Ratios
    gains: list[float]
    trained: Ratios
    interpolated: Ratios
    equal_time: Ratios
    rates: list[float]
    seconds: float
    memory: int
    diverged: int

    @property
    def label(self) -> str:
        """What a reader sees: the method's name, or its row's where that is another."""
        if self.family != self.method:
            return self.family
        return NAMES.get(self.method, self.method.replace("_", " "))


@dataclass(frozen=True)
class Comparison:
    """What a fine-tuning experiment found.

    Args:
        task: what is compared on.
        new: the name of what is learned.
        old: the kinds of old data, that of the anchors first.
        outcomes: by method, in the order of the experiment.
        tried: the points, by method and seed.
        missing: what is not in these numbers, by method.
    """

    task: ModelTask
    new: str
    old: list[str]
    outcomes: list[Outcome]
    tried: Mapping[str, Mapping[int, Tried]]
    missing: Mapping[str, list[str]]

    @property
    def baseline(self) -> str:
        """The row of AdamW, with which all others are compared."""
        return next(one.family for one in self.outcomes if one.method == BASELINE)


def compare_methods(runs: Sequence[Run]) -> Comparison:
    """Return the comparison of all methods whose trials have ended, seed by seed.

    A seed with which a method began from another start than AdamW is left out.
    """
    tried, missing = _gather(runs)
    methods = {run.family: run.config.method.name for run in runs}
    base = next((family for family in tried if methods[family] == BASELINE), None)
    if base is None:
        raise UserError(
            f"{runs[0].path.parent}: no table yet. It compares every method with {BASELINE}, and "
            f"no seed has all trials of it. Run it into this folder: --methods {BASELINE} --resume"
        )
    first = next(iter(tried[base].values()))
    old = list(first.start.old)
    outcomes = []
    for family, by_seed in tried.items():
        shared = {seed: found for seed, found in by_seed.items() if seed in tried[base]}
        if not shared:
            missing.setdefault(family, []).append(f"{BASELINE} has no seed that it has")
        for seed, found in [*shared.items()]:
            if not same_start(found.start, tried[base][seed].start):
                missing.setdefault(family, []).append(f"seed {seed}: {_OTHER} than {BASELINE}'s")
                del shared[seed]
        if not shared:
            continue
        outcomes.append(_outcome(family, methods[family], shared, tried[base], old))
    task = task_in(runs[0].config.entries) or TASKS["texts"]
    return Comparison(task, _new_name(runs[0], task), old, outcomes, tried, missing)


def _new_name(run: Run, task: ModelTask) -> str:
    source = run.config.entries.get(task.key)
    if not isinstance(source, dict):
        return "new text"
    names = ("path" if task.key == "images" else "new", "name")
    return next((name for key in names if (name := entry(source, key, str))), "new text")


def _gather(runs: Sequence[Run]) -> tuple[dict[str, dict[int, Tried]], dict[str, list[str]]]:
    """Return points by method and seed, and what is left out."""
    groups: dict[str, dict[int, list[Run]]] = {}
    for run in runs:
        groups.setdefault(run.family, {}).setdefault(run.seed, []).append(run)
    tried: dict[str, dict[int, Tried]] = {}
    missing: dict[str, list[str]] = {}
    for family, by_seed in groups.items():
        trials = {run.row for found in by_seed.values() for run in found}
        for seed, found in sorted(by_seed.items()):
            done = [run for run in found if run.done and run.points]
            reason = _reason_to_leave_out(done, len(trials))
            if reason:
                missing.setdefault(family, []).append(f"seed {seed}: {reason}")
                continue
            by_trial = {run.row: _finite(run) for run in done}
            rates = {run.row: _rate(run) for run in done}
            diverged = sum(not point.is_finite for run in done for point in run.points)
            start = done[0].points[0]
            tried.setdefault(family, {})[seed] = Tried(start, by_trial, rates, diverged)
    return tried, missing


def _reason_to_leave_out(done: Sequence[Run], trials: int) -> str:
    """Return why the trials of a method that ended with one seed say nothing, "" where they do."""
    if len(done) < trials:
        return f"{len(done)} of {count_of(trials, 'trial')} ended"
    start, *others = (run.points[0] for run in done)
    if not start.is_finite or not any(map(_finite, done)):
        return "no evaluation was finite"
    return "" if all(same_start(start, other) for other in others) else f"{_OTHER} in some trials"


def _finite(run: Run) -> list[Point]:
    return [point for point in run.points[1:] if point.is_finite]


def _rate(run: Run) -> float:
    return float(entry(run.config.method.options, "lr", float, int) or 0.0)


def _outcome(
    family: str,
    method: str,
    by_seed: Mapping[int, Tried],
    base: Mapping[int, Tried],
    old: Sequence[str],
) -> Outcome:
    def ratios(choose: Callable[[Tried, Tried], list[Point]]) -> Ratios:
        return {
            kind: [
                relative_forgetting(
                    choose(found, base[seed]), as_trained(base[seed].points), found.start, kind
                )
                for seed, found in by_seed.items()
            ]
            for kind in old
        }

    gains = [
        held_out_gain(found.points, found.start)
        / held_out_gain(as_trained(base[seed].points), found.start)
        for seed, found in by_seed.items()
    ]
    good = [
        good_rates(found.by_rate(), as_trained(base[seed].points), found.start, old[0])
        for seed, found in by_seed.items()
    ]
    return Outcome(
        family,
        method,
        trials=max(len(found.by_trial) for found in by_seed.values()),
        seeds=list(by_seed),
        new_losses=[best_new_loss(found.points) for found in by_seed.values()],
        exact=[exact_match(found.points) for found in by_seed.values()],
        old_exact={
            kind: [exact_match(found.points, kind) for found in by_seed.values()] for kind in old
        },
        gains=gains,
        trained=ratios(lambda ours, theirs: as_trained(ours.points)),
        interpolated=ratios(lambda ours, theirs: ours.points),
        equal_time=ratios(
            lambda ours, theirs: [
                point for point in ours.points if point.seconds <= _SLACK * max(theirs.seconds)
            ]
        ),
        rates=sorted(set(good[0]).intersection(*good[1:])),
        seconds=median(each for found in by_seed.values() for each in found.seconds),
        memory=max(point.memory for found in by_seed.values() for point in found.points),
        diverged=sum(found.diverged for found in by_seed.values()),
    )
