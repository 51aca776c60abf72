"""The table of a fine-tuning experiment, for a terminal and as Markdown, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.table import Table

from syngap.bench.finetuning.frontier import (
    LEVELS,
    as_trained,
    best_answers,
    exact_match,
    losses_at_best,
)
from syngap.bench.finetuning.point import Point
from syngap.bench.reporting.finetuning.columns import (
    GIB,
    check_known,
    columns,
    has_answers,
    mean,
    of_all_seeds,
    summary,
)
from syngap.bench.reporting.finetuning.comparison import (
    Comparison,
    Outcome,
    Ratios,
)
from syngap.messages import count_of

__all__ = [
    "AT_LEVELS",
    "answers",
    "before_and_after",
    "headline",
    "markdown",
    "notes",
    "relative_to_adamw",
    "short_notes",
    "story",
    "table",
    "whole_table",
]

*_FIRST, _LAST = (f"{100 * level:g}" for level in LEVELS)
AT_LEVELS = f"at {', '.join(_FIRST)} and {_LAST} % of AdamW's best gain"


def short_notes(found: Comparison) -> str:
    """Return what the columns of the short table mean, and which of them the headline is about."""
    return (
        "Losses: on test data, as trained, where the new loss is lowest. Gain: how far the new "
        f"loss falls. Forgets: the rise of {found.task.rise}, divided by AdamW's rise as trained; "
        f"the mean {AT_LEVELS}; of several old losses, the largest. Interpolated: the same after "
        "interpolation with the start; the headline is about this number. –: the gain is not "
        "reached, or AdamW forgets nothing there. Points are chosen on one half of the test data "
        "and evaluated on the other, both ways; means over seeds. s: seconds of a trial, median."
    )


def before_and_after(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return heads and lines of a short table: losses before, those of each method, and a ratio.

    Losses, and right answers where there are any to give, are means over seeds, as trained, where
    the new loss is lowest.
    """
    old = [f"old: {kind} ↓" for kind in found.old]
    answered = [f"{found.task.exact} ↑"] if has_answers(found) else []
    heads = ["method", f"new: {found.new} ↓", *answered, *old, "forgets ↓", "interpolated ↓", "s"]

    def means(of_seeds: Sequence[Sequence[Point]]) -> list[str]:
        ends = [losses_at_best(points) for points in of_seeds]
        right = [mean([exact_match(points) for points in of_seeds])] if answered else []
        new, *kept = (mean([end[name] for end in ends], 3) for name in (None, *found.old))
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
        caption=f"{short_notes(found)} The page and --markdown have more.",
        caption_justify="left",
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
    by_name = {column.name: column for column in columns(found, level)}
    by_row = {outcome.family: outcome for outcome in found.outcomes}
    for names, known in ((rows, by_row), (only, by_name)):
        for name in names or ():
            check_known(name, known)
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
    check_known(kind, found.old)
    measures = ("exact", "rise", "s", "GiB")
    by_row = {one.family: _answers_of(one, found, kind) for one in found.outcomes}
    if row:
        check_known(row, by_row)
        check_known(measure, measures)
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
    memory = f"{one.memory / GIB:.1f}" if one.memory else "–"
    return [summary(right), summary(rises), f"{one.seconds:.0f}", memory]


def relative_to_adamw(found: Comparison, row: str, measure: str) -> str:
    """Return a method's best gain, or its time or memory, relative to AdamW's."""
    by_row = {outcome.family: outcome for outcome in found.outcomes}
    check_known(row, by_row)
    check_known(measure, ("gain", "time", "memory"))
    one, adamw = by_row[row], by_row[found.baseline]
    if measure == "gain":
        return summary(one.gains)
    if measure == "time":
        return f"{one.seconds / adamw.seconds:.1f}"
    return f"{one.memory / adamw.memory:.1f}" if adamw.memory else "–"


def notes(found: Comparison) -> list[str]:
    """Return what a reader of the whole table has to know, a sentence or two each."""
    return [*definitions(found), *left_out(found)]


def definitions(found: Comparison, level: float | None = None) -> list[str]:
    """Return what the columns mean."""
    where = f"mean {AT_LEVELS}" if level is None else f"at {100 * level:g} % of AdamW's best gain"
    return [
        f"Forgetting is the rise of {found.task.rise}, relative to AdamW as trained, at equal "
        f"new loss: {where}, then over seeds (range). Where the old loss falls it is 0. A dash: a "
        "level is not reached, or AdamW forgets nothing there.",
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
        said = f"{best.label} with interpolation forgets least, on average {amount:.2f} of what "
        said += f"AdamW forgets of {kind}"
    said += f" {AT_LEVELS} on {found.new}"
    said += f"; of these, {best.label} learns most" if len(none) > 1 else ""
    return f"{said} ({count_of(len(best.seeds), 'seed')})."


def story(found: Comparison) -> str:
    """Return in two sentences what was learned and what may be forgotten."""
    *others, last = found.old
    old = f"{', '.join(others)} and {last}" if others else last
    return (
        f"A model that knew {old} learned {found.new}. Forgetting is how much worse it got at the "
        "old, compared where methods have learned equally much."
    )


def _listed(outcomes: Sequence[Outcome]) -> str:
    *names, last = (outcome.label for outcome in outcomes)
    return f"{', '.join(names)} and {last}" if names else last


def _most_forgotten(ratios: Ratios) -> tuple[float, str] | None:
    """Return the largest forgetting relative to AdamW over kinds of old data, and its kind."""
    return max(((mean, kind) for kind, mean in _means(ratios).items()), default=None)


def _means(ratios: Ratios) -> dict[str, float]:
    """Return forgetting by kind of old data, where every seed has a ratio to AdamW's."""
    by_kind = {kind: of_all_seeds(values) for kind, values in ratios.items()}
    return {kind: fmean(numbers) for kind, numbers in by_kind.items() if numbers}
