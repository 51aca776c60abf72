"""One run: set up a method, learn what is new, evaluate along the way."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from syngap.bench.finetuning.methods import Method
from syngap.bench.finetuning.point import Point
from syngap.bench.finetuning.setting import Setting
from syngap.protection.recomputed import blocks_of

__all__ = ["Journal", "memory_of_graphs", "train"]

_KINDS = 4096  # of blocks that a process compiles: of many shapes, and changed by many methods


class Journal(Protocol):
    """Keeps what a run reports, and the state to go on from."""

    def load(self) -> dict[str, Any] | None:
        """Return the last state that was saved, None where there is none."""

    def record_point(self, point: Point) -> None:
        """Keep an evaluation."""

    def advance(self, step: int) -> bool:
        """Note a step; return whether to save a state now."""

    def save(self, state: dict[str, Any]) -> None:
        """Keep a state."""


class Clock:
    """Adds up the time spent inside `with clock:`, and the largest memory of a GPU there.

    What is in that memory when the clock is made, the start and the data, does not count. Nor does
    a step in which torch.compile compiles: that takes time and memory once, however long the run.

    Attributes:
        seconds: the time, added up.
        memory: the largest memory, in bytes.
        compiling: how many steps did not count, and how long they took.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.memory = device, 0.0, 0
        self.compiling = 0, 0.0
        self._began, self._compiles = 0.0, False
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._began, self._compiles = time.monotonic(), False

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        took = time.monotonic() - self._began
        if self._compiles:
            steps, seconds = self.compiling
            self.compiling = steps + 1, seconds + took
            return
        self.seconds += took
        if self.device.type == "cuda":
            largest = torch.cuda.max_memory_allocated(self.device) + memory_of_graphs(self.device)
            self.memory = max(self.memory, largest - self._before)

    def note_compilation(self, *_: object) -> None:
        """Take note that torch.compile compiles."""
        self._compiles = True

    def seconds_at(self, step: int, setup: float) -> float:
        """Return the seconds up to a step; one that compiled counts as long as the others' mean.

        Where all steps compiled, they count as long as they took.
        """
        steps, seconds = self.compiling
        others = step - steps
        return self.seconds + (steps * (self.seconds - setup) / others if others else seconds)


def memory_of_graphs(device: torch.device) -> int:
    """Return the bytes that CUDA graphs keep for what they allocate while they are replayed.

    Nothing else can use them, and torch counts them as free.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["segment_pool_id"] != (0, 0) and segment["device"] == index
    )


def train(
    setting: Setting,
    make: Callable[[], Method],
    journal: Journal,
    *,
    steps: int,
    batch: int,
    warmup: int,
    evaluations: int,
    shares: Sequence[float],
    compiled: bool = False,
) -> float:
    """Tune a copy of the setting's model, and report a point for each evaluation and share.

    All methods see the same batches, and set-up counts: what a method makes of the anchors, and
    the own samples that it uses. Killed and called again, it gives the same bits.

    Args:
        setting: the model and data.
        make: the method, from the start.
        journal: gets points and states.
        steps: in all.
        batch: examples a step.
        warmup: steps in which the rate rises.
        evaluations: how many, evenly spread over the steps.
        shares: of the way from the start to the trained weights, at which it is evaluated.
        compiled: whether torch.compile compiles the model's blocks. A step in which it does
            counts as long as the mean of the others.

    Returns:
        The seconds of set-up and training.
    """
    state = journal.load()
    gc.collect()  # what was compiled for an earlier run is in cycles
    _warm_up(setting, batch)
    clock = Clock(setting.device)
    with clock:
        method = make()
    # Own samples cost each run that uses them the same, whichever made them.
    clock.seconds += setting.shared_seconds - setting.got_seconds

    def measure(step: int, share: float, model: nn.Module) -> Point:
        found = setting.evaluate(model)
        return Point(
            step,
            share,
            found.new,
            found.old,
            round(clock.seconds_at(step, setup), 3),
            round(setup, 3),
            clock.memory,
            found.exact,
            found.old_exact,
        )

    if state is None:
        done, setup = 0, clock.seconds
        journal.record_point(measure(0, 1.0, setting.start))
    else:
        done, setup = state["step"], state["setup"]
        clock.seconds, clock.memory = state["seconds"], state["memory"]
        method.load_state_dict(state["method"])
        clock.compiling = state.get("compiling", clock.compiling)
    if compiled:  # a method may have other models beside the one that it trains
        _compile_blocks(*(each for each in vars(method).values() if isinstance(each, nn.Module)))
    looks = {round(steps * look / evaluations) for look in range(1, evaluations + 1)} - {0}
    with _compiling(clock) if compiled else nullcontext():
        for step in range(done + 1, steps + 1):
            with clock:
                method.step(setting.batch(batch, f"batch {step}"), min(1.0, step / max(1, warmup)))
            if step in looks:
                trained, evaluated = method.weights(), copy.deepcopy(setting.start)
                if compiled:
                    _compile_blocks(evaluated)
                for share in shares:
                    interpolate(evaluated, setting.start, trained, share, setting.new_parameters)
                    journal.record_point(measure(step, share, evaluated))
                del trained, evaluated  # so that they do not count as the method's memory
                if compiled:
                    gc.collect()  # a module that is compiled where it is holds itself
            if journal.advance(step) and step < steps:
                journal.save(
                    {
                        "step": step,
                        "setup": setup,
                        "seconds": clock.seconds,
                        "compiling": clock.compiling,
                        "memory": clock.memory,
                        "method": method.state_dict(),
                    }
                )
    return clock.seconds_at(steps, setup)


def _warm_up(setting: Setting, batch: int) -> None:
    """Take a step with a copy, so that the first run of a process is timed like the others."""
    Method(setting).step(setting.batch(batch, "warm-up"))


def _compile_blocks(*models: nn.Module) -> None:
    """Compile each block where it is; blocks of one kind are compiled once for all of them.

    For one shape at a time: what is compiled for many depends on which one comes first, and so
    would the bits of a run that is resumed.
    """
    for model in models:
        for block in blocks_of(model) or [model]:
            block.compile(dynamic=False)


@contextmanager
def _compiling(clock: Clock) -> Iterator[None]:
    """Tell the clock when torch.compile compiles, and let it compile as many kinds as there are.

    With more than `recompile_limit`, blocks would run as they are, without a word.
    """
    callbacks = torch._dynamo.callback.callback_handler
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), _KINDS)
    callbacks.register_start_callback(clock.note_compilation)
    try:
        with torch._dynamo.config.patch(limits):
            yield
    finally:
        callbacks.remove_start_callback(clock.note_compilation)


@torch.no_grad()
def interpolate(
    model: nn.Module,
    start: nn.Module,
    trained: Mapping[str, Tensor],
    share: float,
    whole: Collection[str] = (),
) -> None:
    """Give a model the weights start + share · (trained - start), as in WiSE-FT.

    Args:
        model: that is given them.
        start: the model before training.
        trained: weights by name.
        share: of the way.
        whole: names of weights that are taken as trained, as those of a new head.
    """
    before = dict(start.named_parameters())
    for name, param in model.named_parameters():
        way = 1.0 if name in whole else share
        param.copy_(torch.lerp(before[name], trained[name].to(before[name]), way))
