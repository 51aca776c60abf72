"""Metrics of a run: pure functions of the accuracy matrix and of the evaluations during training.

R[i][j] is the accuracy in percent on task j after the last sample of task i: T rows, T columns. A
joint run learns every task at once and has a single row. Of an unfinished run, whose R has k < T
rows, cut out what is known first: `[row[:k] for row in R]`.

Nothing here changes its arguments. What is not defined (the forgetting of a single task, anything
about the order of tasks in a joint run) is None, never 0 and never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import TypeAlias

from syngap.messages import count_of

__all__ = [
    "Evaluation",
    "Matrix",
    "accuracy",
    "anytime_accuracy",
    "backward_transfer",
    "drop_after_switch",
    "forgetting",
    "forward_transfer",
    "intransigence",
    "mean_and_spread",
    "recency",
    "reference_of",
    "summarise",
    "worst_after_switch",
]

Matrix: TypeAlias = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Evaluation:
    """The test accuracy at one moment of a run. A run's evaluations, in order, are its record.

    Args:
        step: steps of training done so far, over the whole run; 0 is before the first.
        task: index, from 0, of the task whose samples were just learned. In a joint run it is the
            last task throughout, since every task has been seen.
        end: whether this was the last step of that task.
        accuracy: accuracy in percent on each of the T tasks, those not yet seen included.
        newest: share in percent of predictions, on the test samples of the tasks seen so far, that
            fall on classes of the newest task; None where a task brings no classes of its own.
    """

    step: int
    task: int
    end: bool
    accuracy: tuple[float, ...]
    newest: float | None = None

    def __post_init__(self) -> None:
        _check_finite("accuracy", self.accuracy)
        if self.newest is not None:
            _check_finite("newest", [self.newest])
        if self.step < 0:
            raise ValueError(f"step is {self.step}; steps are counted from 0")
        if not 0 <= self.task < len(self.accuracy):
            raise ValueError(
                f"task is {self.task} of {count_of(len(self.accuracy), 'task')}, counted from 0"
            )


def accuracy(R: Matrix) -> float:
    """Return ACC: how good the model is in the end, averaged over tasks.

        ACC = mean_j R[T-1][j]

    Examples:
        >>> accuracy([[90, 0], [70, 80]])
        75.0
    """
    _tasks(R)
    return fmean(R[-1])


def forgetting(R: Matrix) -> float | None:
    """Return FM: how far tasks fell below their best (Chaudhry et al. 2018).

        FM = mean_{j < T-1} ( max_{i < T-1} R[i][j] - R[T-1][j] )

    The best is taken over every row but the last, those before task j was learned included, as
    Chaudhry's max over l in {1, ..., k-1} says. Without the last row FM can be negative, which it
    is when tasks end above all they had reached before.

    Examples:
        >>> forgetting([[90, 0], [70, 80]])
        20.0
    """
    last = _tasks(R) - 1
    if len(R) == 1:
        return None
    return fmean(max(row[j] for row in R[:last]) - R[last][j] for j in range(last))


def intransigence(R: Matrix, reference: Sequence[float]) -> float | None:
    """Return INT: how far tasks, when just learned, stay below the reference.

        INT = mean_k ( reference[k] - R[k][k] )

    Args:
        R: accuracy matrix of the run.
        reference: accuracy by task of a model that was given the tasks together: `reference_of`.

    Examples:
        >>> intransigence([[90, 0], [70, 80]], reference=[95, 95])
        10.0
    """
    tasks = _tasks(R)
    _check_length("reference", reference, tasks)
    if len(R) < tasks:
        return None
    return fmean(reference[k] - R[k][k] for k in range(tasks))


def reference_of(R: Matrix) -> tuple[float, ...]:
    """Return the reference for `intransigence` from the R of a joint run.

    A single row is one model trained on everything, as in the SynGAP paper. A square R is a model
    retrained after each task k on the tasks up to k; its diagonal is Chaudhry's reference.

    Examples:
        >>> reference_of([[95, 85]])
        (95, 85)
        >>> reference_of([[97, 0], [95, 85]])
        (97, 85)
    """
    tasks = _tasks(R)
    return tuple(R[0]) if len(R) < tasks else tuple(R[k][k] for k in range(tasks))


def backward_transfer(R: Matrix) -> float | None:
    """Return BWT: what later tasks did to earlier ones (Lopez-Paz and Ranzato 2017).

        BWT = mean_{j < T-1} ( R[T-1][j] - R[j][j] )

    Examples:
        >>> backward_transfer([[90, 0], [70, 80]])
        -20.0
    """
    last = _tasks(R) - 1
    if len(R) == 1:
        return None
    return fmean(R[last][j] - R[j][j] for j in range(last))


def forward_transfer(R: Matrix, initial: Sequence[float]) -> float | None:
    """Return FWT: what earlier tasks did for one not yet seen (Lopez-Paz and Ranzato 2017).

        FWT = mean_{k >= 1} ( R[k-1][k] - initial[k] )

    Args:
        R: accuracy matrix of the run.
        initial: accuracy by task before the first step.

    Examples:
        >>> forward_transfer([[90, 15], [70, 80]], initial=[10, 10])
        5.0
    """
    tasks = _tasks(R)
    _check_length("initial", initial, tasks)
    if len(R) == 1:
        return None
    return fmean(R[k - 1][k] - initial[k] for k in range(1, tasks))


def anytime_accuracy(record: Sequence[Evaluation]) -> float | None:
    """Return the accuracy on the tasks seen so far, averaged over the steps of the run.

        anytime = sum_n (s_n - s_{n-1}) a_n / s_N,   a_n = mean_{j <= task_n} accuracy_n[j]

    s_n is the step of evaluation n and s_0 = 0. Each evaluation stands for the steps since the one
    before it, so evaluations at task ends that break the rhythm do not count twice, and one before
    the first step does not count. With an evaluation after every step it is the plain mean over
    evaluations that goes by the name of average anytime accuracy (AAA).

    Examples:
        >>> anytime_accuracy(
        ...     [
        ...         Evaluation(step=30, task=0, end=True, accuracy=(90, 0)),
        ...         Evaluation(step=40, task=1, end=True, accuracy=(50, 50)),
        ...     ]
        ... )
        80.0
    """
    _check_order(record)
    if not record or not record[-1].step:
        return None
    steps = [0, *(evaluation.step for evaluation in record)]
    spans = (after - before for before, after in pairwise(steps))
    seen = (fmean(evaluation.accuracy[: evaluation.task + 1]) for evaluation in record)
    return math.fsum(span * mean for span, mean in zip(spans, seen, strict=True)) / steps[-1]


def worst_after_switch(record: Sequence[Evaluation]) -> float | None:
    """Return min-ACC: how low tasks ever fell once they were over (De Lange et al. 2023).

        worst = mean_j min_n accuracy_n[j]   over evaluations n after the last step of task j

    j runs over the tasks that were followed by another. The value depends on how often the run was
    evaluated: the dip after a switch is short, and evaluations at task ends alone do not see it.

    Examples:
        >>> worst_after_switch(
        ...     [
        ...         Evaluation(step=30, task=0, end=True, accuracy=(90, 0)),
        ...         Evaluation(step=31, task=1, end=False, accuracy=(40, 20)),
        ...         Evaluation(step=60, task=1, end=True, accuracy=(70, 80)),
        ...     ]
        ... )
        40.0
    """
    falls = _falls(record)
    return fmean(lowest for _, lowest in falls) if falls else None


def drop_after_switch(record: Sequence[Evaluation]) -> float | None:
    """Return how far tasks fell, at the worst, from where they stood when they ended.

        drop = mean_j ( accuracy_e(j)[j] - min_n accuracy_n[j] )

    e(j) is the evaluation at the end of task j; n and j run as in `worst_after_switch`. What the
    task never won back is part of the drop.

    Examples:
        >>> drop_after_switch(
        ...     [
        ...         Evaluation(step=30, task=0, end=True, accuracy=(90, 0)),
        ...         Evaluation(step=31, task=1, end=False, accuracy=(40, 20)),
        ...         Evaluation(step=60, task=1, end=True, accuracy=(70, 80)),
        ...     ]
        ... )
        50.0
    """
    falls = _falls(record)
    return fmean(stood - lowest for stood, lowest in falls) if falls else None


def recency(record: Sequence[Evaluation]) -> float | None:
    """Return how many predictions fall on the newest task's classes when a task ends.

        recency = mean_{k >= 1} newest at the end of task k

    With tests of equal size an unbiased model gives 100 / (k + 1) at the end of task k: on average
    21.4 over ten tasks. 100 means that the model answers nothing but the newest classes.

    Examples:
        >>> recency(
        ...     [
        ...         Evaluation(step=30, task=0, end=True, accuracy=(90, 0), newest=100),
        ...         Evaluation(step=60, task=1, end=True, accuracy=(70, 80), newest=60),
        ...     ]
        ... )
        60.0
    """
    _check_order(record)
    # By place and not by task: the only end of a joint run is its last task's.
    shares = [evaluation.newest for evaluation in record if evaluation.end][1:]
    known = [share for share in shares if share is not None]
    return fmean(known) if known and len(known) == len(shares) else None


def summarise(
    R: Matrix,
    record: Sequence[Evaluation] = (),
    reference: Sequence[float] | None = None,
    initial: Sequence[float] | None = None,
) -> dict[str, float | None]:
    """Return every metric of a finished run under its short name.

    Args:
        R: accuracy matrix of the run.
        record: its evaluations; without them anytime, worst and recency are None.
        reference: what INT is measured against, from `reference_of`; without it INT is None.
        initial: accuracy by task before the first step; without it FWT is None.

    Examples:
        >>> summarise([[90, 15], [70, 80]], reference=[95, 95])
        ... # doctest: +NORMALIZE_WHITESPACE
        {'ACC': 75.0, 'FM': 20.0, 'INT': 10.0, 'BWT': -20.0, 'FWT': None,
         'anytime': None, 'worst': None, 'recency': None}
    """
    _check_same_run(R, record)
    return {
        "ACC": accuracy(R),
        "FM": forgetting(R),
        "INT": None if reference is None else intransigence(R, reference),
        "BWT": backward_transfer(R),
        "FWT": None if initial is None else forward_transfer(R, initial),
        "anytime": anytime_accuracy(record),
        "worst": worst_after_switch(record),
        "recency": recency(record),
    }


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (n - 1), None for a single value.

    Examples:
        >>> mean_and_spread([1, 2, 3])
        (2.0, 1.0)
        >>> mean_and_spread([5])
        (5.0, None)
    """
    _check_finite("values", values)
    return fmean(values), stdev(values) if len(values) > 1 else None


def _falls(record: Sequence[Evaluation]) -> list[tuple[float, float]]:
    """Return accuracy at its end, and lowest later, of each task that another one followed."""
    _check_order(record)
    return [
        (over.accuracy[over.task], min(later.accuracy[over.task] for later in record[place:]))
        for place, over in enumerate(record[:-1], start=1)
        if over.end
    ]


def _tasks(R: Matrix) -> int:
    """Return the number of tasks, or say what is wrong with R."""
    widths = [len(row) for row in R]
    if not any(widths):
        raise ValueError("R is empty; it has a row after each task and a column for each task")
    if len(set(widths)) > 1:
        raise ValueError(f"the rows of R differ in length: {widths}")
    rows, tasks = len(widths), widths[0]
    if rows not in (1, tasks):
        raise ValueError(
            f"R has {count_of(rows, 'row')} for {count_of(tasks, 'task')}; give a row after each "
            f"task, or the one row of a joint run (of an unfinished run: [row[:{rows}] for row "
            "in R])"
        )
    for place, row in enumerate(R):
        _check_finite(f"R[{place}]", row)
    return tasks


def _check_finite(name: str, values: Iterable[float]) -> None:
    values = list(values)
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"{name} is {values}; it holds one finite number or more")


def _check_length(name: str, values: Sequence[float], tasks: int) -> None:
    _check_finite(name, values)
    if len(values) != tasks:
        raise ValueError(
            f"{name} has {count_of(len(values), 'value')}, R has {count_of(tasks, 'task')}"
        )


def _check_order(record: Sequence[Evaluation]) -> None:
    for before, after in pairwise(record):
        if len(after.accuracy) != len(before.accuracy):
            numbers = f"{count_of(len(before.accuracy), 'task')}, then {len(after.accuracy)}"
            raise ValueError(f"the record has evaluations of {numbers}")
        # The task after one that ended is a later one.
        if after.step <= before.step or after.task < before.task + before.end:
            raise ValueError(f"the record is out of order: {before}, then {after}")


def _check_same_run(R: Matrix, record: Sequence[Evaluation]) -> None:
    tasks = _tasks(R)
    if record and (len(record[-1].accuracy), record[-1].task) != (tasks, tasks - 1):
        raise ValueError(
            f"R has {count_of(tasks, 'task')}, but the record ends in task {record[-1].task} "
            f"(counted from 0) of {len(record[-1].accuracy)}; give R and record of the same "
            "finished run"
        )
