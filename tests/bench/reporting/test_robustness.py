"""Area and reach of a curve, against a curve drawn through thousands of points."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from runfolders import Made, write_experiment, write_run

from syngap.bench.errors import UserError
from syngap.bench.reporting.curves import area, reach
from syngap.bench.reporting.queries import run_query
from syngap.bench.reporting.results import Results

curves = st.dictionaries(
    st.sampled_from([0.01, 0.03, 0.1, 0.3, 1.0, 3.0]), st.floats(0, 60), min_size=2
)


def drawn(points: dict[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the curve as it would be drawn on a logarithmic axis."""
    values = sorted(points)
    fine = np.linspace(np.log(values[0]), np.log(values[-1]), 20_001)
    return fine, np.interp(fine, np.log(values), [points[value] for value in values])


@given(curves)
def test_area_is_the_mean_height_of_what_is_drawn(points: dict[float, float]) -> None:
    _, heights = drawn(points)
    assert area(points) == pytest.approx(heights.mean(), abs=0.05)


@given(curves)
def test_reach_is_as_far_as_what_is_drawn_stays_near(points: dict[float, float]) -> None:
    top = max(points.values())
    others = [value for value in points.values() if value != top]
    assume(list(points.values()).count(top) == 1)
    assume(all(abs(top - 2 - value) > 1e-3 for value in others))  # touching the line
    at, heights = drawn(points)
    near = heights >= top - 2
    best = int(heights.argmax())
    low = best - int(np.argmin(near[best::-1])) if not near[: best + 1].all() else -1
    high = best + int(np.argmin(near[best:])) if not near[best:].all() else len(at)
    expected = np.exp(at[low + 1]), np.exp(at[high - 1])
    assert reach(points) == pytest.approx(expected, rel=0.006)


def test_only_seeds_that_every_value_has_count(tmp_path: Path) -> None:
    ends = {("er", 0.3): (40, 60), ("er_lr0.03", 0.03): (20,), ("er_lr3.0", 3.0): (20, 20)}
    write_experiment(tmp_path / "a", {}, ())
    for (row, lr), accuracies in ends.items():
        for seed, end in enumerate(accuracies):
            made = Made("er", options={"lr": lr})
            R = [[90, 0], [end, end]]
            write_run(tmp_path / "a", row, made, seed, R=R, every=50, extra={"experiment": "a"})
    *_, er = run_query("robustness a methods=er", Results(tmp_path)).splitlines()
    assert er == "| ER | 40.0 | 0.3 | 30.0 | 0.24 to 0.38 (× 1.6) | 1 |"


def written(folder: Path, row: str, end: float | None, seed: int = 0, **options: Any) -> None:
    """Write a run of ER that ended at some accuracy, or diverged."""
    options = {"weight_decay": 0.0, "memory": "reservoir"} | options
    made, extra = Made("er", options=options), {"experiment": "a"}
    if end is None:
        error = "FloatingPointError: the loss is nan"
        write_run(folder, row, made, seed, state="failed", error=error, extra=extra)
    else:
        write_run(folder, row, made, seed, R=[[90, 0], [end, end]], every=50, extra=extra)


def test_a_rate_at_which_it_diverged_counts_as_nothing(tmp_path: Path) -> None:
    write_experiment(tmp_path / "a", {}, ())
    for row, lr, end in (("er_0", 0.01, 30.0), ("er_1", 0.1, 30.0), ("er_2", 1.0, None)):
        written(tmp_path / "a", row, end, lr=lr)
    *_, er = run_query("robustness a methods=er", Results(tmp_path)).splitlines()
    assert er == "| ER | 30.0 | 0.01 | 22.5 | 0.01 to 0.12 (× 11.7) | 1 |"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("methods=sgd", 'no two rows of "sgd" that differ in "lr" alone'),
        ("methods=er over=replay", 'no two rows of "er" that differ in "replay" alone'),
        ("methods=er measure=FM", 'a measure of which more is better, got "FM"'),
        ("methods=er over=weight_decay", 'positive numbers, and "weight_decay" has others'),
        ("methods=er over=memory", 'positive numbers, and "memory" has others'),
        ("methods=er,other", '"er" and "other" have other values of "lr"'),
        ("methods=late", 'no seed of "late" has finished at every value of "lr"'),
    ],
)
def test_what_is_no_curve_is_refused(options: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_experiment(folder, {}, ())
    written(folder, "er", 40.0, lr=0.3)
    written(folder, "er_low", 40.0, lr=0.1)
    written(folder, "er_decayed", 40.0, lr=0.3, weight_decay=0.1)
    written(folder, "er_balanced", 40.0, lr=0.3, memory="balanced")
    written(folder, "other", 40.0, lr=0.3, buffer=7)
    written(folder, "other_high", 40.0, lr=1.0, buffer=7)
    written(folder, "late", 40.0, lr=0.3, buffer=8)
    written(folder, "late_high", 40.0, seed=1, lr=1.0, buffer=8)
    with pytest.raises(UserError, match=re.escape(message)):
        run_query(f"robustness a {options}", Results(tmp_path))


def test_a_gain_is_taken_seed_by_seed_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_experiment(folder, {}, ())
    for seed, (low, high, above) in enumerate([(10, 30, 2), (20, 40, 4), (30, 50, 6), (5, 5, 9)]):
        written(folder, "er", low, seed, lr=0.1)
        written(folder, "er_high", high, seed, lr=1.0)
        written(folder, "other", low + above, seed, lr=0.1, buffer=7)
        if seed < 3:
            written(folder, "other_high", high + above, seed, lr=1.0, buffer=7)
    # Differences are 2, 4 and 6: mean 4, sd 2, and t of two degrees of freedom is 4.303.
    expected = "+4.0 (95 % interval −1.0 to +9.0, 3 of 4 seeds)"
    assert run_query("gain a other er", Results(tmp_path)) == expected
    with pytest.raises(UserError, match="no gain over itself"):
        run_query("gain a er er", Results(tmp_path))
    written(folder, "third", 40.0, lr=0.3, buffer=8)
    written(folder, "third_high", 40.0, lr=1.0, buffer=8)
    with pytest.raises(UserError, match='have other values of "lr"'):
        run_query("gain a third er", Results(tmp_path))


def test_a_gain_of_no_common_seed_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_experiment(folder, {}, ())
    for row, seed, buffer in (("er", 0, 5), ("other", 1, 7)):
        written(folder, row, 40.0, seed, lr=0.1, buffer=buffer)
        written(folder, f"{row}_high", 40.0, seed, lr=1.0, buffer=buffer)
    with pytest.raises(UserError, match='"other" and "er" have no seed that finished at every'):
        run_query("gain a other er", Results(tmp_path))
