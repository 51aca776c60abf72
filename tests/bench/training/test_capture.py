"""A captured step does what the step does, for every method, with what the CPU decides anew."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from helpers import assert_identical
from learning import CASES, beginning, learner
from rerun import Rerun, stream
from torch import Tensor

from syngap.bench.methods import Method
from syngap.bench.methods.compiler import Compiler
from syngap.bench.methods.er import ER
from syngap.bench.streams import Batch, Stream
from syngap.bench.tape import Tape, decision, play, record
from syngap.bench.training.capture import CapturedMethod

CPU = torch.device("cpu")


def plain(method: Method, batches: Stream) -> Method:
    torch.manual_seed(3)  # dropout draws from torch's own source
    for step in range(len(batches)):
        method.step(batches[step])
    return method


def by_graphs(method: Method, batches: Stream, graphs: Rerun) -> CapturedMethod:
    torch.manual_seed(3)
    captured = CapturedMethod(method, graphs)
    for step in range(len(batches)):
        captured.learn(batches[step])
        method.after_step()
    return captured


@pytest.mark.parametrize("case", [case for case in CASES if case != "syngap-directions"])
def test_every_method_ends_where_its_steps_would(case: str) -> None:
    begin = beginning(case, stream())
    one, other = begin(), begin()
    batches = stream().present(one.sees)
    plain(one, batches)
    graphs = Rerun(other)
    captured = by_graphs(other, batches, graphs)
    assert captured.failure == ""
    assert graphs.captured >= 2  # batches of three and of four samples
    assert graphs.replayed > len(batches) / 2
    assert_identical(one.state_dict(), other.state_dict())


def test_a_compiled_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "backend", "eager")
    begin = beginning("syngap-teacher", stream(), compiled=True)
    one, other = plain(begin(), stream()), begin()
    graphs = Rerun(other)
    captured = by_graphs(other, stream(), graphs)
    assert other.learner.compiling
    assert captured.failure == ""
    assert graphs.replayed > len(stream()) / 2
    assert_identical(one.state_dict(), other.state_dict())


class Slowing(ER):
    """Decides in learn, by a number of its own, what it does."""

    def __init__(self, learner: Any, **options: Any) -> None:
        super().__init__(learner, **options)
        self.steps, self.rates = 0, [1.0, 2]

    def learn(self, batch: Batch) -> None:
        self.steps += 1
        self.rates[1] += 3
        if self.steps % 5 == 0:
            self.optimizer.param_groups[0]["lr"] *= 0.9
        super().learn(batch)


def test_a_method_that_counts_in_learn_is_not_captured_and_loses_nothing() -> None:
    one, other = (Slowing(learner(stream()), buffer=9, replay=4) for _ in range(2))
    plain(one, stream())
    with pytest.warns(UserWarning, match="changes in learn"):
        captured = by_graphs(other, stream(), Rerun(other))
    assert captured.failure
    assert_identical(one.state_dict(), other.state_dict())


def test_what_cannot_be_captured_goes_on_as_it_stands_and_says_why() -> None:
    one, other = (ER(learner(stream()), buffer=9, replay=4) for _ in range(2))
    plain(one, stream())
    with pytest.warns(UserWarning, match="not captured: not permitted"):
        captured = by_graphs(
            other, stream(), Rerun(other, refuses="not permitted\nwhile capturing")
        )
    assert captured.failure == "not permitted while capturing"
    assert_identical(one.state_dict(), other.state_dict())


def test_a_memory_that_has_little_to_give_is_asked_as_it_stands() -> None:
    # Of 40 samples asked for there are 16, 20, ... for a while after a step was recorded.
    one, other = (ER(learner(stream()), buffer=60, replay=40) for _ in range(2))
    plain(one, stream())
    graphs = Rerun(other)
    by_graphs(other, stream(), graphs)
    assert_identical(one.state_dict(), other.state_dict())


class Refreshing(ER):
    """Does something else at every third step, and says so."""

    steps = 0

    def phase(self) -> Hashable:
        return self.steps % 3 == 0

    def count_replay(self) -> None:
        self.steps += 1

    def learn(self, batch: Batch) -> None:
        third = self.steps % 3 == 0
        self.steps += 1
        super().learn(Batch(batch.x, batch.y.flip(0)) if third else batch)


def test_phases_have_graphs_of_their_own() -> None:
    one, other = (Refreshing(learner(stream()), buffer=9, replay=4) for _ in range(2))
    plain(one, stream(batch=2, epochs=6))
    graphs = Rerun(other)
    by_graphs(other, stream(batch=2, epochs=6), graphs)
    assert graphs.captured == 2  # one shape, two phases
    assert_identical(one.state_dict(), other.state_dict())


# The tape


def counting() -> Callable[[], Tensor]:
    numbers = iter(range(100))
    return lambda: torch.tensor([next(numbers)])


def test_decisions_are_made_where_there_is_no_tape() -> None:
    make = counting()
    assert [decision(make, CPU).item() for _ in range(3)] == [0, 1, 2]


def test_a_tape_keeps_the_order_and_the_places() -> None:
    tape, first, second = Tape(), counting(), counting()
    with record(tape):
        places = [decision(first, CPU), decision(second, CPU), decision(first, CPU)]
    assert [place.item() for place in places] == [0, 0, 1]
    made = tape.make_again()
    assert [value.item() for value in made] == [2, 1, 3]
    assert [place.item() for place in places] == [0, 0, 1]
    tape.put(made)
    assert [place.item() for place in places] == [2, 1, 3]
    with play(tape.places):
        assert all(decision(first, CPU) is place for place in places)
        with pytest.raises(RuntimeError, match="more decisions than were recorded"):
            decision(first, CPU)
    assert decision(first, CPU).item() == 4  # nothing was made meanwhile


def test_a_tape_is_put_away_after_an_error() -> None:
    for within in (record(Tape()), play([])):
        with pytest.raises(KeyError), within:
            raise KeyError
    assert decision(lambda: torch.tensor(7), CPU).item() == 7


def test_other_shapes_do_not_fit() -> None:
    tape, lengths = Tape(), iter([2, 2, 3])
    with record(tape):
        decision(lambda: torch.zeros(next(lengths)), CPU)
    assert tape.fits(tape.make_again())
    assert not tape.fits(tape.make_again())
