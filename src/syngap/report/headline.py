"""Does it forget less, and what does it cost? The answer in words, from paired seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syngap.metrics import mean_and_spread
from syngap.report.differences import half, paired, times
from syngap.report.rows import Row, Spread

__all__ = ["Against", "against", "headline", "rivals", "strongest", "subject"]

_SUBJECT = "syngap"
_RIVALS = ("er", "sgd")


@dataclass(frozen=True)
class Against:
    """One row less another, seed by seed.

    Args:
        rival: the label of the other.
        seeds: how many finished seeds they share.
        accuracy: difference in ACC, in points.
        forgetting: difference in FM, in points.
        time: training time as a multiple of the other's.
    """

    rival: str
    seeds: int
    accuracy: Spread | None
    forgetting: Spread | None
    time: float | None


def subject(rows: Sequence[Row]) -> Row | None:
    """Return the row that the page is about: SynGAP's, the best of them if there are several."""
    return _find(rows, _SUBJECT)


def rivals(rows: Sequence[Row]) -> list[Row]:
    """Return what it is compared with: ER, SGD and, whatever it is, the best of the others."""
    best = strongest(rows)
    return _usual(rows) + ([best] if best else [])


def strongest(rows: Sequence[Row]) -> Row | None:
    """Return the best of the others, None where that is the row of ER or SGD in any case."""
    others = _others(rows)
    best = _best(others) if others else None
    return None if best in _usual(rows) else best


def _usual(rows: Sequence[Row]) -> list[Row]:
    return [row for name in _RIVALS if (row := _find(_others(rows), name))]


def _others(rows: Sequence[Row]) -> list[Row]:
    return [row for row in _continual(rows) if row.method != _SUBJECT]


def against(ours: Row, theirs: Row) -> Against:
    """Return how `ours` differs from `theirs` over the seeds that both have finished."""
    shared = [seed for seed in ours.seeds if seed in theirs.seeds]
    return Against(
        rival=theirs.label,
        seeds=len(shared),
        accuracy=paired(ours, theirs, "ACC"),
        forgetting=paired(ours, theirs, "FM"),
        time=times(ours, theirs),
    )


def verdict(difference: Spread | None) -> int | None:
    """Return the sign of a difference, 0 where its 95 % interval holds zero, None for one seed.

    Examples:
        >>> verdict(Spread(2.0, 1.0, 5)), verdict(Spread(2.0, 1.0, 3)), verdict(Spread(9.0, None))
        (1, 0, None)
    """
    width = None if difference is None else half(difference)
    if difference is None or width is None:
        return None
    if abs(difference.mean) <= width:
        return 0
    return 1 if difference.mean > 0 else -1


def headline(rows: Sequence[Row], *, numbers: bool = True) -> str:
    """Return the answer in a few sentences, whichever way it went and whatever is missing.

    Args:
        rows: the experiment's.
        numbers: whether differences are given, in points, or only which way they go.
    """
    continual = _continual(rows)
    if not continual:
        done = [row.label for row in rows if row.seeds]
        return f"Only {done[0]} has finished: there is nothing to compare yet." if done else _NONE
    ours, theirs = subject(rows), rivals(rows)
    if ours is None:
        best = _best(continual)
        highest = f"Of the others, {best.label} ends highest: {_stands(best)}."
        return f"There is no finished run of SynGAP. {highest}"
    if not theirs:
        alone = "No other method has finished to compare it with."
        return f"{ours.label} ends at {_stands(ours)}. {alone}"
    found = [against(ours, row) for row in theirs]
    unlike = _unlike(ours, theirs)
    decided = [a for a in found if verdict(a.accuracy) is not None]
    if not decided:
        stand = [
            f"{_spoken(row.label)} ends at {_number(row.spread('ACC'))} %"
            for row in (ours, *theirs)
        ]
        return f"Too few seeds for a verdict: {_listed(stand)}. {_cost(found)} {unlike}".strip()
    sentences = [
        _sentence(f"{ours.label} forgets ", _FORGETS, _differences(decided, "forgetting"), numbers),
        _sentence("It ends ", _ENDS, _differences(decided, "accuracy"), numbers),
        _cost(found),
        unlike,
        *(
            f"Too few shared seeds to compare it with {_spoken(a.rival)}."
            for a in found
            if a not in decided
        ),
        _lost(rows),
    ]
    return " ".join(filter(None, sentences))


_NONE = "No run has finished yet."
_FORGETS = {-1: "less than", 0: "not measurably more or less than", 1: "more than"}
_ENDS = {1: "more accurate than", 0: "not measurably above or below", -1: "less accurate than"}


def _differences(found: Sequence[Against], kind: str) -> dict[str, Spread | None]:
    return {a.rival: getattr(a, kind) for a in found}


def _sentence(
    begins: str, words: dict[int, str], differences: dict[str, Spread | None], numbers: bool
) -> str:
    """Return one sentence that names every rival after the words for its verdict."""
    parts = []
    unit = " points, 95 %"  # said once
    for sign, phrase in words.items():
        names = []
        for rival, difference in differences.items():
            if difference and verdict(difference) == sign:
                wide = Spread(difference.mean, half(difference))
                names.append(_spoken(rival, f"{_number(wide, '+')}{unit}" if numbers else ""))
                unit = ""
        if names:
            parts.append(f"{phrase} {_listed(names)}")
    return f"{begins}{_listed(parts, last=', and ')}." if parts else ""


def _spoken(label: str, more: str = "") -> str:
    """Return a label as it can stand in a list, whose commas it must not add to.

    Examples:
        >>> _spoken("ER"), _spoken("ER, lr 0.1"), _spoken("ER, lr 0.1", "+3.0 ± 1.2")
        ('ER', 'ER (lr 0.1)', 'ER (lr 0.1; +3.0 ± 1.2)')
    """
    method, _, options = label.partition(", ")
    inside = "; ".join(filter(None, [options, more]))
    return f"{method} ({inside})" if inside else method


def _cost(found: Sequence[Against]) -> str:
    known = [(a.rival, a.time) for a in found if a.time is not None]
    times = [(rival, f"{time:.1f}" if time < 9.95 else f"{time:.0f}") for rival, time in known]
    parts = [f"{time}\N{NO-BREAK SPACE}× that of {_spoken(rival)}" for rival, time in times]
    return f"Its training time is {_listed(parts)}." if parts else ""


def _unlike(ours: Row, theirs: Sequence[Row]) -> str:
    """Return what else sets the rows apart that are compared: a memory, and learning rates."""
    bare = [_spoken(row.label) for row in theirs if not row.options.get("buffer")]
    sentences = []
    if ours.options.get("buffer") and bare:
        have = "have" if bare[1:] else "has"
        sentences.append(f"{_spoken(ours.label)} has a memory; {_listed(bare)} {have} none.")
    rates = {row.label: str(row.options["lr"]) for row in (ours, *theirs) if "lr" in row.options}
    if len({*rates.values()}) > 1:
        said = {label: "" if ", lr " in label else f" {rate}" for label, rate in rates.items()}
        named = [f"{_spoken(label)}{rate}" for label, rate in said.items()]
        sentences.append(f"Learning rates differ: {_listed(named)}.")
    return " ".join(sentences)


def _lost(rows: Sequence[Row]) -> str:
    """Return which rows have no number because all of their runs diverged."""
    lost = [_spoken(row.label) for row in rows if row.diverged and not row.few(row.diverged)]
    return f"{_listed(lost)} diverged with every seed." if lost else ""


def _stands(row: Row) -> str:
    forgetting = row.spread("FM")
    forgotten = f", {_number(forgetting)} points forgotten" if forgetting else ""
    return f"{_number(row.spread('ACC'))} % accuracy{forgotten}"


def _number(value: Spread | None, sign: str = "-") -> str:
    if value is None:
        return "?"
    mean = f"{round(value.mean, 1) + 0.0:{sign}.1f}".replace("-", "−")
    return mean + ("" if value.sd is None else f" ± {value.sd:.1f}")


def _listed(parts: Sequence[str], last: str = " and ") -> str:
    """Return parts as a list in a sentence.

    Examples:
        >>> _listed(["ER"]), _listed(["ER", "SGD", "DER++"])
        ('ER', 'ER, SGD and DER++')
    """
    return last.join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _continual(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.seeds and not row.joint]


def _find(rows: Sequence[Row], method: str) -> Row | None:
    named = [row for row in _continual(rows) if row.name == method]
    same = named or [row for row in _continual(rows) if row.method == method]
    return _best(same) if same else None


def _best(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: mean_and_spread(list(row.values["ACC"].values()))[0])
