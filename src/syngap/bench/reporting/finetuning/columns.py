"""The columns of a fine-tuning experiment's table, and the text of their cells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from syngap.bench.errors import UserError
from syngap.bench.finetuning.frontier import as_trained, relative_forgetting
from syngap.bench.finetuning.point import Point
from syngap.bench.options import shown
from syngap.bench.reporting.finetuning.comparison import Comparison, Outcome, Ratios, Tried

__all__ = [
    "GIB",
    "Column",
    "check_known",
    "columns",
    "forgetting_of",
    "has_answers",
    "mean",
    "of_all_seeds",
    "summary",
]

GIB = 2**30
_HOW = {"trained": "as trained", "interpolated": "interpolated", "equal_time": "equal time"}


@dataclass(frozen=True)
class Column:
    """A column: its name in a query, its heading, and the text of a method's cell."""

    name: str
    head: str
    text: Callable[[Outcome], str]


def columns(found: Comparison, level: float | None = None) -> list[Column]:
    """Return every column.

    Args:
        found: the comparison.
        level: of AdamW's best gain, at which forgetting is taken; None is the mean over all.
    """
    made = [
        Column("trials", "trials", lambda one: str(one.trials)),
        Column("seeds", "seeds", lambda one: str(len(one.seeds))),
        Column("new", "best new loss ↓", lambda one: summary(one.new_losses, 3)),
        Column("gain", "gain / AdamW ↑", lambda one: summary(one.gains)),
    ]
    if has_answers(found):
        made.append(Column("exact", f"{found.task.exact} ↑", lambda one: summary(one.exact)))
    made += [_right_answers(found, kind) for kind in _answered(found)]
    for name, how in _HOW.items():
        if level is None or name != "equal_time":
            made += [_forgetting(found, kind, name, how, level) for kind in found.old]
    return [
        *made,
        Column("rates", "good rates", lambda one: _range(one.rates)),
        Column("s", "s", lambda one: f"{one.seconds:.1f}"),
        Column("GiB", "GiB", lambda one: f"{one.memory / GIB:.2f}" if one.memory else "–"),
    ]


def _right_answers(found: Comparison, kind: str) -> Column:
    head = f"{kind}, {found.task.exact} ↑"
    return Column(f"{kind}.exact", head, lambda one: summary(one.old_exact[kind]))


def _forgetting(found: Comparison, kind: str, name: str, how: str, level: float | None) -> Column:
    def text(one: Outcome) -> str:
        return forgetting_of(found, one.family, kind, name, level)

    return Column(f"{kind}.{name}", f"{kind}, {how} ↓", text)


def has_answers(found: Comparison) -> bool:
    """Return whether some answers were compared with the right ones."""
    return any(value is not None for outcome in found.outcomes for value in outcome.exact)


def _answered(found: Comparison) -> list[str]:
    """Return the old kinds of which shares of right answers are known."""
    return [
        kind
        for kind in found.old
        if any(value is not None for outcome in found.outcomes for value in outcome.old_exact[kind])
    ]


def forgetting_of(
    found: Comparison, row: str, kind: str, at: str, level: float | None = None
) -> str:
    """Return a method's forgetting relative to AdamW as text: mean over seeds, and range.

    Args:
        found: the comparison.
        row: the method.
        kind: of old data.
        at: "trained", "interpolated" or "equal_time".
        level: of AdamW's best gain, for "trained" and "interpolated"; None is the mean over all.
    """
    by_row = {outcome.family: outcome for outcome in found.outcomes}
    allowed: dict[str, Callable[[Outcome], Ratios]] = {
        "trained": lambda outcome: outcome.trained,
        "interpolated": lambda outcome: outcome.interpolated,
        "equal_time": lambda outcome: outcome.equal_time,
    }
    for name, known in ((row, by_row), (kind, found.old), (at, allowed)):
        check_known(name, known)
    if level is None:
        return summary(allowed[at](by_row[row])[kind])
    choices: dict[str, Callable[[Tried], list[Point]]] = {
        "trained": lambda tried: as_trained(tried.points),
        "interpolated": lambda tried: tried.points,
    }
    check_known(at, choices)
    ratios = []
    for seed in by_row[row].seeds:
        tried, adamw = found.tried[row][seed], as_trained(found.tried[found.baseline][seed].points)
        points = choices[at](tried)
        ratios.append(relative_forgetting(points, adamw, tried.start, kind, [level]))
    return summary(ratios)


def check_known(name: str, known: Collection[str]) -> None:
    """Refuse a name that is not known."""
    if name not in known:
        raise UserError(f"unknown {shown(name)}; there are {', '.join(known)}")


def of_all_seeds(values: Sequence[float | None]) -> list[float]:
    """Return the values where every seed has one, else nothing."""
    numbers = [value for value in values if value is not None]
    return numbers if len(numbers) == len(values) else []


def mean(values: Sequence[float | None], digits: int = 2) -> str:
    """Return the mean over seeds as text; a dash where a seed has no value."""
    numbers = of_all_seeds(values)
    return f"{fmean(numbers):.{digits}f}" if numbers else "–"


def summary(values: Sequence[float | None], digits: int = 2) -> str:
    """Return the mean over seeds and the range; a dash where a seed has no value.

    Examples:
        >>> summary([0.5, 0.25]), summary([0.5, None]), summary([0.5])
        ('0.38 (0.25 to 0.50)', '– (1 of 2)', '0.50')
    """
    numbers = of_all_seeds(values)
    if not numbers:
        known = len([value for value in values if value is not None])
        return f"– ({known} of {len(values)})" if len(values) > 1 else "–"
    text = f"{fmean(numbers):.{digits}f}"
    if len(numbers) > 1:
        text += f" ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"
    return text


def _range(rates: Sequence[float]) -> str:
    """Return the lowest and the highest rate, and their quotient.

    Examples:
        >>> _range([0.001, 0.003]), _range([0.1]), _range([])
        ('0.001 to 0.003 (3×)', '0.1', '–')
    """
    if len(rates) < 2:
        return f"{rates[0]:g}" if rates else "–"
    return f"{rates[0]:g} to {rates[-1]:g} ({rates[-1] / rates[0]:.2g}×)"
