"""Area and reach of a curve, against a curve drawn through thousands of points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from runfolders import Made, write_experiment, write_run

from syngap.errors import UserError
from syngap.report.asked import answer
from syngap.report.results import Results
from syngap.report.robustness import area, reach

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
    *_, er = answer("robustness a methods=er", Results(tmp_path)).splitlines()
    assert er == "| ER | 40.0 | 0.3 | 30.0 | 0.24 to 0.38 (× 1.6) | 1 |"


@pytest.mark.parametrize("asked", ["methods=er", "methods=sgd", "measure=FM"])
def test_what_is_no_curve_is_refused(asked: str, tmp_path: Path) -> None:
    write_experiment(tmp_path / "a", {}, ())
    made, R = Made("er", options={"lr": 0.3}), [[90, 0], [40, 40]]
    write_run(tmp_path / "a", "er", made, 0, R=R, every=50, extra={"experiment": "a"})
    with pytest.raises(UserError, match=r"robustness is of a measure|no seed of"):
        answer(f"robustness a {asked}", Results(tmp_path))
