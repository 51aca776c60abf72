"""One run: set up a method, learn what is new, evaluate along the way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from syngap.bench.finetuning.methods import Method
from syngap.bench.finetuning.methods.freeze import blocks_of
from syngap.bench.finetuning.point import Point
from syngap.bench.finetuning.setting import Setting

__all__ = ["Journal", "memory_of_graphs", "train"]

_COMPILING = 3  # first steps of a run, in which torch.compile still compiles
_KINDS = 64  # of blocks that a process compiles: methods change them in different ways


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

    What is in that memory when the clock is made, the start and the data, does not count.

    Attributes:
        seconds: the time, added up.
        last: the time of the last `with clock:`.
        memory: the largest memory, in bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.memory = device, 0.0, 0
        self.last = self._began = 0.0
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            largest = torch.cuda.max_memory_allocated(self.device) + memory_of_graphs(self.device)
            self.memory = max(self.memory, largest - self._before)
        self.last = time.monotonic() - self._began
        self.seconds += self.last


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
        compiled: whether torch.compile compiles the model's blocks. To compile does not count:
            the first steps are taken to last as long as the next one.

    Returns:
        The seconds of set-up and training.
    """
    state = journal.load()
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
            round(clock.seconds, 3),
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
    untimed = range(done + 1, done + 1 + _COMPILING * compiled)
    if compiled:
        _compile_blocks(method.model)
    looks = {round(steps * look / evaluations) for look in range(1, evaluations + 1)} - {0}
    for step in range(done + 1, steps + 1):
        with nullcontext() if step in untimed else clock:
            method.step(setting.batch(batch, f"batch {step}"), min(1.0, step / max(1, warmup)))
        if step == untimed.stop:
            clock.seconds += len(untimed) * clock.last
        if step in looks:
            trained, evaluated = method.weights(), copy.deepcopy(setting.start)
            if compiled:
                _compile_blocks(evaluated)
            for share in shares:
                interpolate(evaluated, setting.start, trained, share, setting.new_parameters)
                journal.record_point(measure(step, share, evaluated))
            del trained, evaluated  # so that they do not count as the method's memory
        if journal.advance(step) and step < steps:
            journal.save(
                {
                    "step": step,
                    "setup": setup,
                    "seconds": clock.seconds,
                    "memory": clock.memory,
                    "method": method.state_dict(),
                }
            )
    return clock.seconds


def _warm_up(setting: Setting, batch: int) -> None:
    """Take a step with a copy, so that the first run of a process is timed like the others."""
    Method(setting).step(setting.batch(batch, "warm-up"))


def _compile_blocks(model: nn.Module) -> None:
    """Compile each block where it is; blocks of one kind are compiled once for all of them."""
    torch._dynamo.config.recompile_limit = max(_KINDS, torch._dynamo.config.recompile_limit)
    for block in blocks_of(model):
        block.compile(dynamic=False)


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
