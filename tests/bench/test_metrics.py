"""Every metric is its definition: by hand, and against the same formulas written for arrays."""

from __future__ import annotations

import copy
import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from syngap.bench.metrics import (
    Evaluation,
    accuracy,
    anytime_accuracy,
    backward_transfer,
    drop_after_switch,
    forgetting,
    forward_transfer,
    intransigence,
    mean_and_spread,
    recency,
    reference_of,
    summarise,
    worst_after_switch,
)

Rows = list[list[float]]

R: Rows = [
    [90, 12, 30],
    [60, 80, 14],
    [66, 50, 70],
]
RECORD = [
    Evaluation(10, 0, False, (70, 10, 10), newest=100),
    Evaluation(25, 0, True, (90, 12, 30), newest=100),
    Evaluation(30, 1, False, (20, 60, 12), newest=90),
    Evaluation(50, 1, True, (60, 80, 14), newest=70),
    Evaluation(51, 2, False, (30, 10, 66), newest=95),
    Evaluation(75, 2, True, (66, 50, 70), newest=50),
]
JOINT_RECORD = [
    Evaluation(10, 2, False, (30, 40, 50)),
    Evaluation(20, 2, True, (60, 70, 80), newest=33),
]


def test_metrics_of_a_matrix_are_what_a_hand_computes() -> None:
    # ACC = (66 + 50 + 70) / 3
    assert accuracy(R) == 62
    # task 0: max(90, 60) - 66 = 24;  task 1: max(12, 80) - 50 = 30;  FM = (24 + 30) / 2
    assert forgetting(R) == 27
    # (95 - 90) + (85 - 80) + (65 - 70) = 5, over 3 tasks
    assert intransigence(R, [95, 85, 65]) == pytest.approx(5 / 3)
    # (66 - 90) + (50 - 80) = -54, over 2 tasks
    assert backward_transfer(R) == -27
    # (12 - 9) + (14 - 10) = 7, over 2 tasks; the 30 is two tasks ahead and does not count
    assert forward_transfer(R, [8, 9, 10]) == 3.5


def test_metrics_of_a_record_are_what_a_hand_computes() -> None:
    # seen so far: 70, 90 | (20+60)/2 = 40, (60+80)/2 = 70 | (30+10+66)/3 = 106/3, 186/3 = 62
    # steps since: 10, 15 | 5, 20 | 1, 24
    # 700 + 1350 + 200 + 1400 + 106/3 + 1488 = 5138 + 106/3, over 75 steps
    assert anytime_accuracy(RECORD) == pytest.approx((5138 + 106 / 3) / 75)
    # task 0: min(20, 60, 30, 66) = 20;  task 1: min(10, 50) = 10
    assert worst_after_switch(RECORD) == 15
    # (90 - 20) + (80 - 10) = 140, over 2 tasks
    assert drop_after_switch(RECORD) == 70
    # ends of task 1 and 2: 70 and 50
    assert recency(RECORD) == 60


def test_the_best_of_a_task_may_come_before_it_was_learned() -> None:
    # task 1: max(75, 60) - 50 = 25, though right after it was learned it stood at 60
    assert forgetting([[90, 75, 0], [90, 60, 0], [90, 50, 80]]) == pytest.approx(25 / 2)


def test_forgetting_leaves_out_the_last_row_and_so_can_be_negative() -> None:
    assert forgetting([[60, 0], [80, 70]]) == -20


def test_the_reference_of_a_joint_run_is_its_row_or_its_diagonal() -> None:
    assert reference_of([[95, 85, 75]]) == (95, 85, 75)
    assert reference_of([[97, 1, 2], [3, 87, 4], [5, 6, 77]]) == (97, 87, 77)
    assert reference_of([[97]]) == (97,)


def test_what_is_not_defined_is_none() -> None:
    single: Rows = [[80]]
    assert accuracy(single) == 80
    assert forgetting(single) is backward_transfer(single) is forward_transfer(single, [1]) is None
    assert intransigence(single, [90]) == 10

    joint: Rows = [[80, 70, 60]]
    assert accuracy(joint) == 70
    assert forgetting(joint) is backward_transfer(joint) is None
    assert forward_transfer(joint, [1, 1, 1]) is intransigence(joint, [90, 90, 90]) is None

    for metric in (anytime_accuracy, worst_after_switch, drop_after_switch, recency):
        assert metric([]) is None
    assert anytime_accuracy([Evaluation(0, 0, False, (1, 2))]) is None
    within_the_first_task = RECORD[:2]
    assert worst_after_switch(within_the_first_task) is recency(within_the_first_task) is None
    assert drop_after_switch(within_the_first_task) is None


def test_recency_needs_every_end() -> None:
    assert recency([*RECORD[:-1], replace(RECORD[-1], newest=None)]) is None
    only_ends = [replace(e, newest=e.newest if e.end else None) for e in RECORD]
    assert recency(only_ends) == 60


def test_fair_recency_over_ten_tasks_is_what_the_docstring_says() -> None:
    fair = [Evaluation(k + 1, k, True, (0.0,) * 10, newest=100 / (k + 1)) for k in range(10)]
    assert recency(fair) == pytest.approx(21.4, abs=0.05)


def test_a_joint_run_has_an_anytime_accuracy_and_no_switch() -> None:
    values = summarise([[60, 70, 80]], JOINT_RECORD, reference=[60, 70, 80], initial=[1, 1, 1])
    # (30+40+50)/3 = 40 for 10 steps, 70 for 10 steps
    assert values.pop("ACC") == 70
    assert values.pop("anytime") == 55
    assert set(values.values()) == {None}


def test_an_evaluation_more_at_the_same_accuracy_changes_nothing() -> None:
    once = [Evaluation(10, 0, False, (40, 0)), Evaluation(30, 0, True, (70, 0))]
    more = [once[0], Evaluation(17, 0, False, (70, 0)), once[1]]
    before = [Evaluation(0, 0, False, (5, 5)), *once]
    assert anytime_accuracy(once) == anytime_accuracy(more) == anytime_accuracy(before) == 60


def test_summarise_gives_every_metric_under_its_name() -> None:
    reference, initial = [95, 85, 65], [8, 9, 10]
    assert summarise(R, RECORD, reference, initial) == {
        "ACC": accuracy(R),
        "FM": forgetting(R),
        "INT": intransigence(R, reference),
        "BWT": backward_transfer(R),
        "FWT": forward_transfer(R, initial),
        "anytime": anytime_accuracy(RECORD),
        "worst": worst_after_switch(RECORD),
        "recency": recency(RECORD),
    }
    missing = {key for key, value in summarise(R).items() if value is None}
    assert missing == {"INT", "FWT", "anytime", "worst", "recency"}


def test_mean_and_spread_is_the_sample_standard_deviation() -> None:
    # mean 4, squares 9 + 1 + 0 + 16 = 26, over n - 1 = 3
    assert mean_and_spread([1, 3, 4, 8]) == pytest.approx((4, math.sqrt(26 / 3)))
    assert mean_and_spread([7]) == (7, None)
    assert mean_and_spread([0.1] * 5)[1] == 0


BAD_MATRICES: dict[str, tuple[Rows, str]] = {
    "no rows": ([], "R is empty"),
    "no columns": ([[], []], "R is empty"),
    "ragged": ([[1, 2], [3]], r"differ in length: \[2, 1\]"),
    "unfinished": ([[1, 2, 3], [4, 5, 6]], r"2 rows for 3 tasks.*row\[:2\]"),
    "too long": ([[1, 2], [3, 4], [5, 6]], "3 rows for 2 tasks"),
    "not a number": ([[1, 2], [math.nan, 4]], r"R\[1\] is \[nan, 4\]"),
}


@pytest.mark.parametrize(("rows", "message"), BAD_MATRICES.values(), ids=BAD_MATRICES)
@pytest.mark.parametrize(
    "metric",
    [
        accuracy,
        forgetting,
        backward_transfer,
        reference_of,
        summarise,
        lambda rows: intransigence(rows, [1, 2]),
        lambda rows: forward_transfer(rows, [1, 2]),
    ],
)
def test_a_matrix_of_the_wrong_shape_is_refused(metric: Any, rows: Rows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric(rows)


def test_a_vector_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="reference has 2 values, R has 3 tasks"):
        intransigence(R, [1, 2])
    with pytest.raises(ValueError, match="initial has 4 values, R has 3 tasks"):
        forward_transfer(R, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="reference is"):
        intransigence([[1, 2]], [1, math.inf])  # met at the door, though INT is None here
    with pytest.raises(ValueError, match=r"values is \[\]"):
        mean_and_spread([])


BAD_RECORDS: dict[str, list[Evaluation]] = {
    "same step": [RECORD[0], replace(RECORD[1], step=10)],
    "backwards in steps": [RECORD[1], RECORD[0]],
    "backwards in tasks": [RECORD[2], replace(RECORD[2], step=40, task=0)],
    "goes on after the end": [RECORD[1], replace(RECORD[0], step=26)],
    "another number of tasks": [RECORD[0], Evaluation(11, 0, False, (1, 2))],
}


@pytest.mark.parametrize("record", BAD_RECORDS.values(), ids=BAD_RECORDS)
@pytest.mark.parametrize(
    "metric", [anytime_accuracy, worst_after_switch, drop_after_switch, recency]
)
def test_a_record_out_of_order_is_refused(metric: Any, record: list[Evaluation]) -> None:
    with pytest.raises(ValueError, match="record"):
        metric(record)


def test_matrix_and_record_of_different_runs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"R has 2 tasks, but .* task 2 .* of 3"):
        summarise([[1, 2], [3, 4]], RECORD)
    with pytest.raises(ValueError, match=r"R has 3 tasks, but .* task 1 .* of 3"):
        summarise(R, RECORD[:4])


@pytest.mark.parametrize(
    "changes",
    [{"step": -1}, {"task": 3}, {"task": -1}, {"accuracy": ()}, {"newest": math.nan}],
    ids=str,
)
def test_an_evaluation_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(RECORD[0], **changes)


def test_an_evaluation_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        RECORD[0].step = 3  # type: ignore[misc]


# From here on against arrays. Two decimals, as a percentage of test samples has few.
percent = st.integers(0, 10_000).map(lambda n: n / 100)


@st.composite
def matrices(draw: st.DrawFn, least: int = 2) -> NDArray[np.float64]:
    tasks = draw(st.integers(least, 6))
    cells = draw(st.lists(percent, min_size=tasks**2, max_size=tasks**2))
    return np.array(cells).reshape(tasks, tasks)


@st.composite
def records(draw: st.DrawFn) -> list[Evaluation]:
    """Some evaluations within each task and one at its end, at uneven steps, cut off anywhere."""
    tasks = draw(st.integers(1, 5))
    record, step = [], 0
    for task in range(tasks):
        within = draw(st.integers(0, 3))
        for place in range(within + 1):
            step += draw(st.integers(1, 9))
            values = tuple(draw(st.lists(percent, min_size=tasks, max_size=tasks)))
            record.append(Evaluation(step, task, place == within, values, draw(percent)))
    return record[: draw(st.integers(1, len(record)))]


@given(matrices())
def test_matrix_metrics_agree_with_arrays(array: NDArray[np.float64]) -> None:
    rows, diagonal = array.tolist(), np.diag(array)
    reference, initial = array[0] + 1, array[-1] / 2
    expected = {
        "ACC": array.mean(axis=1)[-1],
        "FM": (array[:-1].max(axis=0) - array[-1])[:-1].mean(),
        "INT": reference.mean() - np.trace(array) / len(array),
        "BWT": (array[-1] - diagonal)[:-1].mean(),
        "FWT": (np.diag(array, k=1) - initial[1:]).mean(),
    }
    values = summarise(rows, reference=reference.tolist(), initial=initial.tolist())
    assert {key: values[key] for key in expected} == pytest.approx(expected)


@given(records())
def test_record_metrics_agree_with_arrays(record: list[Evaluation]) -> None:
    steps = np.array([e.step for e in record])
    tasks = np.array([e.task for e in record])
    table = np.array([e.accuracy for e in record])
    number = np.arange(table.shape[1])

    # One row a step, each a copy of the next evaluation, unseen tasks blank.
    every_step = np.repeat(
        np.where(number <= tasks[:, None], table, np.nan), np.diff(steps, prepend=0), 0
    )
    assert anytime_accuracy(record) == pytest.approx(np.nanmean(every_step, axis=1).mean())

    lowest = np.where(tasks[:, None] > number, table, np.inf).min(axis=0)[: tasks[-1]]
    ends = np.array([e.end for e in record])
    stood = np.where(ends[:, None] & (tasks[:, None] == number), table, 0).sum(axis=0)[: tasks[-1]]
    if tasks[-1]:
        assert worst_after_switch(record) == pytest.approx(lowest.mean())
        assert drop_after_switch(record) == pytest.approx((stood - lowest).mean())
    else:
        assert worst_after_switch(record) is drop_after_switch(record) is None

    shares = [e.newest for e in record if e.end and e.task > 0 and e.newest is not None]
    assert recency(record) == (pytest.approx(np.mean(shares)) if shares else None)


@given(st.lists(percent, min_size=2, max_size=6))
def test_a_model_that_never_changes_forgets_nothing(row: list[float]) -> None:
    rows = [row] * len(row)
    assert forgetting(rows) == backward_transfer(rows) == forward_transfer(rows, row) == 0
    assert intransigence(rows, row) == 0
    record = [Evaluation(k + 1, k, True, tuple(row)) for k in range(len(row))]
    assert drop_after_switch(record) == 0


@given(matrices(least=3), st.randoms(use_true_random=False))
def test_the_order_of_earlier_tasks_does_not_matter_to_the_means(
    array: NDArray[np.float64], random: Any
) -> None:
    # FWT alone looks at neighbours, and the last task is the last whatever came before it.
    order = list(range(len(array) - 1))
    random.shuffle(order)
    order.append(len(array) - 1)
    renamed, reference = array[order][:, order], array.max(axis=0)
    before = summarise(array.tolist(), reference=reference.tolist())
    after = summarise(renamed.tolist(), reference=reference[order].tolist())
    assert after == pytest.approx(before)


@given(matrices())
def test_forgetting_is_at_least_minus_backward_transfer(array: NDArray[np.float64]) -> None:
    lost, transferred = forgetting(array.tolist()), backward_transfer(array.tolist())
    assert lost is not None
    assert transferred is not None
    assert lost >= -transferred - 1e-9


@given(matrices(), records())
def test_arguments_are_never_changed(array: NDArray[np.float64], record: list[Evaluation]) -> None:
    rows, row = array.tolist(), array[0].tolist()
    given_ = copy.deepcopy((rows, record, row))
    summarise(rows, reference=row, initial=row)
    reference_of(rows)
    mean_and_spread(row)
    for metric in (anytime_accuracy, worst_after_switch, drop_after_switch, recency):
        metric(record)
    assert (rows, record, row) == given_
