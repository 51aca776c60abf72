"""Forgetting at matched new loss is what it is said to be, on points made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from finetuned import point

from syngap.bench.finetuning.frontier import (
    as_trained,
    best_answers,
    best_new_loss,
    exact_match,
    forgetting,
    frontier,
    good_rates,
    held_out_gain,
    relative_forgetting,
)
from syngap.bench.finetuning.point import Point

START = point(3.0, 1.0, step=0)
# AdamW gains 1 at its best: the levels are new losses of 2.3, 2.2, 2.1 and 2.05.
ADAMW = [point(2.25, 1.2), point(2.0, 1.4)]


def relative(points: list[Point]) -> float | None:
    return relative_forgetting(points, ADAMW, START, "english")


def test_adamw_forgets_as_much_as_itself() -> None:
    assert relative(ADAMW) == pytest.approx(1.0)


def test_ratio_is_the_mean_over_levels() -> None:
    # 0.1 against 0.2 at the first level and against 0.4 at the other three.
    assert relative([point(2.0, 1.1)]) == pytest.approx((0.5 + 3 * 0.25) / 4)


def test_the_lowest_old_loss_among_points_that_reach_the_level_counts() -> None:
    assert relative([point(2.25, 1.0), point(2.0, 1.2)]) == pytest.approx((0.0 + 3 * 0.5) / 4)


def test_a_fall_of_the_old_loss_makes_up_for_no_rise() -> None:
    # The old loss falls by as much as AdamW's rises at the first level, and rises at the others.
    assert relative([point(2.25, 0.8), point(2.0, 1.2)]) == pytest.approx((0.0 + 3 * 0.5) / 4)


def test_a_level_that_is_not_reached_gives_no_ratio() -> None:
    assert relative([point(2.25, 1.0)]) is None


def test_there_is_no_ratio_where_adamw_forgets_nothing() -> None:
    assert relative_forgetting(ADAMW, [point(2.0, 1.0)], START, "english") is None


def test_a_point_chosen_on_one_half_is_evaluated_on_the_other() -> None:
    # On the first half the first point is better, on the second half the second.
    lucky, other = point(2.0, 1.0, shift=0.4), point(2.0, 1.2, shift=-0.1)
    value = forgetting([lucky, other], ADAMW, START, "english", 0.9)
    assert value == pytest.approx((0.4 + 0.2) / 2)


def test_gain_and_best_loss_are_judged_on_the_other_half() -> None:
    lucky = replace(point(2.0, 1.0), new=(1.8, 2.4))
    other = replace(point(2.1, 1.0), new=(2.0, 2.0))
    assert best_new_loss([lucky, other]) == pytest.approx((2.4 + 2.0) / 2)
    assert held_out_gain([lucky, other], START) == pytest.approx(0.8)


def test_best_answers_are_chosen_on_one_half_and_evaluated_on_the_other() -> None:
    lucky = replace(point(2.0, 1.0), exact=(0.9, 0.1), old={"english": (1.0, 1.5)})
    other = replace(point(2.1, 1.0), exact=(0.5, 0.6), old={"english": (1.2, 1.1)})
    # The first half chooses the first point, the second half the second; both rise from 1.
    assert best_answers([lucky, other], START, "english") == pytest.approx(
        ((0.1 + 0.5) / 2, (0.5 + 0.2) / 2)
    )


def test_of_equal_answers_those_with_the_lower_old_loss_count() -> None:
    worse = replace(point(2.0, 1.4), exact=(0.9, 0.9))
    better = replace(point(2.1, 1.1), exact=(0.9, 0.9))
    for points in ([worse, better], [better, worse]):
        assert best_answers(points, START, "english") == pytest.approx((0.9, 0.1))
    assert best_answers(ADAMW, START, "english") is None


def test_exact_match_is_that_of_the_lowest_loss_judged_on_the_other_half() -> None:
    lucky = replace(point(2.0, 1.0), new=(1.8, 2.4), exact=(0.9, 0.1))
    other = replace(point(2.1, 1.0), new=(2.0, 2.0), exact=(0.5, 0.6))
    assert exact_match([lucky, other]) == pytest.approx((0.1 + 0.5) / 2)
    assert exact_match(ADAMW) is None


def test_interpolated_points_are_not_those_as_trained() -> None:
    points = [point(2.0, 1.4), point(2.1, 1.1, share=0.5)]
    assert as_trained(points) == points[:1]


def test_the_frontier_has_the_points_that_no_other_beats_in_both() -> None:
    points = [point(2.0, 1.4), point(2.5, 1.1), point(2.2, 1.5), point(2.5, 1.3), point(2.9, 1.1)]
    line = frontier(points, START, "english")
    assert line == [pytest.approx((0.5, 0.1)), pytest.approx((1.0, 0.4))]


def test_good_rates_learn_well_and_forget_little() -> None:
    by_rate = {
        0.1: [point(2.0, 1.1)],
        0.3: [point(2.05, 1.2)],  # within 5 % of 2.0, twice the forgetting: both just so
        1.0: [point(2.0, 1.21)],  # forgets more than twice as much
        3.0: [point(2.11, 1.0)],  # does not reach 90 % of AdamW's gain
    }
    assert good_rates(by_rate, ADAMW, START, "english") == [0.1, 0.3]
    by_rate[0.3] = [point(2.0, 1.2)]
    by_rate[0.01] = [point(1.9, 1.15)]  # now 2.0 is no longer within 5 % of the best
    assert good_rates(by_rate, ADAMW, START, "english") == [0.01]
    assert good_rates({3.0: by_rate[3.0]}, ADAMW, START, "english") == []
