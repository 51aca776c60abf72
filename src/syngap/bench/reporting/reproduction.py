"""Reproductions: new runs beside recorded ones, and whether they agree within the spread.

From n recorded seeds with mean r and standard deviation s, the mean of m new runs is expected
within r ± t(0.975, n - 1) · s · sqrt(1/n + 1/m), 19 times of 20. That holds for new seeds. Runs
with the recorded seeds share their order of classes and samples, so they should be well inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syngap.bench.metrics import accuracy, mean_and_spread
from syngap.bench.reporting.labels import labels
from syngap.bench.reporting.statistics import (
    FEWEST_SEEDS,
    TOO_FEW_SEEDS,
    Spread,
    format_spread,
    half_prediction,
)
from syngap.bench.store.folder_reader import Run

__all__ = ["Remeasured", "Reproduction", "SeedPair", "describe", "reproductions"]


@dataclass(frozen=True)
class SeedPair:
    """The ACC of one seed, recorded and here, each with its device."""

    seed: int
    recorded: float
    here: float
    recorded_on: str
    here_on: str
    identical: bool


@dataclass(frozen=True)
class Remeasured:
    """A measure of runs that were made again.

    Args:
        recorded: over the recorded seeds.
        here: over the new runs.
    """

    recorded: Spread
    here: Spread

    @property
    def difference(self) -> float:
        """How far the new mean is from the recorded one."""
        return self.here.mean - self.recorded.mean

    @property
    def tolerance(self) -> float | None:
        """Half the 95 % prediction interval; None if too few seeds are recorded."""
        if self.recorded.sd is None or self.recorded.seeds < FEWEST_SEEDS:
            return None
        return half_prediction(self.recorded.sd, self.recorded.seeds, self.here.seeds)


@dataclass(frozen=True)
class Reproduction(Remeasured):
    """The ACC of a row that was run again.

    Args:
        label: the row's, as a reader sees it.
        seeds: those that both have.
    """

    label: str
    seeds: list[SeedPair]

    def describe(self) -> list[str]:
        """Return the comparison as lines of text."""
        return describe(self)

    @property
    def is_inside(self) -> bool | None:
        """Whether the difference is within the tolerance; None if that is not known."""
        if self.tolerance is None:
            return None
        return abs(self.difference) <= self.tolerance + 1e-9  # a mean has its last digit rounded


def reproductions(recorded: Sequence[Run], here: Sequence[Run]) -> list[Reproduction]:
    """Return a comparison for every row that has finished runs in both."""
    done, again = ([run for run in runs if run.done] for runs in (recorded, here))
    names = labels({run.row: run.config.method.as_mapping() for run in recorded})
    found = []
    for row in dict.fromkeys(run.row for run in again):
        known = {run.seed: run for run in done if run.row == row}
        new = {run.seed: run for run in again if run.row == row}
        if known:
            shared = [_pair(known[seed], new[seed]) for seed in new if seed in known]
            found.append(
                Reproduction(_spread(known.values()), _spread(new.values()), names[row], shared)
            )
    return found


def describe(row: Reproduction) -> list[str]:
    """Return the comparison of a row as lines of text."""
    lines = [
        row.label,
        f"  recorded  {_format_accuracy(row.recorded)}",
        f"  here      {_format_accuracy(row.here)}",
        f"  {_verdict(row)}",
    ]
    for seed in row.seeds:
        there, here = f" on {seed.recorded_on}", f" on {seed.here_on}"
        both = f", both{here}" if there == here else ""
        lines.append(
            f"  seed {seed.seed}: {seed.recorded:.2f} recorded{'' if both else there}, "
            f"{seed.here:.2f} here{'' if both else here}{both}: "
            + ("the same R" if seed.identical else f"{seed.here - seed.recorded:+.2f}")
        )
    return lines


def _verdict(row: Reproduction) -> str:
    if row.tolerance is None:
        count = f"{row.recorded.seeds} recorded, an interval needs {FEWEST_SEEDS}"
        return f"{row.difference:+.2f}; {TOO_FEW_SEEDS}: {count}"
    word = "inside" if row.is_inside else "OUTSIDE"
    return f"{word}: {row.difference:+.2f}, expected within ± {row.tolerance:.2f} (95 %)"


def _pair(recorded: Run, here: Run) -> SeedPair:
    return SeedPair(
        seed=here.seed,
        recorded=accuracy(recorded.accuracy),
        here=accuracy(here.accuracy),
        recorded_on=recorded.environment.device or "an unknown device",
        here_on=here.environment.device or "an unknown device",
        identical=recorded.accuracy == here.accuracy,
    )


def _spread(runs: Iterable[Run]) -> Spread:
    values = [accuracy(run.accuracy) for run in runs]
    return Spread(*mean_and_spread(values), len(values))


def _format_accuracy(value: Spread) -> str:
    mean, sd = format_spread(value)
    return f"ACC {mean}{f' ± {sd}' if sd else ''} over {value.seeds} seed{'s' * (value.seeds > 1)}"
