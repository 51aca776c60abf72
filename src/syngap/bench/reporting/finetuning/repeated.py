"""Recorded fine-tuning trials beside the same trials run again.

As for streams, a new mean is expected within the 95 % prediction interval of the recorded seeds;
`syngap.bench.reporting.reproduction` has the formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from syngap.bench.reporting.reproduction import Remeasured
from syngap.bench.reporting.statistics import TOO_FEW_SEEDS, spread_over
from syngap.bench.store.outcome import Run

__all__ = ["Repeated", "repeated"]


@dataclass(frozen=True)
class Measured(Remeasured):
    """A loss at the end of a trial, recorded and here, over seeds."""

    name: str


@dataclass(frozen=True)
class Repeated:
    """A trial that was run again.

    Args:
        label: its name.
        measured: its last losses, weights as trained.
        identical: whether with every seed that both have all losses have the same bits.
    """

    label: str
    measured: Sequence[Measured]
    identical: bool

    @property
    def is_inside(self) -> bool | None:
        """Whether every loss is within its tolerance; None if that is not known."""
        if self.identical:
            return True
        if any(one.tolerance is None for one in self.measured):
            return None
        return all(abs(one.difference) <= (one.tolerance or 0.0) + 1e-9 for one in self.measured)

    def describe(self) -> list[str]:
        """Return the comparison as lines of text."""
        words = {True: "inside", False: "OUTSIDE", None: TOO_FEW_SEEDS}
        said = "the same losses, bit for bit" if self.identical else words[self.is_inside]
        lines = [f"{self.label}: {said}"]
        for one in () if self.identical else self.measured:
            within = "" if one.tolerance is None else f", expected within ± {one.tolerance:.4f}"
            lines.append(
                f"  {one.name}: {one.recorded.mean:.4f} recorded, {one.here.mean:.4f} here, "
                f"{one.difference:+.4f}{within}"
            )
        return lines


def repeated(recorded: Sequence[Run], here: Sequence[Run]) -> list[Repeated]:
    """Return a comparison for every trial that has ended in both."""
    known, new = _by_row(recorded), _by_row(here)
    return [_compare(row, known[row], new[row]) for row in new if row in known]


def _by_row(runs: Iterable[Run]) -> dict[str, dict[int, Run]]:
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        if run.done and run.points:
            found.setdefault(run.row, {})[run.seed] = run
    return found


def _compare(row: str, recorded: Mapping[int, Run], here: Mapping[int, Run]) -> Repeated:
    measured = []
    for name in _last_losses(next(iter(here.values()))):
        spreads = [
            spread_over([_last_losses(run)[name] for run in runs.values()])
            for runs in (recorded, here)
        ]
        if spreads[0] is not None and spreads[1] is not None:
            measured.append(Measured(spreads[0], spreads[1], name))
    shared = [seed for seed in here if seed in recorded]
    same = [_losses(recorded[seed]) == _losses(here[seed]) for seed in shared]
    return Repeated(row, measured, bool(shared) and all(same))


def _last_losses(run: Run) -> dict[str, float]:
    last = next(point for point in reversed(run.points) if point.share == 1 or not point.step)
    return {"new": fmean(last.new), **{kind: fmean(last.old[kind]) for kind in last.old}}


def _losses(run: Run) -> list[str]:
    """Return all losses as text, in which NaN is equal to NaN."""
    return [repr((point.step, point.share, point.new, dict(point.old))) for point in run.points]
