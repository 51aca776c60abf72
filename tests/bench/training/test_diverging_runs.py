"""A run whose numbers are not finite says where and what may help, or goes on without that step."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import assert_identical
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import CASES, beginning, made, network, pictures, weights
from notebook import Interrupted, Notebook
from rerun import Rerun, stream
from tiny import called, job, run_inline, written
from torch import Tensor, nn

from syngap.bench.errors import UserError
from syngap.bench.methods import Learner, Method, registry
from syngap.bench.methods.er import ER
from syngap.bench.methods.guard import Guard, _Counters
from syngap.bench.runner import local as engine
from syngap.bench.runner.local import Event, attempt
from syngap.bench.streams import Batch, Stream
from syngap.bench.training import train, watch
from syngap.bench.training.capture import CapturedMethod
from syngap.bench.training.checkpoint import unpack
from syngap.bench.training.watch import Watch

BAD = [math.nan, math.inf, -math.inf]
FAULTS = ("samples", "logits", "gradients")


class Fault(nn.Module):
    """Passes logits on, or spoils them, or the gradients that come back."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.bad = "", math.nan

    def forward(self, logits: Tensor) -> Tensor:
        if self.training and self.kind == "logits":
            return logits * self.bad
        if self.training and self.kind == "gradients":
            logits.register_hook(lambda grad: grad * self.bad)
        return logits


class Faulty(Stream):
    """A stream at some steps of which, counted from 0, something is not finite."""

    plan: dict[int, tuple[str, float]]
    fault: Fault

    def __getitem__(self, step: int) -> Batch:
        self.fault.kind, self.fault.bad = self.plan.get(step, ("", 0.0))
        x, y = super().__getitem__(step)
        return Batch(x.float() * self.fault.bad if self.fault.kind == "samples" else x.float(), y)


def faulty(case: str, plan: dict[int, tuple[str, float]], **options: Any) -> Any:
    """The stream, and what begins to learn it."""
    stream = pictures()
    stream.__class__ = Faulty
    assert isinstance(stream, Faulty)
    stream.plan, stream.fault = plan, Fault()

    def begin() -> Method:
        torch.manual_seed(7)
        model = nn.Sequential(*network(), stream.fault)
        return made(case, Learner(model, stream.transform, **options))

    return stream.present(begin().sees), begin


def is_finite(method: Method) -> bool:
    return all(bool(v.isfinite().all()) for v in method.finite_tensors() if v.is_floating_point())


# Raising ------------------------------------------------------------------------------------------

SAID = {
    "samples": "the samples of step 6 of 9, task 2 of 3, have values that are not finite",
    "logits": "the l.*s of step 6 of 9, task 2 of 3, (is|are) not finite: a smaller lr may help",
    "gradients": "the update of step 6 of 9, task 2 of 3, is not finite: a smaller lr may help",
}


@pytest.mark.filterwarnings("ignore:the importance of a batch was not finite")
@pytest.mark.parametrize("case", ["sgdm", "ewcpp", "derpp", "syngap", "syngap-adam"])
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("bad", BAD)
def test_the_first_step_that_is_not_finite_ends_the_run_and_nothing_of_it_is_kept(
    kind: str, bad: float, case: str
) -> None:
    stream, begin = faulty(case, {5: (kind, bad)})
    journal = Notebook(keep_every=1)
    with pytest.raises(FloatingPointError, match=SAID[kind]) as failure:
        train(stream, begin, journal, evaluate_every=1)
    assert "\n" not in str(failure.value)
    assert journal.saved == [1, 2, 3, 4, 5]
    assert [evaluation.step for evaluation in journal.evaluations] == [0, 1, 2, 3, 4, 5]
    kept = journal.load()
    assert kept is not None
    method = begin()
    method.load_state_dict(kept["method"])
    assert is_finite(method)


def test_the_rate_that_is_suggested_is_a_tenth_or_the_usual_one() -> None:
    for rate, better in ((0.05, "0.005"), (40.0, "0.1"), (1e30, "0.1")):
        stream, begin = faulty("sgd", {3: ("logits", math.nan)})

        def at_a_rate(rate: float = rate, begin: Callable[[], Method] = begin) -> Method:
            method = begin()
            method.optimizer.param_groups[0]["lr"] = rate
            return method

        shown = re.escape(f"(it is {rate:g}, try {better})")
        with pytest.raises(FloatingPointError, match=shown):
            train(stream, at_a_rate, Notebook())


def test_what_an_optimizer_keeps_is_looked_at_before_it_is_saved() -> None:
    """Adam's mean of squares overflows long before the network shows it."""
    stream, begin = faulty("adam", {})

    def loud() -> Method:
        method = begin()
        weight = method.learner.parameters()[0]
        weight.register_hook(lambda grad: grad * 1e25)
        return method

    journal = Notebook(keep_every=1)
    with pytest.raises(FloatingPointError, match="the update of step 1 of 9"):
        train(stream, loud, journal)
    assert not journal.saved


def test_an_importance_that_overflows_is_not_kept_either() -> None:
    """EWC++ squares gradients that are themselves finite."""
    stream, begin = faulty("ewcpp", {})

    def loud() -> Method:
        method = begin()
        method.learner.parameters()[0].register_hook(lambda grad: grad.sign() * 1e25)
        method.optimizer.param_groups[0]["lr"] = 1e-30
        return method

    journal = Notebook(keep_every=1)
    with pytest.raises(FloatingPointError, match="the update of step 1 of 9"):
        train(stream, loud, journal)
    assert not journal.saved


class Masked(nn.Module):
    """Has a mask of -inf, as attention does, and something in its state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, logits: Tensor) -> Tensor:
        return logits

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


def test_a_mask_of_infinity_is_no_fault_and_any_other_buffer_is() -> None:
    stream, masked = pictures(), Masked()

    def begin() -> Method:
        return made("sgd", Learner(nn.Sequential(*network(), masked), stream.transform))

    journal = Notebook(keep_every=1)
    train(stream, begin, journal)
    assert journal.saved
    watched = Watch(begin(), stream, 0)
    watched.check(1)
    masked.mean[0] = math.inf
    with pytest.raises(FloatingPointError, match="the update of step 1"):
        watched.check(1)


# Skipping -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the importance of a batch was not finite")
@settings(max_examples=40)
@given(
    st.sampled_from([case for case in sorted(CASES) if "joint" not in case]),
    st.dictionaries(
        st.integers(0, 8), st.tuples(st.sampled_from(FAULTS), st.sampled_from(BAD)), max_size=6
    ),
)
def test_a_run_with_skipped_steps_is_the_run_without_them(
    case: str, plan: dict[int, tuple[str, float]]
) -> None:
    """To the last bit: network, running averages, optimizer, memory and every random number."""
    stream, begin = faulty(case, plan, non_finite="skip")
    journal = Notebook()
    method = train(stream, begin, journal)
    other = begin()
    for step in range(len(stream)):
        if step not in plan:
            other.step(stream[step])
    assert is_finite(method)
    assert_identical(method.state_dict(), other.state_dict())
    assert journal.told[-1][1] == {**other.summary(), "skipped": len(plan)}


@pytest.mark.parametrize("case", ["derpp", "syngap"])
def test_nothing_is_left_of_a_loss_that_was_not_finite(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what the network said nor what was observed; a warning would be an error here."""
    stream, begin = faulty(case, {}, non_finite="skip")
    kind = type(begin())
    loss, calls = kind.loss, iter(range(100))
    spoilt = (3, 4, len(stream) - 1)

    def sometimes(self: Method, batch: Batch) -> Tensor:
        return loss(self, batch) * (math.nan if next(calls) in spoilt else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "loss", sometimes)
        method = train(stream, begin, Notebook())
    other = begin()
    for step in range(len(stream)):
        if step not in spoilt:
            other.step(stream[step])
    assert_identical(method.state_dict(), other.state_dict())


@pytest.mark.filterwarnings("ignore:the importance of a batch was not finite")
def test_an_interrupted_run_remembers_what_it_skipped() -> None:
    plan = {1: ("samples", math.nan), 4: ("gradients", math.inf), 7: ("logits", math.nan)}
    stream, begin = faulty("syngap", plan, non_finite="skip")
    whole = Notebook(keep_every=1)
    expected = train(stream, begin, whole)
    for call in range(0, whole.calls, 4):
        journal = Notebook(keep_every=1, fails_at=call)
        with pytest.raises(Interrupted):
            train(stream, begin, journal)
        assert_identical(weights(train(stream, begin, journal)), weights(expected))
        assert journal.told == whole.told


def test_many_skipped_steps_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_IN_A_ROW", 3)
    lonely = dict.fromkeys((0, 1, 3, 4, 6, 7), ("logits", math.nan))
    stream, begin = faulty("er", lonely, non_finite="skip")
    journal = Notebook()
    train(stream, begin, journal)
    assert journal.told[-1][1]["skipped"] == 6
    stream, begin = faulty("er", {**lonely, 5: ("logits", math.nan)}, non_finite="skip")
    said = (
        "the loss of step 6 of 9, task 2 of 3, is not finite, as in 3 steps in a row: .* try 0.01"
    )
    with pytest.raises(FloatingPointError, match=said):
        train(stream, begin, Notebook())


def test_a_network_that_is_lost_is_not_waited_for() -> None:
    """Once parameters are infinite no batch can be learned, and 100 steps would be 100 too many."""
    stream, begin = faulty("sgd", {}, non_finite="skip")

    def absurd() -> Method:
        method = begin()
        method.optimizer.param_groups[0]["lr"] = 1e30
        method.learner.parameters()[0].register_hook(lambda grad: grad.sign() * 1e20)
        return method

    with pytest.raises(FloatingPointError, match=r"the update of step 1 of 9.* try 0.1"):
        train(stream, absurd, Notebook())


class Own(ER):
    """Has a `learn` that shows its loss to nobody."""

    def learn(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def test_a_method_that_cannot_be_undone_is_not_skipped_for() -> None:
    stream = pictures()
    for policy in ("raise", "skip"):
        learner = Learner(network(), stream.transform, non_finite=policy)  # type: ignore[arg-type]
        method = Own(learner, buffer=9, replay=4)
        if policy == "raise":
            train(stream, lambda: method, Notebook())  # noqa: B023
        else:
            with pytest.raises(UserError, match="skip needs a method that calls"):
                train(stream, lambda: method, Notebook())  # noqa: B023


def test_steps_are_not_captured_where_they_are_skipped_and_it_says_so() -> None:
    with pytest.warns(UserWarning, match="not captured: non_finite: skip"):
        learner = Learner(network(), pictures().transform, captured=True, non_finite="skip")
    assert not learner.captured


# Where nobody looks at each step ------------------------------------------------------------------


def noting(method: Method) -> Method:
    """A method that is watched as on a GPU, which notes what it sees."""
    method.learner.guard._counters = _Counters(torch.device("cpu"))
    return method


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_device_remembers_the_first_loss_that_was_not_finite(bad: float, at: int) -> None:
    guard = Guard(torch.device("cpu"), "raise")
    guard._counters = _Counters(torch.device("cpu"))
    for step in range(1, 10):
        assert guard.finite_losses(wait=True) == (None if step <= at else at - 1)
        guard.check_loss(torch.tensor(bad if step == at else 1e37 * step))


@pytest.mark.parametrize("case", ["sgd", "er", "ewcpp", "derpp"])
def test_what_a_device_noted_is_read_before_anything_is_measured_or_kept(case: str) -> None:
    stream, begin = faulty(case, {6: ("logits", math.nan)})
    journal = Notebook()
    for _ in range(2):  # at the second time from the checkpoint of step 6
        with pytest.raises(FloatingPointError, match="the loss of step 7 of 9, task 3 of 3, is"):
            train(stream, lambda: noting(begin()), journal)
        assert journal.saved == [3, 6]
        assert [evaluation.step for evaluation in journal.evaluations] == [0, 3, 6]


def test_captured_steps_are_noted_at_every_replay() -> None:
    batches = stream()
    method = noting(beginning("er", batches)())
    graphs = Rerun(method)
    captured, guarded = CapturedMethod(method, graphs), Watch(method, batches, 0)
    last = len(batches) - 5
    for step in range(1, len(batches) + 1):
        if step == last:
            with torch.no_grad():
                method.learner.parameters()[0].fill_(math.nan)
        guarded.step(captured.learn, batches[step - 1], step)
    assert graphs.replayed > len(batches) / 2
    with pytest.raises(FloatingPointError, match=f"the loss of step {last} of {len(batches)}"):
        guarded.check(len(batches))


# Whole runs ---------------------------------------------------------------------------------------


def sound(folder: Path) -> bool:
    """Whether a run folder holds nothing but finite numbers."""
    text = (folder / "metrics.jsonl").read_text() + (folder / "accuracy.csv").read_text()
    assert not re.search(r"\b(nan|inf)", text, re.IGNORECASE), text
    tensors: list[Tensor] = []
    for path in (folder / "checkpoint").glob("*.safetensors"):
        if path.stem == "weights":
            tensors += safetensors.torch.load_file(path).values()
        else:
            state = unpack(path.read_bytes())["state"]["method"]
            tensors += state["learner"]["model"].values()
            states = state["optimizer"]["state"].values()
            tensors += [v for one in states for v in one.values() if isinstance(v, Tensor)]
    return all(bool(value.isfinite().all()) for value in tensors if value.is_floating_point())


@pytest.mark.parametrize("row", registry.names())
@pytest.mark.parametrize("rate", ["1.0e+3", "1.0e+30"])
def test_an_extreme_learning_rate_ends_with_a_message_and_a_sound_folder(
    row: str, rate: str, tmp_path: Path
) -> None:
    events: list[Event] = []
    wild = job(
        tmp_path / "wild",
        "stream={name: digits, batch: 60, first: 2}",
        "training={device: cpu, evaluate_every: 5, checkpoint_seconds: 0}",
        f"methods.{row}={{lr: {rate}}}",
        row=row,
    )
    for _ in range(2):  # the second goes on from what the first left
        attempt(wild, events.append)
        assert sound(wild.folder)
    assert [event.kind for event in events if event.kind != "step"] == [events[-1].kind] * 2
    if events[-1].kind == "failed" or rate == "1.0e+30":
        advice = rf"a smaller lr may help \(it is {re.escape(f'{float(rate):g}')}, try 0\.\d+\)"
        assert re.fullmatch(rf"FloatingPointError: .* \d+.*: {advice}", events[-1].message)


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_one_process")
def test_the_command_line_shows_the_message_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "methods.er.lr=1.0e+30")
    code, printed, said = called(capsys, "run", file, "--methods", "er", "--out", "out")
    assert code == 1
    assert "a smaller lr may help (it is 1e+30, try 0.1)" in said
    assert "Traceback" not in printed + said


@pytest.mark.usefixtures("in_one_process")
def test_the_command_line_says_how_many_steps_were_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, calls = ER.learn, iter(range(1000))

    def sometimes(self: ER, batch: Batch) -> None:
        if next(calls) in (1, 3):
            raise FloatingPointError("of a batch")
        learn(self, batch)

    monkeypatch.setattr(ER, "learn", sometimes)
    file = written(tmp_path, "training.non_finite=skip")
    code, _, said = called(capsys, "run", file, "--methods", "er", "--out", "out")
    assert code == 0
    assert "2 steps skipped" in said
    last = (tmp_path / "out/er-0/metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["summary"]["skipped"] == 2
    assert "skipped" not in json.dumps(called(capsys, "run", written(tmp_path), "--out", "new"))
