"""Options are checked against their types, and what is wrong is said in one line."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal, Optional, Union

import pytest
import yaml

from syngap.bench.errors import UserError
from syngap.bench.methods.er_ace import ERACE
from syngap.bench.options import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Proportion,
    Retention,
    Share,
    checked,
    defaults,
    expected,
    signature,
)
from syngap.messages import nearest

NUMBERS = {
    "count": Count,
    "natural": Natural,
    "positive": Positive,
    "non_negative": NonNegative,
    "share": Share,
    "proportion": Proportion,
    "retention": Retention,
    "whole": int,
    "number": float,
    "maybe": float | None,
    "two": int | float,
    "optional": Optional[Positive],  # noqa: UP045
    "union": Union[int, None],  # noqa: UP007
}


def one(value: Any, kind: Any) -> Any:
    """The value of a single option of this type."""
    return checked({"lr": value}, {"lr": (kind, None)}, "methods.er")["lr"]


def refusal(value: Any, kind: Any) -> str:
    with pytest.raises(UserError) as caught:
        one(value, kind)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def example(learner: Any, *, lr: Positive = 0.1, name: str, hidden: list[Count] = [3]) -> None:  # noqa: B006
    """Has an option without a default."""


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        (Count, [1, 10**12], [0, -1]),
        (Natural, [0, 7], [-1]),
        (Positive, [1e-30, 3, 1e30], [0, 0.0, -1e-9]),
        (NonNegative, [0, 0.0, 5], [-1e-9]),
        (Share, [0, 0.5, 1], [-0.01, 1.01]),
        (Proportion, [0.01, 0.99], [0, 1, 2]),
        (Retention, [0, 0.999], [1, -0.1]),
        (int, [-5, 0], []),
        (float, [-5.5, 0], []),
    ],
)
def test_numbers_have_bounds(kind: Any, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        assert one(value, kind) == value
    for value in outside:
        assert refusal(value, kind) == f"methods.er.lr: got {value}, expected {expected(kind)}"


def test_values_have_the_type_that_was_asked_for() -> None:
    assert type(one(3, Positive)) is float
    assert type(one(3.0, Count)) is int
    assert type(one("3", Count)) is int


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "1.0e-3"])
def test_numbers_that_yaml_takes_for_text_are_numbers(text: str) -> None:
    assert one(yaml.safe_load(text), Positive) == 0.001
    assert one(text, Positive) == 0.001


@pytest.mark.parametrize("kind", NUMBERS.values(), ids=NUMBERS)
def test_truth_is_not_a_number(kind: Any) -> None:
    assert refusal(True, kind) == f"methods.er.lr: got true, expected {expected(kind)}"
    assert refusal(False, kind) == f"methods.er.lr: got false, expected {expected(kind)}"


@pytest.mark.parametrize("kind", [list[Count], list[float], tuple[int, ...], list[Count] | None])
def test_truth_is_not_a_number_in_a_list_either(kind: Any) -> None:
    assert refusal([2, True], kind) == f"methods.er.lr: got [2, true], expected {expected(kind)}"


@pytest.mark.parametrize("kind", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "1e999"])
def test_what_is_not_finite_is_not_a_number(kind: Any, value: Any) -> None:
    assert "expected" in refusal(value, kind)


@pytest.mark.parametrize("value", [math.nan, math.inf, "nan"])
def test_what_is_not_finite_is_not_a_number_in_a_list_either(value: Any) -> None:
    assert "expected a list, each a number" in refusal([1.0, value], list[float])


@pytest.mark.parametrize("kind", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("value", ["fast", "", [], [1], {}, {"a": 1}, "1 2", "0x10"], ids=repr)
def test_what_is_no_number_is_refused(kind: Any, value: Any) -> None:
    assert refusal(value, kind).endswith(f"expected {expected(kind)}")


@pytest.mark.parametrize("kind", [Count, Natural, int])
def test_whole_numbers_are_whole(kind: Any) -> None:
    assert refusal(1.5, kind) == f"methods.er.lr: got 1.5, expected {expected(kind)}"
    assert refusal("1.5", kind) == f'methods.er.lr: got "1.5", expected {expected(kind)}'


def test_nothing_is_taken_only_where_it_may_stand() -> None:
    assert one(None, int | None) is None
    assert one(None, Optional[Positive]) is None  # noqa: UP045
    assert refusal(None, Positive) == "methods.er.lr: got null, expected a positive number"
    assert refusal(None, str) == "methods.er.lr: got null, expected text"


def test_truth_is_taken_where_it_belongs() -> None:
    for kind in (bool, bool | None, Literal[True, "auto"], Any):
        assert one(True, kind) is True
    assert one(False, bool) is False
    assert refusal("maybe", bool) == 'methods.er.lr: got "maybe", expected true or false'
    assert refusal(2, bool) == "methods.er.lr: got 2, expected true or false"
    assert "expected" in refusal(True, Literal[1, 2])
    assert "expected" in refusal(True, str)


def test_one_of_a_few_is_one_of_them() -> None:
    kind = Literal["network", "tensor"]
    assert one("tensor", kind) == "tensor"
    assert refusal("tenser", kind) == (
        'methods.er.lr: got "tenser", expected one of "network", "tensor"'
    )
    assert refusal(1, kind) == 'methods.er.lr: got 1, expected one of "network", "tensor"'


def test_lists_are_checked_part_by_part() -> None:
    assert one([64, "32"], list[Count]) == [64, 32]
    assert one([], list[Count]) == []
    for wrong in ([64, 0], [64, "wide"], 64, "64", {"64": 1}, [[64]]):
        assert refusal(wrong, list[Count]).endswith("expected a list, each a whole number ≥ 1")


def test_what_was_given_is_shown_as_it_would_be_written() -> None:
    assert 'got "schnell gemäß ☃",' in refusal("schnell gemäß ☃", float)
    assert 'got {"a": [1, null]},' in refusal({"a": [1, None]}, float)
    assert "got NaN," in refusal(math.nan, float)
    long = refusal("x" * 1000, float)
    assert len(long) < 150
    assert "..., expected a number" in long
    assert "got " in refusal(object(), float)


def test_a_line_break_in_what_was_given_breaks_no_line() -> None:
    assert refusal("a\nb", float) == 'methods.er.lr: got "a\\nb", expected a number'


# Names --------------------------------------------------------------------------------------------


def test_unknown_names_are_refused_with_the_nearest_known_one() -> None:
    allowed = signature(example)

    def said(name: Any) -> str:
        with pytest.raises(UserError) as caught:
            checked({name: 1}, allowed, "methods.er")
        return str(caught.value)

    assert said("hiden") == 'methods.er.hiden: unknown option; did you mean "hidden"?'
    assert said("quux") == "methods.er.quux: unknown option; there are lr, name, hidden"
    assert said("learner").startswith("methods.er.learner: unknown option")
    assert said(3) == "methods.er.3: unknown option; there are lr, name, hidden"
    assert said(None).startswith("methods.er.None: unknown option")


def test_unknown_names_are_refused_where_there_are_no_options() -> None:
    with pytest.raises(UserError, match=r"^model\.lr: unknown option; there are none$"):
        checked({"lr": 1}, {}, "model")


def test_nearest_says_nothing_where_nothing_is_near() -> None:
    assert nearest("syngpa", ["er", "syngap"]) == '; did you mean "syngap"?'
    assert nearest("q", ["er", "syngap"]) == ""
    assert nearest("er", []) == ""


def test_what_has_no_default_must_be_given() -> None:
    with pytest.raises(UserError, match=r"^methods\.er\.name: missing, expected text$"):
        checked({}, signature(example), "methods.er")
    assert checked({"name": "x"}, signature(example), "methods.er") == {
        "lr": 0.1,
        "name": "x",
        "hidden": [3],
    }


def test_given_values_win_over_defaults_and_are_left_alone() -> None:
    given = {"name": "x", "lr": "0.5", "hidden": [1, 2]}
    before = dict(given)
    assert checked(given, signature(example), "m") == {"lr": 0.5, "name": "x", "hidden": [1, 2]}
    assert given == before


def test_whoever_changes_a_checked_default_changes_no_default() -> None:
    def sized(*, sizes: list[Count] = [3]) -> None:  # noqa: B006
        """Has a default that can be changed."""

    checked({}, signature(sized), "m")["sizes"].append(99)
    assert checked({}, signature(sized), "m") == {"sizes": [3]}


# Types --------------------------------------------------------------------------------------------


def test_a_signature_has_the_keyword_only_arguments_with_types_and_defaults() -> None:
    assert signature(example) == {
        "lr": (Positive, 0.1),
        "name": (str, inspect.Parameter.empty),
        "hidden": (list[Count], [3]),
    }
    assert defaults(example) == {"lr": 0.1, "hidden": [3]}


def test_a_class_has_the_options_of_the_constructor_it_inherits() -> None:
    found = signature(ERACE)
    assert found["buffer"] == (Natural, 2000)
    assert found["lr"] == (Positive, 0.1)
    assert "learner" not in found


def test_what_has_no_annotation_takes_anything() -> None:
    def free(*, anything=1):  # type: ignore[no-untyped-def]
        return anything

    for value in (None, True, [1], "x"):
        assert checked({"anything": value}, signature(free), "m") == {"anything": value}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Count, "a whole number ≥ 1"),
        (Natural, "a whole number ≥ 0"),
        (Positive, "a positive number"),
        (NonNegative, "a number ≥ 0"),
        (Share, "a number between 0 and 1"),
        (Proportion, "a number above 0 and below 1"),
        (Retention, "a number from 0 to below 1"),
        (bool, "true or false"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "text"),
        (str | None, "text or nothing (null)"),
        (Optional[Count], "a whole number ≥ 1 or nothing (null)"),  # noqa: UP045
        (Literal["a", 1, True], 'one of "a", 1, true'),
        (Literal["a"] | None, '"a" or nothing (null)'),
        (list, "a list"),
        (list[Positive], "a list, each a positive number"),
        (tuple[int, ...], "a list, each a whole number"),
        (list[Literal["a", "b"]], 'a list, each one of "a", "b"'),
    ],
    ids=str,
)
def test_types_are_named_in_words(kind: Any, words: str) -> None:
    assert expected(kind) == words
