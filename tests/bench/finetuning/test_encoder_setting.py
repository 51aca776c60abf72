"""An encoder's losses are what their definitions say, and its tests and anchors do not overlap."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from finetuned import encoder_setting, share_nothing, tiny_encoder

from syngap.bench.errors import UserError
from syngap.bench.finetuning.encoder_setting import EncoderSetting, changed_order
from syngap.bench.finetuning.models import Making
from syngap.bench.finetuning.setting import Anchors
from syngap.bench.finetuning.texts import Text, Texts
from syngap.bench.finetuning.texts.pairs import cut_pairs


def test_pairs_are_the_halves_of_paragraphs_with_enough_words() -> None:
    long = " ".join(f"w{number}" for number in range(17))
    text = f"too short\n\n{long}\n \n\n{long.upper()}\n{long}\n\n{long}\n"
    first, second = cut_pairs(text)
    assert first == (" ".join(long.split()[:8]), " ".join(long.split()[8:]))
    assert second == (long.upper(), long)  # and the last paragraph is the first again


def test_the_loss_is_that_of_finding_the_other_half_among_all_of_the_batch() -> None:
    of = encoder_setting()
    batch = of.batch(4, "batch 0")
    first, second = (of.embed(of.start, tokens).tolist() for tokens in batch)
    told = 0.0
    for place, one in enumerate(first):
        scores = [20 * sum(a * b for a, b in zip(one, other, strict=True)) for other in second]
        told += math.log(sum(map(math.exp, scores))) - scores[place]
    assert float(of.loss(of.start, batch).detach()) == pytest.approx(told / 4, rel=1e-4)


def ranks(values: list[float]) -> list[float]:
    """Mean ranks: equal values share theirs."""
    return [
        sum(other < value for other in values) + sum(other == value for other in values) / 2
        for value in values
    ]


def spearman(first: list[float], second: list[float]) -> float:
    a, b = ranks(first), ranks(second)
    mean = sum(a) / len(a)
    products = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return products / math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))


def test_change_of_order_is_one_minus_spearmans_correlation() -> None:
    order = torch.Generator().manual_seed(0)
    before, now = (torch.randn(5, 5, generator=order) for _ in range(2))
    now[0, :2] = 0.5
    told = 1 - spearman(before.flatten().tolist(), now.flatten().tolist())
    assert changed_order(before, now) == pytest.approx(told)
    assert changed_order(before, before.exp()) == pytest.approx(0.0, abs=1e-12)


def test_nothing_is_forgotten_at_the_start_and_something_by_other_weights() -> None:
    of = encoder_setting()
    start = of.evaluate(of.start)
    assert list(start.old) == ["manual", "code"]
    for halves in start.old.values():
        assert halves == pytest.approx((0.0, 0.0), abs=1e-12)
    other = copy.deepcopy(of.start)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    moved = of.evaluate(other)
    assert all(0.05 < half <= 2 for halves in moved.old.values() for half in halves)
    assert moved.new != start.new
    before, now = (of.embed(model, of.tests["code"][1][0]) for model in (of.start, other))
    seconds = [of.embed(model, of.tests["code"][1][1]) for model in (of.start, other)]
    told = changed_order((before @ seconds[0].T).detach(), (now @ seconds[1].T).detach())
    assert moved.old["code"][1] == pytest.approx(told, abs=1e-6)


def test_pairs_found_are_those_whose_other_half_is_the_most_similar() -> None:
    of = encoder_setting()
    found = of.evaluate(of.start)
    first, second = (of.embed(of.start, tokens) for tokens in of.tests["rot13"][0])
    right = sum(
        max(range(len(second)), key=lambda other: float((one @ second[other]).detach())) == place
        for place, one in enumerate(first)
    )
    assert found.exact is not None
    assert found.exact[0] == pytest.approx(right / len(first))


def rows(tokens: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in tokens.tolist()}


def test_halves_and_what_is_learned_do_not_overlap_and_a_batch_has_no_pair_twice() -> None:
    of = encoder_setting()
    for first, second in of.tests.values():
        assert not rows(first[1]) & rows(second[1])
        assert not rows(first[1]) & (rows(of.new[1]) | rows(of.old[1]))
    whole = of.batch(len(of.new[0]), "batch 0")
    assert len(rows(torch.cat(whole, 1))) == len(rows(torch.cat(of.new, 1)))


def test_anchors_are_known_texts_without_padding_and_follow_from_the_seed() -> None:
    of = encoder_setting(anchors=6)
    assert of.anchors.shape == (6, 16)
    assert bool((of.anchors != 0).all())
    assert torch.equal(of.anchors, encoder_setting(anchors=6).anchors)
    assert not torch.equal(of.anchors, encoder_setting(anchors=6, seed=1).anchors)


def made(texts: Texts, *, count: int = 1) -> EncoderSetting:
    making = Making(texts, 0, torch.device("cpu"), None, share_nothing)
    anchors = Anchors(source="text", count=count)
    return EncoderSetting(tiny_encoder(making), making, anchors=anchors, windows=2)


def test_too_little_text_is_refused_by_name() -> None:
    many = "\n\n".join(f"{number} word" * 16 for number in range(8))
    lines = Text("one line\nand more\n" * 99, "one line")
    with pytest.raises(UserError, match="pairs: skill has 1 paragraph "):
        made(Texts("skill", "known", {"known": Text(many, many), "skill": lines}))
    kinds = {"known": Text(many, many), "new": Text(many, many)}
    with pytest.raises(UserError, match=r"anchors\.count: got 99, and known has 8"):
        made(Texts("new", "known", kinds), count=99)
    of = made(Texts("new", "known", kinds))
    with pytest.raises(UserError, match=r"training\.batch: got 9; the data have 8 pairs"):
        of.batch(9, "batch 0")
