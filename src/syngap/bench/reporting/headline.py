"""The finding of an experiment in a sentence or a few, from differences over shared seeds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from syngap.bench.config.experiment import complete_method
from syngap.bench.reporting.rows import Row
from syngap.bench.reporting.statistics import (
    Spread,
    format_number,
    half_width,
    paired_difference,
    time_ratio,
    verdict,
)

__all__ = [
    "Comparison",
    "below_untuned",
    "best_row",
    "compare",
    "compare_untuned",
    "conclusion",
    "featured",
    "headline",
    "remarks",
    "rivals",
    "strongest",
    "subject",
]

_SUBJECT = "syngap"
_RIVALS = ("er", "sgd")
_SHORTEST = 1.0  # seconds; what shorter runs take says little of the method


@dataclass(frozen=True)
class Comparison:
    """One row less another, seed by seed.

    Args:
        rival: the label of the other.
        seeds: how many finished seeds they share.
        accuracy: difference in ACC, in points.
        forgetting: difference in FM, in points.
        time: training time as a multiple of the other's, None where a run takes below a second.
    """

    rival: str
    seeds: int
    accuracy: Spread | None
    forgetting: Spread | None
    time: float | None


def compare(ours: Row, theirs: Row) -> Comparison:
    """Return how `ours` differs from `theirs` over the seeds that both have finished."""
    a, b = ours.values, theirs.values
    times = [*a["seconds"].values(), *b["seconds"].values()]
    is_long = min(times, default=0.0) >= _SHORTEST
    return Comparison(
        rival=theirs.label,
        seeds=len({*ours.seeds} & {*theirs.seeds}),
        accuracy=paired_difference(a["ACC"], b["ACC"]),
        forgetting=paired_difference(a["FM"], b["FM"]),
        time=time_ratio(a["seconds"], b["seconds"]) if is_long else None,
    )


def subject(rows: Sequence[Row]) -> Row | None:
    """Return the row that the report is about: SynGAP's, the best of them if there are several."""
    return _find(rows, _SUBJECT)


def featured(rows: Sequence[Row]) -> Row | None:
    """Return the row whose figures come first: SynGAP's, the most accurate where there is none."""
    return subject(rows) or best_row(_continual(rows))


def rivals(rows: Sequence[Row]) -> list[Row]:
    """Return what the featured row is compared with: ER, SGD and the best of all other methods."""
    best = strongest(rows)
    return _usual_rivals(rows) + ([best] if best else [])


def strongest(rows: Sequence[Row]) -> Row | None:
    """Return the best of the other methods, None where that is the row of ER or SGD anyway."""
    best = best_row(_others(rows))
    return None if best in _usual_rivals(rows) else best


def best_row(rows: Sequence[Row]) -> Row | None:
    """Return the row with the highest ACC, None where no row has a finished seed."""
    finished = [row for row in rows if row.seeds]
    return max(finished, key=lambda row: fmean(row.values["ACC"].values()), default=None)


def conclusion(rows: Sequence[Row]) -> str:
    """Return in one sentence which row is most accurate, and where SynGAP stands.

    Joint training is no rival. A difference counts where its 95 % interval, seed by seed, does not
    contain zero.
    """
    running = _continual(rows)
    best = best_row(running)
    if best is None:
        done = [row.label for row in rows if row.seeds]
        return f"Only {done[0]} has finished: there is nothing to compare yet." if done else _NONE
    ours = subject(rows)
    if not running[1:]:
        return f"{_at(best)} is the only method that has finished."
    if ours is None or ours is best:
        rest = [row for row in running if row is not best]
        second = best_row([row for row in rest if row.method != best.method] or rest)
        assert second is not None
        return _lead(best, second)
    if verdict(compare(ours, best).accuracy) != -1:
        return _lead(best, ours)
    baseline = _find(rows, _RIVALS[0])
    stands = "is less accurate"
    if baseline and baseline is not best:
        sign = verdict(compare(ours, baseline).accuracy)
        stands = _STANDS[sign].format(_in_list(baseline.label))
    return f"{_at(best)} is most accurate; {_at(ours)} {stands}."


_STANDS = {
    1: "is more accurate than {}",
    0: "and {} do not differ significantly",
    -1: "is less accurate than {}",
    None: "is less accurate",
}


def _lead(best: Row, other: Row) -> str:
    """Return in one sentence whether the most accurate row is ahead of another one."""
    first, second = f"{_at(best)} is most accurate", _at(other)
    return {
        1: f"{first}, significantly ahead of {second}.",
        0: f"{first}, but {second} does not differ significantly from it.",
        -1: f"{first}, but less accurate than {second} on the seeds that both have finished.",
        None: f"{first}, before {second}; too few seeds for a test.",
    }[verdict(compare(best, other).accuracy)]


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return what to know beside the numbers: who has no memory, other rates, what diverged."""
    ours = featured(rows)
    settings = _settings(ours, rivals(rows)) if ours else []
    return [*settings, *_all_diverged(rows)]


def headline(rows: Sequence[Row]) -> str:
    """Return the finding in a few sentences, whichever way it went and whatever is missing."""
    ours, theirs = featured(rows), rivals(rows)
    if ours is None or not theirs:
        return " ".join([conclusion(rows), *_all_diverged(rows)])
    found = [compare(ours, row) for row in theirs]
    decided = [each for each in found if verdict(each.accuracy) is not None]
    few = [] if not decided else [_in_list(each.rival) for each in found if each not in decided]
    sentences = [
        conclusion(rows),
        _sentence(
            f"{_in_list(ours.label)} forgets ",
            _FORGETS,
            {each.rival: each.forgetting for each in decided},
        ),
        _sentence("It ends ", _ENDS, {each.rival: each.accuracy for each in decided}),
        _cost(_in_list(ours.label), found),
        *_settings(ours, theirs),
        *(f"Too few shared seeds to compare it with {rival}." for rival in few),
        *_all_diverged(rows),
    ]
    return " ".join(filter(None, sentences))


def below_untuned(
    rows: Sequence[Row], searched: Mapping[str, Collection[str]], others: Sequence[Row] = ()
) -> str:
    """Return which tuned rows end below an untuned one by more than chance, "" for none.

    Args:
        rows: of the tuned table.
        searched: tuned row → the options that were searched.
        others: rows of untuned tables.
    """
    found = compare_untuned(rows, searched, others)
    below = [text for texts in found.values() for text in texts]
    return (
        f"Tuned rows end below untuned ones by more than chance: {_join(below)}." if below else ""
    )


def compare_untuned(
    rows: Sequence[Row], searched: Mapping[str, Collection[str]], others: Sequence[Row] = ()
) -> dict[str, list[str]]:
    """Return for each tuned row that has untuned ones beside it those that it ends below.

    A search has failed there. The difference is paired over the seeds that both have, and its 95 %
    interval is below zero. An untuned row is one of the same method with its defaults in the place
    of what was searched, all else alike, or one of `others` with the same name.

    Args:
        rows: of the tuned table.
        searched: tuned row → the options that were searched.
        others: rows of untuned tables.
    """
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.name not in searched:
            continue
        defaults = complete_method({"name": row.method})
        changes = {name: defaults.get(name) for name in searched[row.name]}
        untuned = complete_method({**row.options, **changes})
        alike = [other for other in (*rows, *others) if complete_method(other.options) == untuned]
        named = [other for other in others if other.name == row.name and other not in alike]
        for other in (*alike, *named):
            difference = paired_difference(row.values["ACC"], other.values["ACC"])
            if difference and (sign := verdict(difference)) is not None:
                found.setdefault(row.name, [])
                if sign == -1:
                    interval = Spread(difference.mean, half_width(difference))
                    points = f"{format_number(interval, sign='+')} points, 95 %"
                    of = f" of {other.experiment}" if other in others else ""
                    text = f"{_in_list(row.label, points)} below {_in_list(other.label)}{of}"
                    found[row.name].append(text)
    return found


_NONE = "No run has finished yet."
_FORGETS = {-1: "less than", 0: "not significantly more or less than", 1: "more than"}
_ENDS = {1: "more accurate than", 0: "not significantly above or below", -1: "less accurate than"}


def _sentence(
    begins: str, words: Mapping[int, str], differences: Mapping[str, Spread | None]
) -> str:
    """Return one sentence that names every rival after the words for its verdict."""
    parts = []
    unit = " points, 95 %"  # given once
    for sign, phrase in words.items():
        names = []
        for rival, difference in differences.items():
            if difference and verdict(difference) == sign:
                interval = Spread(difference.mean, half_width(difference))
                number = f"{format_number(interval, sign='+')}{unit}"
                names.append(_in_list(rival, number))
                unit = ""
        if names:
            parts.append(f"{phrase} {_join(names)}")
    return f"{begins}{_join(parts, last=', and ')}." if parts else ""


def _in_list(label: str, more: str = "") -> str:
    """Return a label for a list in a sentence: its options in brackets, so without a comma.

    Examples:
        >>> _in_list("ER"), _in_list("ER, lr 0.1"), _in_list("ER, lr 0.1", "+3.0 ± 1.2")
        ('ER', 'ER (lr 0.1)', 'ER (lr 0.1; +3.0 ± 1.2)')
    """
    method, _, options = label.partition(", ")
    inside = "; ".join(filter(None, [options, more]))
    return f"{method} ({inside})" if inside else method


def _join(parts: Sequence[str], last: str = " and ") -> str:
    """Return parts as a list in a sentence.

    Examples:
        >>> _join(["ER"]), _join(["ER", "SGD", "DER++"])
        ('ER', 'ER, SGD and DER++')
    """
    return last.join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _cost(ours: str, found: Sequence[Comparison]) -> str:
    known = [(each.rival, each.time) for each in found if each.time is not None]
    times = [(rival, f"{time:.1f}" if time < 9.95 else f"{time:.0f}") for rival, time in known]
    parts = [f"{time}\N{NO-BREAK SPACE}× that of {_in_list(rival)}" for rival, time in times]
    return f"The training time of {ours} is {_join(parts)}." if parts else ""


def _settings(ours: Row, theirs: Sequence[Row]) -> list[str]:
    """Return in what else the compared rows differ: memories and learning rates."""
    without = [_in_list(row.label) for row in theirs if not row.has_memory]
    sentences = []
    if ours.has_memory and without:
        have = "have" if without[1:] else "has"
        sentences.append(f"{_in_list(ours.label)} has a memory; {_join(without)} {have} none.")
    rows = (ours, *theirs)
    sentences += _differing("Memories", "buffer", [row for row in rows if row.has_memory])
    return sentences + _differing("Learning rates", "lr", rows)


def _differing(what: str, option: str, rows: Sequence[Row]) -> list[str]:
    """Return a sentence with the values of an option, where not all rows have the same."""
    values = {row.label: str(row.options[option]) for row in rows if option in row.options}
    if len({*values.values()}) < 2:
        return []
    named = [
        _in_list(label) + ("" if f", {option} " in label else f" {value}")
        for label, value in values.items()
    ]
    return [f"{what} differ: {_join(named)}."]


def _all_diverged(rows: Sequence[Row]) -> list[str]:
    """Return which rows have no number because all of their runs diverged."""
    found = [_in_list(r.label) for r in rows if r.divergences and not r.seed_note(r.divergences)]
    return [f"{_join(found)} diverged with every seed."] if found else []


def _at(row: Row) -> str:
    """Return a row's label with its accuracy: "ER (87.7 %)"."""
    ends = row.spread("ACC")
    method, *options = row.label.split(", ")
    label = ", ".join([method, *options[:2], *("…" for _ in options[2:3])])  # short enough to read
    return _in_list(label, f"{ends.mean:.1f} %" if ends else "")


def _continual(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.seeds and not row.joint]


def _others(rows: Sequence[Row]) -> list[Row]:
    ours = featured(rows)
    return [row for row in _continual(rows) if ours is None or row.method != ours.method]


def _usual_rivals(rows: Sequence[Row]) -> list[Row]:
    return [row for name in _RIVALS if (row := _find(_others(rows), name))]


def _find(rows: Sequence[Row], method: str) -> Row | None:
    named = [row for row in _continual(rows) if row.name == method]
    return best_row(named or [row for row in _continual(rows) if row.method == method])
