"""The table of research/protection says what forgetting relative to AdamW is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from checkout import ROOT

RESEARCH = ROOT / "research" / "protection"
if not RESEARCH.is_dir():
    pytest.skip("there is no research/ beside the tests", allow_module_level=True)
sys.path.insert(0, str(RESEARCH))

import table  # noqa: E402

Row = dict[str, Any]


def row(
    method: str, new: float, old: float, *, shift: float = 0.0, share: float = 1.0, seed: int = 0
) -> Row:
    """Return a row whose second half of the old text is harder by `shift`."""
    losses = {"german": [new, new], "english": [old, old + shift]}
    return {
        "model": "byte",
        "seed": seed,
        "method": method,
        "lr": new,
        "steps": 200,
        "batch": 32,
        "step": 200,
        "share": share,
        "losses": losses,
        "seconds": 2.0,
        "memory": 2**30,
    }


START = row("start", 3.0, 1.0)
# AdamW gains 1 at its best: the levels are new losses of 2.3, 2.2, 2.1 and 2.05.
ADAMW = [row("adamw", 2.25, 1.2), row("adamw", 2.0, 1.4)]


def relative(points: list[Row]) -> float | None:
    return table.relative_forgetting(points, ADAMW, START, "english", "german")


def test_adamw_forgets_as_much_as_itself() -> None:
    assert relative(ADAMW) == pytest.approx(1.0)


def test_ratio_is_the_mean_over_levels() -> None:
    # 0.1 against 0.2 at the first level and against 0.4 at the other three.
    assert relative([row("gate", 2.0, 1.1)]) == pytest.approx((0.5 + 3 * 0.25) / 4)


def test_the_lowest_old_loss_among_points_that_reach_the_level_counts() -> None:
    low, high = row("gate", 2.25, 1.0), row("gate", 2.0, 1.2)
    assert relative([low, high]) == pytest.approx((0.0 + 3 * 0.5) / 4)


def test_a_level_that_is_not_reached_gives_no_ratio() -> None:
    assert relative([row("gate", 2.25, 1.0)]) is None


def test_a_point_chosen_on_one_half_is_judged_on_the_other() -> None:
    # On the first half the first point is better, on the second half the second.
    lucky = row("gate", 2.0, 1.0, shift=0.4)
    other = row("gate", 2.0, 1.2, shift=-0.1)
    value = table.forgetting([lucky, other], ADAMW, START, "english", "german", 0.9)
    assert value == pytest.approx((0.4 + 0.2) / 2)


def test_gain_is_judged_on_the_other_half() -> None:
    lucky, other = row("gate", 2.0, 1.0), row("gate", 2.1, 1.0)
    lucky["losses"]["german"], other["losses"]["german"] = [1.8, 2.4], [2.0, 2.0]
    assert table.held_out_gain([lucky, other], START, "german") == pytest.approx((0.6 + 1.0) / 2)


def test_markdown_tells_weights_as_trained_from_interpolated_ones_and_gives_ranges() -> None:
    rows = []
    for seed, kept in ((0, 1.2), (1, 1.1)):
        rows += [row("start", 3.0, 1.0, seed=seed), row("adamw", 2.0, 1.4, seed=seed)]
        rows += [row("gate", 2.0, kept, seed=seed)]
        rows += [row("gate+tau0.9", 2.0, 1.04, share=0.85, seed=seed)]
        rows += [row("gate+tau0.9", 2.0, 1.4, seed=seed)]
    text = table.markdown(rows, families=True)
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert cells[0] == "gate"
    assert cells[1:3] == ["2", "2"]  # settings, seeds
    assert cells[5] == "0.38 (0.25 to 0.50)"  # as trained
    assert cells[6] == "0.10 (0.10 to 0.10)"  # with interpolation
    assert "gate+tau0.9" in table.markdown(rows)


def test_rows_that_are_not_finite_are_left_out() -> None:
    broken = row("gate", float("nan"), 1.0)
    text = table.markdown([START, *ADAMW, row("gate", 2.0, 1.1), broken])
    assert "nan" not in text
