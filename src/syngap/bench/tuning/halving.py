"""Successive halving over seeds: which runs a row's search needs next, from the scores so far.

    16 trials with the first seed: the method's defaults, the row as it stands, the others drawn
     4 more around the best, beyond the edge of the space where the best stands at one; twice
     8 of these 24, the best by that seed, with 3 seeds
     2 of these, the best by the mean over 3, with 5; the best by the mean over 5 is chosen

The numbers are the search's, the same for every row (Jamieson and Talwalkar 2016, with seeds as the
resource). Nothing here reads a folder or a clock: the same scores give the same trials and the same
choice, in whatever order they came, so that a search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, TypeAlias

from torch import nn

from syngap.bench import methods
from syngap.bench.config.component import Component, Options, Value
from syngap.bench.config.search import Search
from syngap.bench.config.space import Space
from syngap.bench.errors import UserError
from syngap.bench.methods import Learner
from syngap.bench.options import checked, defaults, signature
from syngap.bench.seeds import derive
from syngap.messages import count_of

__all__ = [
    "Scores",
    "Source",
    "Standing",
    "Trial",
    "Values",
    "Widening",
    "mean_score",
    "standing",
    "trial_source",
]

Values: TypeAlias = dict[str, Value]
Scores: TypeAlias = Mapping[tuple[int, int], float | None]
"""Trial and seed → ACC on validation samples, None where the run diverged."""

_TRIES = 1000  # to draw values that are new and that the method takes


@dataclass(frozen=True)
class Source:
    """What a row's trials come from.

    Args:
        known: values to try first: the method's defaults, the row as it stands; by what they are.
        spaces: option → what may be tried.
        seed: of the draws.
        accepts: whether the method takes these values together.
        allows: whether an option takes a value.
    """

    known: Mapping[str, Values]
    spaces: Mapping[str, Space]
    seed: int
    accepts: Callable[[Values], bool] = lambda values: True
    allows: Callable[[str, Value], bool] = lambda option, value: True


@dataclass(frozen=True)
class Trial:
    """Values to try: `source` says how they were found ("default", "row", "drawn", …)."""

    number: int
    source: str
    values: Values


@dataclass(frozen=True)
class Widening:
    """A space that was widened, since the best of the first `trials` stood at its edge.

    Args:
        trials: how many there were.
        option: whose space.
        edge: "lower" or "upper".
        space: all of it, as it is since.
        new: the new part.
    """

    trials: int
    option: str
    edge: str
    space: Space
    new: Space

    @property
    def text(self) -> str:
        """What happened, in a line."""
        return (
            f"the best of {count_of(self.trials, 'trial')} was at the {self.edge} edge of "
            f"{self.option}, which was widened to {self.space.text}"
        )

    def as_mapping(self) -> dict[str, Any]:
        """Return what search.yaml says of it."""
        return {
            "after": self.trials,
            "option": self.option,
            "edge": self.edge,
            "space": self.space.as_mapping(),
        }


@dataclass
class Standing:
    """How far the search of a row is.

    Args:
        trials: all so far.
        spaces: as they are now.
        widened: what was widened, in order.
        to_do: the runs that are needed next, a trial and a seed each; none once it has ended.
        left: trials that are still in, the best first.
    """

    trials: list[Trial]
    spaces: dict[str, Space]
    widened: list[Widening] = field(default_factory=list)
    to_do: list[tuple[Trial, int]] = field(default_factory=list)
    left: list[Trial] = field(default_factory=list)


def standing(source: Source, search: Search, scores: Scores) -> Standing:
    """Return how far a row is with these scores: what to run next, or which trial is the best."""
    chance = random.Random(source.seed)
    now = Standing(_first(source, search.trials, chance), dict(source.spaces))
    for count in (0, *search.added):
        if count:
            best = _ranked(now.trials, search.seeds[:1], scores)[0]
            if scores[best.number, search.seeds[0]] is not None:  # otherwise all have diverged
                _widen(now, source, best)
            _add(now, source, count, best, chance)
        if _misses(now, now.trials, search.seeds[:1], scores):
            return now
    now.left = now.trials
    known = 1
    for number, seeds in search.counts[1:]:
        now.left = _ranked(now.left, search.seeds[:known], scores)[:number]
        if _misses(now, now.left, search.seeds[:seeds], scores):
            return now
        known = seeds
    now.left = _ranked(now.left, search.seeds[:known], scores)
    return now


def mean_score(trial: Trial, seeds: Sequence[int], scores: Scores) -> float:
    """Return the mean over seeds; 0 where a run diverged."""
    found = [scores[trial.number, seed] for seed in seeds]
    values = [score for score in found if score is not None]
    return fmean(values) if len(values) == len(found) else 0.0


def _ranked(trials: Sequence[Trial], seeds: Sequence[int], scores: Scores) -> list[Trial]:
    """Return the best first; of equals, the earlier."""
    return sorted(trials, key=lambda trial: -mean_score(trial, seeds, scores))


def _misses(now: Standing, trials: Sequence[Trial], seeds: Sequence[int], scores: Scores) -> bool:
    now.to_do = [
        (trial, seed) for seed in seeds for trial in trials if (trial.number, seed) not in scores
    ]
    return bool(now.to_do)


def _first(source: Source, count: int, chance: random.Random) -> list[Trial]:
    """Return the known values, and a Latin hypercube over the spaces beside them."""
    trials: list[Trial] = []
    for name, values in source.known.items():
        if len(trials) < count and _is_new(values, trials) and source.accepts(values):
            trials.append(Trial(len(trials), name, values))
    rest = count - len(trials)
    strata = {option: list(range(rest)) for option in source.spaces}
    for order in strata.values():
        chance.shuffle(order)
    for place in range(rest):

        def draw(again: bool, place: int = place) -> Values:
            return {
                option: space.at(
                    chance.random() if again else (strata[option][place] + chance.random()) / rest
                )
                for option, space in source.spaces.items()
            }

        trials.append(Trial(len(trials), "drawn", _new(draw, trials, source)))
    return trials


def _widen(now: Standing, source: Source, best: Trial) -> None:
    """Widen the spaces of which the best trial stands at an edge."""
    trials = len(now.trials)
    for option, space in now.spaces.items():
        value = best.values[option]
        found = space.widened(value, partial(source.allows, option))
        if found:
            now.spaces[option], new = found
            now.widened.append(Widening(trials, option, space.edge(value), now.spaces[option], new))


def _add(now: Standing, source: Source, count: int, best: Trial, chance: random.Random) -> None:
    """Add trials around the best one, in the new parts of what was just widened."""
    trials = len(now.trials)
    beyond = {each.option: each.new for each in now.widened if each.trials == trials}
    options = list(beyond)
    for place in range(count):
        must = options[place % len(options)] if options else None

        def vary(again: bool, must: str | None = must) -> Values:
            values: Values = {}
            for option, space in now.spaces.items():
                moves = chance.random() < 0.5
                if option == must or (moves and option in beyond):
                    values[option] = beyond[option].at(chance.random())
                elif moves:
                    values[option] = space.near(best.values[option], chance.random())
                else:
                    values[option] = best.values[option]
            return values

        name = "beyond" if must else "near"
        now.trials.append(Trial(len(now.trials), name, _new(vary, now.trials, source)))


def _new(draw: Callable[[bool], Values], trials: Sequence[Trial], source: Source) -> Values:
    """Return the first draw that is new and that the method takes."""
    for again in range(_TRIES):
        values = draw(again > 0)
        if _is_new(values, trials) and source.accepts(values):
            return values
    raise UserError(
        f"the spaces of {', '.join(source.spaces)} have no more than "
        f"{count_of(len(trials), 'trial')} that the method takes; widen them, or make fewer"
    )


def _is_new(values: Values, trials: Sequence[Trial]) -> bool:
    return all(values != trial.values for trial in trials)


def trial_source(row: str, search: Search, method: Component) -> Source:
    """Return what a row's trials come from: its spaces, and the values it need not search for."""
    spaces, kind = search.spaces[row], methods.registry.get(method.name)
    allowed = signature(kind)

    def known(options: Options) -> Values:
        return {option: options[option] for option in spaces}

    def allows(option: str, value: Any) -> bool:
        try:
            return bool(checked({option: value}, {option: allowed[option]}, row))
        except UserError:
            return False

    def accepts(values: Values) -> bool:
        learner = Learner(nn.Linear(1, 2), lambda x, generator: x)
        try:
            kind(learner, **method.with_options(values).options)
        except UserError:  # options that do not go together, such as a teacher without an average
            return False
        except Exception:  # of so small a network; the real one is made before the first run
            return True
        return True

    # A default of 0, such as no average, where the space has no 0: that would be another row.
    usual = {
        option: value
        for option, value in defaults(kind).items()
        if value or option not in spaces or spaces[option].holds_zero
    }
    return Source(
        known={
            "default": known({**method.options, **usual}),
            "row": known(method.options),
        },
        spaces=spaces,
        seed=derive(search.seeds[0], f"search/{row}"),
        accepts=accepts,
        allows=allows,
    )
