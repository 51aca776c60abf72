"""An encoder of texts: it learns which halves of paragraphs belong together, without labels.

The loss is contrastive, with the other texts of the batch as negatives (InfoNCE): the cross-entropy
of 20 · the cosine similarities of each first text with all second texts. What is kept is the order
of similarities between old texts:

    1 - Spearman's correlation of cos(first_i, second_j) at the start and now, over all i and j
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torch.nn.functional import cross_entropy

from syngap.bench import seeds
from syngap.bench.errors import UserError
from syngap.bench.finetuning.models import Making
from syngap.bench.finetuning.models.encoder import Encoder
from syngap.bench.finetuning.point import Halves
from syngap.bench.finetuning.setting import (
    TEST_BATCH,
    Anchors,
    Batch,
    Measured,
    Precision,
    Setting,
)
from syngap.bench.finetuning.texts import Texts
from syngap.bench.finetuning.texts.pairs import cut_pairs, cut_paragraphs
from syngap.messages import count_of

__all__ = ["EncoderSetting", "changed_order"]

SHARPNESS = 20.0  # what similarities are multiplied with, as sentence-transformers does
MOST = 20_000  # pairs to learn from


class EncoderSetting(Setting):
    """An encoder, and texts to learn and to keep.

    Args:
        encoder: the model.
        making: texts, seed and device.
        anchors: how many; they are paragraphs of the known kind, each longer than the encoder sees.
        windows: pairs of each half of a test text.
        precision: of the forward pass.

    Attributes:
        new: pairs that are learned.
        old: true old pairs of the known kind.
        tests: pairs of both halves of each test text, old kinds first and then the new one.
    """

    def __init__(
        self,
        encoder: Encoder,
        making: Making[Texts],
        *,
        anchors: Anchors,
        windows: int,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__(encoder.model, making.seed, making.device, precision)
        self._encoder, self._making = encoder, making
        texts = making.source
        self.new = self._encode(_spread(self._pairs(texts.new, "train"), MOST))
        self.old = self._encode(_spread(self._pairs(texts.known, "train"), MOST))
        self.tests = {kind: self._tests(kind, windows) for kind in (*texts.old, texts.new)}
        self._anchors = self._draw_anchors(anchors.count)
        self._before = {
            kind: tuple(self._similarities(self.start, half) for half in self.tests[kind])
            for kind in texts.old
        }

    # Texts

    def _pairs(self, kind: str, part: Literal["train", "test"]) -> list[tuple[str, str]]:
        pairs = cut_pairs(getattr(self._making.source.kinds[kind], part))
        if len(pairs) < 4:
            raise UserError(
                f"pairs: {kind} has {count_of(len(pairs), 'paragraph')} of 16 words or more to "
                f"{part} on; "
                "expected text with blank lines between its paragraphs"
            )
        return pairs

    def _tests(self, kind: str, count: int) -> tuple[Batch, Batch]:
        pairs = self._pairs(kind, "test")
        middle = len(pairs) // 2
        halves = (pairs[:middle], pairs[middle:])
        first, second = (self._encode(_spread(half, count)) for half in halves)
        return first, second

    def _encode(self, pairs: list[tuple[str, str]]) -> Batch:
        return tuple(
            self._encoder.encode([pair[side] for pair in pairs]).to(self.device) for side in (0, 1)
        )

    def _draw_anchors(self, count: int) -> Tensor:
        """Return paragraphs of the known kind that fill what the encoder sees.

        Shorter ones would be padded, and importance is taken from all places of a layer's input.
        """
        found = cut_paragraphs(self._making.source.kinds[self._making.source.known].train)
        long = [part for part in found if part.count(" ") + 1 >= self._encoder.context]
        if len(long) < count:
            raise UserError(
                f"anchors.count: got {count}, and {self._making.source.known} has "
                f"{count_of(len(long), 'paragraph')} of {count_of(self._encoder.context, 'word')} "
                "or more; ask for fewer, or give the model a smaller context"
            )
        order = torch.randperm(len(long), generator=seeds.generator(self.seed, "anchors"))
        return self._encoder.encode([long[place] for place in order[:count].tolist()]).to(
            self.device
        )

    # Batches

    def _draw(self, pairs: Batch, count: int, purpose: str) -> Batch:
        rows = torch.randperm(len(pairs[0]), generator=seeds.generator(self.seed, purpose))[:count]
        if len(rows) < count:
            raise UserError(
                f"training.batch: got {count}; the data have {count_of(len(rows), 'pair')}"
            )
        return tuple(side[rows.to(side.device)] for side in pairs)

    def batch(self, count: int, purpose: str) -> Batch:
        """Return new pairs, none of them twice."""
        return self._draw(self.new, count, purpose)

    def old_batch(self, count: int, purpose: str) -> Batch:
        """Return pairs of the known kind, none of them twice."""
        return self._draw(self.old, count, purpose)

    # Predictions

    def embed(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return embeddings of length 1."""
        with self.autocast():
            return self._encoder.embed(model, tokens).float()

    @property
    def anchors(self) -> Tensor:
        """Tokens of paragraphs of the known kind."""
        return self._anchors

    def predict(self, model: nn.Module, inputs: Tensor) -> Distribution:
        """Return the embedding as the mean of a normal distribution."""
        return Independent(Normal(self.embed(model, inputs), self._encoder.scale), 1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the contrastive loss, with the other texts of the batch as negatives."""
        first, second = (self.embed(model, tokens) for tokens in batch)
        return _contrast(first @ second.T)

    @torch.no_grad()
    def _similarities(self, model: nn.Module, pairs: Batch) -> Tensor:
        """Return the cosine similarity of each first text with each second one."""
        model.eval()
        first, second = (
            torch.cat([self.embed(model, part) for part in torch.split(tokens, TEST_BATCH)])
            for tokens in pairs
        )
        return first @ second.T

    def evaluate(self, model: nn.Module) -> Measured:
        """Return the loss on new pairs, how similarities of old texts changed, and pairs found.

        A pair is found where the second text is the most similar one to the first.
        """
        found = {
            kind: tuple(self._similarities(model, half) for half in halves)
            for kind, halves in self.tests.items()
        }
        *old, new = found
        changed = {
            kind: _halves(
                changed_order(before, now)
                for before, now in zip(self._before[kind], found[kind], strict=True)
            )
            for kind in old
        }
        right = {kind: _halves(map(_share_found, halves)) for kind, halves in found.items()}
        losses = _halves(float(_contrast(half)) for half in found[new])
        return Measured(losses, changed, right[new], {kind: right[kind] for kind in old})


def _contrast(similarities: Tensor) -> Tensor:
    own = torch.arange(len(similarities), device=similarities.device)
    return cross_entropy(SHARPNESS * similarities, own)


def _share_found(similarities: Tensor) -> float:
    own = torch.arange(len(similarities), device=similarities.device)
    return float((similarities.argmax(1) == own).float().mean())


def changed_order(before: Tensor, now: Tensor) -> float:
    """Return 1 - Spearman's correlation: 0 where the order is the same, 2 where it is reversed.

    Examples:
        >>> first = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
        >>> changed_order(first, first.square()), changed_order(first, -first)
        (0.0, 2.0)
    """
    from scipy.stats import spearmanr

    found = spearmanr(before.flatten().cpu().numpy(), now.flatten().cpu().numpy())
    return 1.0 - float(found.statistic)


def _halves(numbers: Iterable[float]) -> Halves:
    first, second = numbers
    return first, second


def _spread(pairs: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Return so many pairs, evenly spread, or all where there are no more."""
    if len(pairs) <= count:
        return pairs
    return [pairs[place * len(pairs) // count] for place in range(count)]
