"""Class-balancing reservoir sampling: classes as equal as can be, each a uniform sample."""

from __future__ import annotations

import random

import pytest
import torch
from chances import UNLIKELY, as_events, chance, p_value
from helpers import assert_identical
from torch import Tensor

from syngap.bench.memory import ClassBalanced


def kept_of_each(memory: ClassBalanced) -> dict[int, int]:
    labels, counts = memory.state_dict()["fields"]["y"].unique(return_counts=True)
    return dict(zip(labels.tolist(), counts.tolist(), strict=True))


def skewed(total: int, classes: int, seed: int) -> Tensor:
    """Labels of which class k is about half as frequent as class k - 1, in drifting order."""
    weights = 0.5 ** torch.arange(classes).double()
    labels = torch.multinomial(weights, total, replacement=True, generator=chance(seed))
    return labels.reshape(2, -1).sort(dim=1).values.flatten()


def stored_by_algorithm(labels: list[int], size: int, seed: int) -> list[list[int]]:
    """Algorithm 1 of the paper, by searching; the labels in memory after each sample."""
    rng, memory, full, met, after = random.Random(seed), [], set(), {}, []
    for label in labels:
        met[label] = met.get(label, 0) + 1
        if len(memory) < size:
            memory.append(label)
        elif label not in full:
            most = max(memory.count(one) for one in memory)
            largest = [i for i, one in enumerate(memory) if memory.count(one) == most]
            memory[rng.choice(largest)] = label
        if len(memory) == size:
            most = max(memory.count(one) for one in memory)
            full |= {one for one in memory if memory.count(one) == most}
        after.append(list(memory))
    return after


@pytest.mark.parametrize("seed", range(3))
def test_class_sizes_are_those_of_the_algorithm_after_every_sample(seed: int) -> None:
    # Which of several largest classes gives way is random, so the sizes are compared in order.
    labels = skewed(120, 6, seed)
    memory = ClassBalanced(12, generator=chance(seed))
    for label, expected in zip(labels, stored_by_algorithm(labels.tolist(), 12, seed), strict=True):
        memory.add(y=label[None])
        sizes = sorted(kept_of_each(memory).values())
        assert sizes == sorted(expected.count(one) for one in set(expected))


def test_how_the_stream_is_cut_makes_no_difference() -> None:
    labels, number = skewed(600, 6, 0), torch.arange(600)
    kept = []
    for batch in (1, 7, 600):
        memory = ClassBalanced(30, generator=chance(5))
        for part, numbers in zip(labels.split(batch), number.split(batch), strict=True):
            memory.add(y=part, number=numbers)
        kept.append(memory.state_dict()["fields"]["number"].tolist())
        assert torch.equal(labels[kept[-1]], memory.state_dict()["fields"]["y"])
    assert kept[0] == kept[1] == kept[2]


def test_rare_classes_are_kept_whole_and_the_others_share_the_rest() -> None:
    labels = torch.tensor([0] * 300 + [1] * 4 + [2] * 200 + [3] * 6 + [4] * 100)
    memory = ClassBalanced(40, generator=chance(0))
    memory.add(y=labels)
    assert kept_of_each(memory) == {0: 10, 1: 4, 2: 10, 3: 6, 4: 10}


@pytest.mark.parametrize("label", [0, 1])
def test_every_sample_of_a_class_has_the_same_chance(label: int) -> None:
    labels = torch.tensor([0, 1, 0] * 6 + [1] * 6 + [0] * 12)
    mine = (labels == label).nonzero().flatten()
    seeds, kept = 3000, torch.zeros(len(labels)).double()
    for seed in range(seeds):
        memory = ClassBalanced(6, generator=chance(seed))
        memory.add(y=labels, number=torch.arange(len(labels)))
        kept[memory.state_dict()["fields"]["number"]] += 1
    assert p_value(*as_events(kept[mine], seeds)) > UNLIKELY


def test_each_of_several_largest_classes_gives_way_equally_often() -> None:
    replaced = torch.zeros(9).double()
    for seed in range(2000):
        memory = ClassBalanced(9, generator=chance(seed))
        memory.add(y=torch.tensor([0, 1, 2] * 3 + [3]))
        (slot,) = memory.state_dict()["fields"]["y"].eq(3).nonzero()
        replaced[slot] += 1
    assert p_value(replaced, torch.full_like(replaced, 2000 / 9)) > UNLIKELY


def test_being_ahead_before_the_memory_was_full_costs_a_class_nothing() -> None:
    memory = ClassBalanced(10, generator=chance(0))
    memory.add(y=torch.tensor([0] + [1] * 9 + [0] * 20))
    assert kept_of_each(memory) == {0: 5, 1: 5}


@pytest.mark.parametrize("stop", [100, 400])
def test_a_memory_restored_amid_a_skewed_stream_goes_on_bit_for_bit(stop: int) -> None:
    labels, number = skewed(600, 6, 1), torch.arange(600)
    memory = ClassBalanced(30, generator=chance(0))
    memory.add(y=labels[:stop], number=number[:stop])
    other = ClassBalanced(30, generator=chance(1))
    other.load_state_dict(memory.state_dict())
    for one in (memory, other):
        one.add(y=labels[stop:], number=number[stop:])
    assert_identical(other.state_dict(), memory.state_dict())


def test_more_classes_than_slots_keep_one_each() -> None:
    memory = ClassBalanced(3, generator=chance(0))
    memory.add(y=torch.arange(10))
    assert set(kept_of_each(memory).values()) == {1}


@pytest.mark.parametrize(
    "fields",
    [{"x": torch.zeros(2)}, {"y": torch.zeros(2)}, {"y": torch.zeros(2, 3).long()}],
    ids=["missing", "numbers with fractions", "two dimensions"],
)
def test_samples_without_a_class_are_refused(fields: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="needs a field y"):
        ClassBalanced(3, generator=chance(0)).add(**fields)
