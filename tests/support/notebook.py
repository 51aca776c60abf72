"""A journal in memory, for tests of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from syngap.bench.metrics import Evaluation
from syngap.bench.training.checkpoint import pack, unpack


class Interrupted(Exception):
    """Somebody pulled the plug."""


@dataclass
class Notebook:
    """A journal in memory; what was told after the last checkpoint is lost with an interruption.

    Args:
        keep_every: a checkpoint is due at each k-th step, never at 0.
        fails_at: the call of the journal, counted from 0, in which the plug is pulled.
        late: whether that happens after the call did its work.
    """

    keep_every: int = 0
    fails_at: int = -1
    late: bool = False
    told: list[tuple[Evaluation, dict[str, float]]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    checkpoint: bytes | None = None
    saved: list[int] = field(default_factory=list)
    calls: int = 0

    @property
    def evaluations(self) -> list[Evaluation]:
        return [evaluation for evaluation, _ in self.told]

    @property
    def ends(self) -> list[Evaluation]:
        return [evaluation for evaluation in self.evaluations if evaluation.end]

    def load(self) -> dict[str, Any] | None:
        if self.checkpoint is None:
            self.told = []
            return None
        kept = unpack(self.checkpoint)
        self.told = self.told[: kept["told"]]
        state: dict[str, Any] = kept["state"]
        return state

    def record(self, evaluation: Evaluation, summary: Mapping[str, float]) -> None:
        self._call(lambda: self.told.append((evaluation, dict(summary))))

    def advance(self, step: int) -> bool:
        self._call(lambda: self.steps.append(step))
        return self.keep_every > 0 and step % self.keep_every == 0

    def save(self, state: dict[str, Any]) -> None:
        def keep() -> None:
            self.checkpoint = pack({"state": state, "told": len(self.told)})
            self.saved.append(state["step"])

        self._call(keep)

    def _call(self, work: Callable[[], None]) -> None:
        now, self.calls = self.calls == self.fails_at, self.calls + 1
        if now and not self.late:
            raise Interrupted
        work()
        if now:
            raise Interrupted
