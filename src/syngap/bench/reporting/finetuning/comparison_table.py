"""The table of a fine-tuning experiment, for a terminal and as Markdown, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from syngap.bench.errors import UserError
from syngap.bench.finetuning.frontier import (
    LEVELS,
    as_trained,
    best_answers,
    exact_match,
    losses_at_best,
    relative_forgetting,
)
from syngap.bench.finetuning.point import Point
from syngap.bench.options import shown
from syngap.bench.reporting.finetuning.comparison import (
    Comparison,
    Outcome,
    Ratios,
    Tried,
)
from syngap.messages import count_of

__all__ = [
    "SHORT",
    "answers",
    "before_and_after",
    "forgetting_of",
    "headline",
    "markdown",
    "notes",
    "relative_to_adamw",
    "table",
    "whole_table",
]

SHORT = (
    "Losses are those on test data, as trained, at the rate with the lowest new loss. Forgets: the "
    "rise of an old loss when the new loss is as low as AdamW's; AdamW's rise is 1. Of several old "
    "losses it is the one that rises most. Interpolated: the same after interpolation with the "
    "start. –: learned too little to compare."
)
_GIB = 2**30
_HOW = {"trained": "as trained", "interpolated": "interpolated", "equal_time": "equal time"}


@dataclass(frozen=True)
class _Column:
    """A column: its name in a query, its heading, and the text of a method's cell."""

    name: str
    head: str
    text: Callable[[Outcome], str]


def _columns(found: Comparison, level: float | None = None) -> list[_Column]:
    """Return every column.

    Args:
        found: the comparison.
        level: of AdamW's best gain, at which forgetting is taken; None is the mean over all.
    """
    made = [
        _Column("trials", "trials", lambda one: str(one.trials)),
        _Column("seeds", "seeds", lambda one: str(len(one.seeds))),
        _Column("new", "best new loss ↓", lambda one: _summary(one.new_losses, 3)),
        _Column("gain", "gain / AdamW ↑", lambda one: _summary(one.gains)),
    ]
    if _has_answers(found):
        made.append(_Column("exact", f"{found.task.exact} ↑", lambda one: _summary(one.exact)))
    made += [_right_answers(found, kind) for kind in _answered(found)]
    for name, how in _HOW.items():
        if level is None or name != "equal_time":
            made += [_forgetting(found, kind, name, how, level) for kind in found.old]
    return [
        *made,
        _Column("rates", "good rates", lambda one: _range(one.rates)),
        _Column("s", "s", lambda one: f"{one.seconds:.1f}"),
        _Column("GiB", "GiB", lambda one: f"{one.memory / _GIB:.2f}" if one.memory else "–"),
    ]


def _right_answers(found: Comparison, kind: str) -> _Column:
    head = f"{kind}, {found.task.exact} ↑"
    return _Column(f"{kind}.exact", head, lambda one: _summary(one.old_exact[kind]))


def _forgetting(found: Comparison, kind: str, name: str, how: str, level: float | None) -> _Column:
    def text(one: Outcome) -> str:
        return forgetting_of(found, one.family, kind, name, level)

    return _Column(f"{kind}.{name}", f"{kind}, {how} ↓", text)


def _has_answers(found: Comparison) -> bool:
    return any(value is not None for outcome in found.outcomes for value in outcome.exact)


def _answered(found: Comparison) -> list[str]:
    """Return the old kinds of which shares of right answers are known."""
    return [
        kind
        for kind in found.old
        if any(value is not None for outcome in found.outcomes for value in outcome.old_exact[kind])
    ]


def before_and_after(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return heads and lines of a short table: losses before, those of each method, and a ratio.

    Losses, and right answers where there are any to give, are means over seeds, as trained, where
    the new loss is lowest.
    """
    old = [f"old: {kind} ↓" for kind in found.old]
    answered = [f"{found.task.exact} ↑"] if _has_answers(found) else []
    heads = ["method", f"new: {found.new} ↓", *answered, *old, "forgets ↓", "interpolated ↓", "s"]

    def means(of_seeds: Sequence[Sequence[Point]]) -> list[str]:
        ends = [losses_at_best(points) for points in of_seeds]
        right = [_mean([exact_match(points) for points in of_seeds])] if answered else []
        new, *kept = (_mean([end[name] for end in ends], 3) for name in (None, *found.old))
        return [new, *right, *kept]

    starts = [[tried.start] for tried in found.tried[found.baseline].values()]
    lines = [["before", *means(starts), "", "", ""]]
    for outcome in found.outcomes:
        trials = [found.tried[outcome.family][seed] for seed in outcome.seeds]
        after = means([as_trained(tried.points) for tried in trials])
        mosts = (_most_forgotten(ratios) for ratios in (outcome.trained, outcome.interpolated))
        ratios = ["–" if most is None else f"{most[0]:.2f}" for most in mosts]
        lines.append([outcome.label, *after, *ratios, f"{outcome.seconds:.1f}"])
    return heads, lines


def table(found: Comparison) -> Table:
    """Return the short table for a terminal."""
    shown = Table(
        title=f"test losses before and after learning {found.new}",
        caption=f"{SHORT} The page and --markdown have more.",
    )
    (first, *heads), lines = before_and_after(found)
    shown.add_column(first, no_wrap=True)
    for head in heads:
        shown.add_column(head, justify="right")
    for line in lines:
        shown.add_row(*line)
    return shown


def markdown(
    found: Comparison,
    rows: Sequence[str] | None = None,
    more: Sequence[str] = (),
    *,
    only: Sequence[str] | None = None,
    level: float | None = None,
) -> str:
    """Return the table as Markdown, with what a reader has to know below it.

    Args:
        found: the comparison.
        rows: methods; None is all.
        more: sentences to add below.
        only: names of columns; None is all. The definitions of columns are then not below it.
        level: of AdamW's best gain, at which forgetting is taken; None is the mean over all.
    """
    heads, lines = whole_table(found, rows, only, level)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
    said = [] if only else definitions(found, level)
    if only and level is not None:
        said = [f"Forgetting at {100 * level:g} % of AdamW's best gain."]
    said += [*left_out(found, rows), *more]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *said]) + "\n"


def whole_table(
    found: Comparison,
    rows: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    level: float | None = None,
) -> tuple[list[str], list[list[str]]]:
    """Return headings and lines, those of `markdown`."""
    by_name = {column.name: column for column in _columns(found, level)}
    by_row = {outcome.family: outcome for outcome in found.outcomes}
    for names, known in ((rows, by_row), (only, by_name)):
        for name in names or ():
            _check_known(name, known)
    shown = [by_name[name] for name in only or by_name]
    outcomes = [by_row[row] for row in rows or by_row]
    lines = [[one.label, *(column.text(one) for column in shown)] for one in outcomes]
    return ["method", *(column.head for column in shown)], lines


def answers(found: Comparison, kind: str, row: str = "", measure: str = "") -> str:
    """Return right answers beside the rise of an old loss, time and memory, of weights as trained.

    These are the terms of peft's own comparison of methods.

    Args:
        found: the comparison.
        kind: of old data.
        row: a method, whose `measure` is returned in place of the whole table.
        measure: "exact", "rise", "s" or "GiB".
    """
    _check_known(kind, found.old)
    measures = ("exact", "rise", "s", "GiB")
    by_row = {one.family: _answers_of(one, found, kind) for one in found.outcomes}
    if row:
        _check_known(row, by_row)
        _check_known(measure, measures)
        return by_row[row][measures.index(measure)]
    lines = [["", f"{found.task.exact} ↑", f"rise on {kind} ↓", "s", "GiB"]]
    lines.append(["---", *["---:"] * len(measures)])
    lines += [[one.label, *by_row[one.family]] for one in found.outcomes]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _answers_of(one: Outcome, found: Comparison, kind: str) -> list[str]:
    trials = [found.tried[one.family][seed] for seed in one.seeds]
    ends = [best_answers(as_trained(each.points), each.start, kind) for each in trials]
    right = [None if end is None else end[0] for end in ends]
    rises = [None if end is None else end[1] for end in ends]
    memory = f"{one.memory / _GIB:.1f}" if one.memory else "–"
    return [_summary(right), _summary(rises), f"{one.seconds:.0f}", memory]


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
        _check_known(name, known)
    if level is None:
        return _summary(allowed[at](by_row[row])[kind])
    choices: dict[str, Callable[[Tried], list[Point]]] = {
        "trained": lambda tried: as_trained(tried.points),
        "interpolated": lambda tried: tried.points,
    }
    _check_known(at, choices)
    ratios = []
    for seed in by_row[row].seeds:
        tried, adamw = found.tried[row][seed], as_trained(found.tried[found.baseline][seed].points)
        points = choices[at](tried)
        ratios.append(relative_forgetting(points, adamw, tried.start, kind, [level]))
    return _summary(ratios)


def relative_to_adamw(found: Comparison, row: str, measure: str) -> str:
    """Return a method's best gain, or its time or memory, relative to AdamW's."""
    by_row = {outcome.family: outcome for outcome in found.outcomes}
    _check_known(row, by_row)
    _check_known(measure, ("gain", "time", "memory"))
    one, adamw = by_row[row], by_row[found.baseline]
    if measure == "gain":
        return _summary(one.gains)
    if measure == "time":
        return f"{one.seconds / adamw.seconds:.1f}"
    return f"{one.memory / adamw.memory:.1f}" if adamw.memory else "–"


def _check_known(name: str, known: Collection[str]) -> None:
    if name not in known:
        raise UserError(f"unknown {shown(name)}; there are {', '.join(known)}")


def notes(found: Comparison) -> list[str]:
    """Return what a reader of the whole table has to know, a sentence or two each."""
    return [*definitions(found), *left_out(found)]


def definitions(found: Comparison, level: float | None = None) -> list[str]:
    """Return what the columns mean."""
    where = "mean over 70, 80, 90 and 95 %" if level is None else f"at {100 * level:g} %"
    return [
        f"Forgetting is the rise of {found.task.rise}, relative to AdamW as trained, at equal "
        f"new loss: {where} of AdamW's best gain, then over seeds (range). "
        "Where the old loss falls it is 0. A dash: a level is not reached, or AdamW forgets "
        "nothing there.",
        "Points are chosen on one half of the test data and evaluated on the other, both ways. "
        "Interpolated: each evaluation with every share of the way from the start. Equal time: "
        "points within AdamW's seconds, set-up counted.",
        "Good rates: new loss within 5 % of the method's best, and at most twice its least "
        f"forgetting on {found.old[0]} at 90 % of AdamW's gain, with every seed.",
    ]


def left_out(found: Comparison, rows: Sequence[str] | None = None) -> list[str]:
    """Return what is not in the numbers of these rows; None is all."""
    diverged = [
        f"{one.label} {one.diverged}"
        for one in found.outcomes
        if one.diverged and (not rows or one.family in rows)
    ]
    missing = [
        f"{family}, {reason}"
        for family, reasons in found.missing.items()
        if not rows or family in rows
        for reason in reasons
    ]
    said = []
    if diverged:
        said.append(f"Evaluations that were not finite are left out: {', '.join(diverged)}.")
    if missing:
        said.append(f"Not in these numbers: {'; '.join(missing)}.")
    return said


def headline(found: Comparison) -> str:
    """Return in a sentence which methods forget least of what they forget most."""
    rivals = [outcome for outcome in found.outcomes if outcome.method != "replay"]
    mosts = [(_most_forgotten(one.interpolated), one) for one in rivals]
    known = [(most, one) for most, one in mosts if most is not None]
    if not known:
        return f"No method reached every level of AdamW's gain on {found.new}."
    (amount, kind), best = min(known, key=lambda each: each[0])
    none = [one for (most, _), one in known if f"{most:.2f}" == "0.00"]
    if none:
        kinds = list(_means(none[0].interpolated))
        whose = "" if len(kinds) == len(found.old) else f" of {' and '.join(kinds)}"
        verb = "forget" if len(none) > 1 else "forgets"
        said = f"{_listed(none)} with interpolation {verb} nothing{whose}"
        best = max(none, key=lambda one: fmean(one.gains))
    else:
        said = f"{best.label} with interpolation forgets least, {amount:.2f} of what AdamW forgets "
        said += f"of {kind},"
    levels = f"{100 * min(LEVELS):.0f} to {100 * max(LEVELS):.0f} %"
    said += f" at {levels} of AdamW's best gain on {found.new}"
    said += f"; of these, {best.label} learns most" if len(none) > 1 else ""
    return f"{said} ({count_of(len(best.seeds), 'seed')})."


def _listed(outcomes: Sequence[Outcome]) -> str:
    *names, last = (outcome.label for outcome in outcomes)
    return f"{', '.join(names)} and {last}" if names else last


def _most_forgotten(ratios: Ratios) -> tuple[float, str] | None:
    """Return the largest forgetting relative to AdamW over kinds of old data, and its kind."""
    return max(((mean, kind) for kind, mean in _means(ratios).items()), default=None)


def _means(ratios: Ratios) -> dict[str, float]:
    """Return forgetting by kind of old data, where every seed has a ratio to AdamW's."""
    by_kind = {kind: _whole(values) for kind, values in ratios.items()}
    return {kind: fmean(numbers) for kind, numbers in by_kind.items() if numbers}


def _whole(values: Sequence[float | None]) -> list[float]:
    """Return the values where every seed has one, else nothing."""
    numbers = [value for value in values if value is not None]
    return numbers if len(numbers) == len(values) else []


def _mean(values: Sequence[float | None], digits: int = 2) -> str:
    numbers = _whole(values)
    return f"{fmean(numbers):.{digits}f}" if numbers else "–"


def _summary(values: Sequence[float | None], digits: int = 2) -> str:
    """Return the mean over seeds and the range; a dash where a seed has no value.

    Examples:
        >>> _summary([0.5, 0.25]), _summary([0.5, None]), _summary([0.5])
        ('0.38 (0.25 to 0.50)', '– (1 of 2)', '0.50')
    """
    numbers = _whole(values)
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
