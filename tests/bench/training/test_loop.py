"""The loop measures when it says, by the right numbers, and goes on after any interruption."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import assert_identical
from learning import (
    CLASSES,
    beginning,
    learner,
    made,
    numbered,
    parts,
    picture_tasks,
    pictures,
    weights,
)
from notebook import Interrupted, Notebook
from torch import Tensor, nn

from syngap.bench.methods import Learner, Method
from syngap.bench.metrics import Evaluation
from syngap.bench.streams import Batch, InMemory, Split, Stream, Tasks
from syngap.bench.training import train
from syngap.bench.training.checkpoint import pack, unpack


def run(case: str, stream: Stream, **options: Any) -> tuple[Method, Notebook]:
    journal = Notebook()
    return train(stream, beginning(case, stream), journal, **options), journal


# When ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1, 2, 3, 4, 100])
def test_it_measures_before_the_first_step_at_every_kth_and_at_the_end_of_tasks(every: int) -> None:
    stream = pictures(epochs=2)
    _, journal = run("sgd", stream, evaluate_every=every)
    due = {0, *stream.ends, *(range(0, len(stream), every) if every else ())}
    assert [evaluation.step for evaluation in journal.evaluations] == sorted(due)
    for evaluation in journal.evaluations:
        assert evaluation.end == (evaluation.step in stream.ends)
        assert evaluation.task == sum(end < evaluation.step for end in stream.ends)


def test_every_step_is_told_once_and_every_task_is_kept() -> None:
    stream = pictures()
    _, journal = run("sgd", stream)
    assert journal.steps == list(range(1, len(stream) + 1))
    assert journal.saved == stream.ends


def test_it_keeps_where_the_journal_wants_it_to_and_never_twice() -> None:
    stream, journal = pictures(), Notebook(keep_every=2)
    train(stream, beginning("sgd", stream), journal)
    assert journal.saved == sorted({*stream.ends, *range(2, len(stream) + 1, 2)})


def test_measuring_makes_no_difference_to_what_is_learned() -> None:
    stream = pictures()
    often, _ = run("syngap", stream, evaluate_every=1)
    seldom, _ = run("syngap", stream)
    assert_identical(weights(often), weights(seldom))


@pytest.mark.parametrize("case", ["er", "syngap", "derpp", "ewcpp"])
def test_what_is_learned_first_knows_nothing_of_later_tasks(case: str) -> None:
    """Neither their number, nor their samples, nor how the network does on them."""
    states = []
    for order in ((0, 0, 1, 1, 2, 2), (0, 0, 2, 3, 1, 1)):
        stream, journal = Stream(picture_tasks(tasks=order), batch=3), FirstTask()
        with pytest.raises(Interrupted):
            train(stream, beginning(case, stream), journal)
        kept = journal.load()
        assert kept is not None
        states.append({name: kept[name] for name in ("step", "method", "random")})
    assert_identical(*states)


class FirstTask(Notebook):
    def save(self, state: dict[str, Any]) -> None:
        super().save(state)
        raise Interrupted


def test_the_network_learns_in_training_mode_and_is_left_in_it() -> None:
    modes: list[bool] = []

    class Watched(Notebook):
        def record(self, evaluation: Evaluation, summary: Mapping[str, float]) -> None:
            modes.append(method.learner.model.training)

    stream = pictures()
    method = made("er", learner(stream))
    assert train(stream, lambda: method, Watched(), evaluate_every=1) is method
    assert modes
    assert all(modes)
    assert method.learner.model.training


def test_a_method_speaks_for_itself_at_every_measurement() -> None:
    stream = pictures()
    begin, journal = beginning("syngap", stream), Notebook()
    method = train(stream, begin, journal, evaluate_every=2)
    assert journal.told[0][1] == begin().summary()
    assert journal.told[-1][1] == method.summary() != journal.told[0][1]
    assert all(summary for _, summary in journal.told)


# What ---------------------------------------------------------------------------------------------


def by_hand(pupil: Learner, tasks: Tasks, upto: int) -> tuple[list[float], float]:
    """Accuracy by task and recency in percent, sample by sample."""
    task_of = {
        int(label): int(task)
        for label, task in zip(tasks.train.labels, tasks.train.task, strict=True)
    }
    right, total = [0] * tasks.count, [0] * tasks.count
    newest, seen = 0, 0
    for row in range(len(tasks.test.labels)):
        logits = pupil.evaluate(tasks.test.samples.take(torch.tensor([row])))[0].tolist()
        guess = max(range(len(logits)), key=logits.__getitem__)
        task = int(tasks.test.task[row])
        total[task] += 1
        right[task] += guess == int(tasks.test.labels[row])
        if task <= upto:
            seen += 1
            newest += task_of.get(guess) == upto
    return [100 * r / n for r, n in zip(right, total, strict=True)], 100 * newest / seen


class Judge(Notebook):
    """Counts by hand at every measurement."""

    pupil: Learner
    tasks: Tasks
    task: int | None = None

    def record(self, evaluation: Evaluation, summary: Mapping[str, float]) -> None:
        super().record(evaluation, summary)
        task = evaluation.task if self.task is None else self.task
        accuracy, newest = by_hand(self.pupil, self.tasks, task)
        assert list(evaluation.accuracy) == pytest.approx(accuracy, abs=1e-9)
        assert evaluation.newest == pytest.approx(newest, abs=1e-9)


def test_accuracy_and_recency_are_what_counting_gives() -> None:
    tasks = picture_tasks(tasks=(1, 0, 0, 2, 1, 1))  # of different sizes
    stream = Stream(tasks, batch=3, epochs=3)
    method, judge = made("sgdm", learner(stream)), Judge()
    judge.pupil, judge.tasks = method.learner, tasks
    train(stream, lambda: method, judge, evaluate_every=3)
    found = {evaluation.newest for evaluation in judge.evaluations}
    assert len(found) > 3
    assert len({evaluation.accuracy for evaluation in judge.evaluations}) > 3


def test_test_sets_larger_than_what_is_predicted_at_once_are_counted_whole() -> None:
    count = 2500
    labels = torch.arange(count) % 4
    x = torch.nn.functional.one_hot(labels, 4).float()
    answers = torch.arange(count) % 3 == 0  # the network is wrong about the others
    x[~answers] = x[~answers].roll(1, dims=1)
    test = Split(InMemory(x), labels, labels // 2)
    train_split = Split(InMemory(torch.eye(4)), torch.arange(4), torch.arange(4) // 2)
    stream = Stream(Tasks(train_split, test, 4))
    journal = Notebook()
    train(stream, lambda: Idle(nn.Identity()), journal)
    for task, accuracy in enumerate(journal.evaluations[0].accuracy):
        assert accuracy == pytest.approx(100 * answers[labels // 2 == task].double().mean().item())


class Idle(Method):
    """Learns nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Learner(model, lambda x, _: x))
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        self.steps = 0

    def step(self, batch: Batch) -> None:
        self.steps += 1


def test_recency_is_unknown_where_tasks_share_their_classes() -> None:
    labels, task = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    split = Split(InMemory(torch.eye(4)[:, :2]), labels, task)
    journal = Notebook()
    train(Stream(Tasks(split, split, 2)), lambda: Idle(nn.Identity()), journal)
    assert [evaluation.newest for evaluation in journal.evaluations] == [None] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 2, 3])
def test_outputs_that_are_not_finite_end_the_run_and_name_the_step(bad: float, where: int) -> None:
    """A single one is enough, whether or not it would be the largest."""

    class Spoiled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logits = torch.zeros(len(x), 2)
            logits[-1, -1] = bad if method.steps >= where else 0.0
            return logits

    method, journal = Idle(Spoiled()), Notebook()
    stream = Stream(numbered([3, 3]), batch=1)
    with pytest.raises(FloatingPointError, match=rf"not finite after {where} steps"):
        train(stream, lambda: method, journal, evaluate_every=1)
    assert [evaluation.step for evaluation in journal.evaluations] == list(range(where))


def test_a_learning_rate_that_is_far_too_large_ends_the_run() -> None:
    stream = pictures()

    def begin() -> Method:
        method = made("sgd", learner(stream))
        method.optimizer.param_groups[0]["lr"] = 1e30
        return method

    with pytest.raises(
        FloatingPointError, match=r"of step \d of 9, task 1 .* a smaller lr may help"
    ):
        train(stream, begin, Notebook())


@pytest.mark.parametrize("case", ["er", "syngap", "joint"])
def test_bf16_runs(case: str) -> None:
    stream = pictures()
    begin = beginning(case, stream, precision="bf16")
    method = train(stream.present(begin().sees), begin, Notebook())
    assert {value.dtype for value in method.learner.parameters()} == {torch.float32}
    full, _ = run(case, stream.present(begin().sees))
    low_bits, high_bits = weights(method), weights(full)
    assert any(not torch.equal(low_bits[name], high_bits[name]) for name in low_bits)


# Going on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("case", "batch"), [("syngap", 5), ("joint-retrained", 8)])
def test_interrupted_at_any_instant_it_ends_with_the_same_network_and_record(
    case: str, batch: int, late: bool
) -> None:
    """Dropout, running averages, augmentation, memory and sampled labels go on where they were."""

    def stream() -> Stream:
        whole = pictures(batch=batch)
        return whole.present(made(case, learner(whole)).sees)

    def attempt(journal: Notebook) -> Method:
        torch.seed()  # another process knows nothing of our random numbers
        return train(stream(), beginning(case, stream()), journal, evaluate_every=3)

    whole = Notebook(keep_every=2)
    expected = attempt(whole)
    for call in range(whole.calls):
        journal = Notebook(keep_every=2, fails_at=call, late=late)
        with pytest.raises(Interrupted):
            attempt(journal)
        method = attempt(journal)
        assert_identical(weights(method), weights(expected), f"interrupted in call {call}: ")
        assert journal.told == whole.told, f"interrupted in call {call}"
        assert journal.checkpoint is not None
        assert whole.checkpoint is not None
        assert_identical(state_of(journal), state_of(whole), f"interrupted in call {call}: ")


def state_of(journal: Notebook) -> dict[str, Any]:
    """The last checkpoint, but for the time that it took."""
    state = journal.load()
    assert state is not None
    return {name: value for name, value in state.items() if name != "seconds"}


def test_a_run_that_is_over_is_not_run_again() -> None:
    stream = pictures()
    method, journal = run("er", stream)
    steps, told = len(journal.steps), len(journal.told)
    again = train(stream, beginning("er", stream), journal)
    assert_identical(weights(again), weights(method))
    assert (len(journal.steps), len(journal.told)) == (steps, told)


def test_time_is_counted_on_from_the_last_checkpoint() -> None:
    stream = pictures(batch=5)
    journal = Notebook(keep_every=1, fails_at=3)
    with pytest.raises(Interrupted):
        train(stream, beginning("sgd", stream), journal)
    kept = unpack(journal.checkpoint or b"")
    assert 0 < kept["state"]["seconds"] < 60
    kept["state"]["seconds"] = 1000.0
    journal.checkpoint = pack(kept)
    train(stream, beginning("sgd", stream), journal)
    state = journal.load()
    assert state is not None
    assert 1000 < state["seconds"] < 1060


# References ---------------------------------------------------------------------------------------


def test_joint_training_has_one_row_and_has_learned_every_task_throughout() -> None:
    tasks = picture_tasks()
    stream = Stream(tasks, batch=3, epochs=2).present("everything")
    method, judge = made("joint", learner(stream)), Judge()
    judge.pupil, judge.tasks, judge.task = method.learner, tasks, 2
    train(stream, lambda: method, judge, evaluate_every=5)
    assert [evaluation.step for evaluation in judge.ends] == [len(stream)]
    assert {evaluation.task for evaluation in judge.evaluations} == {2}


def test_joint_training_of_a_single_task_is_that_task() -> None:
    stream = Stream(picture_tasks(tasks=(0,) * CLASSES), batch=4)
    _, journal = run("joint", stream.present("everything"))
    assert [(one.task, one.end) for one in journal.evaluations] == [(0, False), (0, True)]


def test_retrained_joint_begins_with_a_fresh_network_for_every_row() -> None:
    """Row k is that of a network which saw the samples of tasks 0..k and nothing before."""
    stream = pictures(epochs=2).present("everything so far")
    case = "joint-retrained"
    last, journal = run(case, stream)
    assert [evaluation.task for evaluation in journal.ends] == [0, 1, 2]
    for task, batches in enumerate(parts(stream)):
        alone = beginning(case, stream)()
        for batch in batches:
            assert set(batch.y.tolist()) <= set(range(2 * (task + 1)))
            alone.step(batch)
        accuracy, newest = by_hand(alone.learner, picture_tasks(), task)
        row = journal.ends[task]
        assert list(row.accuracy) == pytest.approx(accuracy, abs=1e-9)
        assert row.newest == pytest.approx(newest, abs=1e-9)
    assert_identical(weights(last), weights(alone))


def test_the_first_row_of_retrained_joint_is_joint_training_of_the_first_task() -> None:
    whole = pictures(epochs=2).present("everything so far")
    first = pictures(epochs=2, first=1).present("everything")
    _, retrained = run("joint-retrained", whole)
    _, alone = run("joint-retrained", first)
    assert retrained.ends[0].accuracy[0] == alone.ends[0].accuracy[0]
