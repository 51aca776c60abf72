"""A row's label says what the row is, from its configuration and whatever its name says."""

from __future__ import annotations

import pytest

from syngap.bench.reporting.labels import labels

ER = {"name": "er", "lr": 0.3, "buffer": 200, "replay": 10, "memory": "reservoir"}
SYNGAP = {**ER, "name": "syngap", "retention": 0.999, "bounded": True, "estimator": "sampled"}


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({"lr": 0.01}, "SynGAP, lr 0.01"),
        ({"lr": 1.0, "retention": 0.5}, "SynGAP, lr 1.0, retention 0.5"),
        ({"bounded": False}, "SynGAP, not bounded"),
        ({"estimator": "empirical"}, "SynGAP, estimator empirical"),
        ({"buffer": 0}, "SynGAP, alone"),
        ({"buffer": 0, "replay": 64, "memory": "balanced"}, "SynGAP, alone"),
        ({"buffer": 0, "lr": 0.1}, "SynGAP, alone, lr 0.1"),
        ({"memory": None}, "SynGAP, no memory"),
        ({"retention": [0.9, 0.99]}, "SynGAP, retention [0.9, 0.99]"),
    ],
    ids=str,
)
def test_a_row_is_called_by_what_sets_it_apart(changed: dict[str, object], label: str) -> None:
    found = labels({"er": ER, "syngap": SYNGAP, "whatever": {**SYNGAP, **changed}})
    assert found == {"er": "ER", "syngap": "SynGAP", "whatever": label}


def test_a_name_that_lies_is_not_believed() -> None:
    slow = {**ER, "lr": 0.01}
    assert labels({"er": ER, "er_lr1.0": slow})["er_lr1.0"] == "ER, lr 0.01"
    assert labels({"er": SYNGAP, "syngap": {**SYNGAP, "lr": 1.0}})["er"] == "SynGAP, lr 0.3"


def test_without_the_methods_own_row_its_rows_are_set_against_each_other() -> None:
    found = labels({"a": {**ER, "lr": 0.1}, "b": {**ER, "lr": 0.3}, "c": SYNGAP})
    assert found == {"a": "ER, lr 0.1", "b": "ER, lr 0.3", "c": "SynGAP"}


def test_rows_that_differ_in_nothing_go_by_their_names() -> None:
    assert labels({"er": ER, "again": ER}) == {"er": "ER", "again": "ER (again)"}
    assert labels({"a": ER, "b": ER}) == {"a": "ER (a)", "b": "ER (b)"}


def test_an_option_that_came_later_sets_nothing_apart() -> None:
    newer = {**ER, "lr": 0.1, "added": 7}
    assert labels({"er": ER, "er_slow": newer})["er_slow"] == "ER, lr 0.1"


def test_a_method_of_another_package_has_its_own_name() -> None:
    assert labels({"mine": {"name": "mine"}}) == {"mine": "mine"}


def test_a_row_whose_values_are_long_to_say_goes_by_its_name() -> None:
    searched = {**SYNGAP, "lr": 0.2913, "retention": 0.999732, "consolidation": 0.4972}
    found = labels({"syngap": {**SYNGAP, "consolidation": 0.1}, "searched": searched})
    assert found["searched"] == "SynGAP (searched)"
