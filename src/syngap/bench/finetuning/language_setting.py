"""A language model: windows of text, own samples or old text as anchors, losses in nats a token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap.bench import seeds
from syngap.bench.errors import UserError
from syngap.bench.finetuning.models import LanguageModel, Making
from syngap.bench.finetuning.point import Halves
from syngap.bench.finetuning.setting import (
    TEST_BATCH,
    Anchors,
    Batch,
    Measured,
    Precision,
    Setting,
)
from syngap.bench.finetuning.texts import Question, Texts
from syngap.messages import count_of
from syngap.protection import own_samples

__all__ = ["LanguageSetting"]

_TOKENS = 1 << 16  # of a vocabulary; with a larger one fewer windows are tested at a time
_SOFTMAX = 1 << 27  # logits whose softmax is taken at a time, in float32
_WRITTEN = 1024  # texts at a time by `generate`, which takes the same time for fewer


class LanguageSetting(Setting):
    """A language model, and texts to learn and to keep.

    Args:
        language: the model.
        making: texts, seed and device.
        anchors: how many, and whether they are own samples or old text.
        windows: of each half of a test text.
        precision: of the forward pass.

    Attributes:
        new: the tokens that are learned.
        questions: of a skill that is taught, and where their answers are; None without any.
        tests: windows of both halves of each test text, old kinds first and then the new one.
    """

    def __init__(
        self,
        language: LanguageModel,
        making: Making[Texts],
        *,
        anchors: Anchors,
        windows: int,
        precision: Precision = "fp32",
    ) -> None:
        self._language, self._making, self._anchors = language, making, anchors
        super().__init__(language.model, making.seed, making.device, precision)
        texts = making.source
        self.new = self._encode(texts.new, "train")
        self.tests = {kind: self._tests(kind, windows) for kind in (*texts.old, texts.new)}
        questions = texts.questions
        self.questions = self.encode_questions(questions) if questions else None
        self._own: Tensor | None = None
        with torch.no_grad():
            some = next(iter(self.tests.values()))[0][:1, :1]
            self._vocabulary = self.predict(language.model, some).shape[-1]

    # Text

    def _encode(self, kind: str, part: Literal["train", "test"]) -> Tensor:
        text = getattr(self._making.source.kinds[kind], part)
        tokens = self._language.encode(text).to(self.device)
        if len(tokens) <= self._language.context:
            raise UserError(
                f"texts: {kind} has {count_of(len(tokens), 'token')} to {part} on, and a window "
                f"takes {self._language.context}; give more text or a smaller context"
            )
        return tokens

    def _tests(self, kind: str, windows: int) -> tuple[Tensor, Tensor]:
        tokens = self._encode(kind, "test")
        middle = len(tokens) // 2
        first, second = tokens[:middle], tokens[middle:]
        return self._spread(first, windows, kind), self._spread(second, windows, kind)

    def _spread(self, text: Tensor, count: int, kind: str) -> Tensor:
        """Return windows that are evenly spread over a text."""
        last = len(text) - self._language.context - 1
        if last < 0:
            raise UserError(f"texts: half of {kind}'s test text is shorter than a window")
        offsets = torch.linspace(0, last, count).long()
        return self.cut(text, offsets)

    @cached_property
    def old(self) -> Tensor:
        """True old tokens of the known kind, of which few methods see any."""
        return self._encode(self._making.source.known, "train")

    def cut(self, text: Tensor, offsets: Tensor) -> Tensor:
        """Return the start token and the tokens after each offset."""
        places = offsets[:, None] + torch.arange(self._language.context)
        windows = text[places.to(text.device)]
        return nn.functional.pad(windows, (1, 0), value=self._language.start)

    def draw(self, text: Tensor, count: int, purpose: str) -> Tensor:
        """Return windows of a text at places that follow from the seed and the purpose alone."""
        order = seeds.generator(self.seed, purpose)
        last = len(text) - self._language.context
        return self.cut(text, torch.randint(last, (count,), generator=order))

    def batch(self, count: int, purpose: str) -> Batch:
        """Return windows of the new text."""
        return (self.draw(self.new, count, purpose),)

    def old_batch(self, count: int, purpose: str) -> Batch:
        """Return windows of the known text."""
        return (self.draw(self.old, count, purpose),)

    def encode_questions(self, questions: Sequence[Question]) -> tuple[Tensor, Tensor]:
        """Return prompts with their answers as windows of one length, and where answers are."""
        start = torch.tensor([self._language.start])
        rows, answers = [], []
        for question in questions:
            prompt, answer = map(self._language.encode, (question.prompt, question.answer))
            rows.append(torch.cat([start, prompt, answer]))
            before = torch.zeros(1 + len(prompt), dtype=torch.bool)
            answers.append(torch.cat([before, torch.ones(len(answer), dtype=torch.bool)]))
        # What follows an answer does not change how it is predicted.
        windows = nn.utils.rnn.pad_sequence(rows, True, float(self._language.start))
        is_answer = nn.utils.rnn.pad_sequence(answers, True)
        return windows.to(self.device), is_answer.to(self.device)

    # What a model knows

    @property
    def own(self) -> Tensor:
        """Texts that the model wrote before tuning."""
        if self._own is None:
            began = time.monotonic()
            shared = self._making.share("samples", self._write)
            self.shared_seconds += shared.seconds
            self.got_seconds += time.monotonic() - began
            if self.device.type == "cuda":  # memory to write them counts for no run: one makes them
                torch.cuda.reset_peak_memory_stats(self.device)
            self._own = shared.tensors["tokens"].to(self.device)
        return self._own

    def _write(self) -> Mapping[str, Tensor]:
        torch.manual_seed(seeds.derive(self.seed, "own samples"))
        prompt = self._anchors.prompt
        with self.autocast():
            tokens = own_samples(
                self.start,
                self._anchors.count,
                length=self._language.context,
                prompts=self._language.encode(prompt).unsqueeze(0) if prompt else None,
                start=self._language.start,
                batch_size=_WRITTEN if hasattr(self.start, "generate") else None,
            )
        return {"tokens": tokens}

    @property
    def anchors(self) -> Tensor:
        """The inputs that every method remembers the model by."""
        if self._anchors.source == "own":
            return self.own
        return self.draw(self.old, self._anchors.count, "anchors")[:, :-1]

    # Predictions

    def predict(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return logits of what comes after each token."""
        with self.autocast():
            return self._language.logits(model, inputs)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss in nats a token."""
        (windows,) = batch
        logits = self.predict(model, windows[:, :-1]).float()
        return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Measured:
        """Return the loss on both halves of each test text, and the share of exact answers."""
        model.eval()
        losses = {
            kind: (self._mean(model, first), self._mean(model, second))
            for kind, (first, second) in self.tests.items()
        }
        *old, new = losses
        return Measured(losses[new], {kind: losses[kind] for kind in old}, self.exact_match(model))

    @torch.no_grad()
    def exact_match(self, model: nn.Module) -> Halves | None:
        """Return the share of questions, of each half, that the likeliest tokens answer exactly.

        The likeliest continuation is the answer where each of its tokens is the likeliest after
        the prompt and the tokens before it, so one forward pass tells.
        """
        if self.questions is None:
            return None
        model.eval()
        right = []
        for windows, is_answer in zip(
            *(torch.split(part, TEST_BATCH) for part in self.questions), strict=True
        ):
            likeliest = self.predict(model, windows[:, :-1]).argmax(-1)
            right.append(((likeliest == windows[:, 1:]) | ~is_answer[:, 1:]).all(1))
        first, second = torch.cat(right).float().tensor_split(2)
        return float(first.mean()), float(second.mean())

    def _mean(self, model: nn.Module, windows: Tensor) -> float:
        count = min(TEST_BATCH, max(1, TEST_BATCH * _TOKENS // self._vocabulary))
        losses = []
        for part in torch.split(windows, count):
            logits = self.predict(model, part[:, :-1])
            rows = max(1, _SOFTMAX // logits[0].numel())
            pieces = (torch.split(each, rows) for each in (logits, part[:, 1:]))
            for some, tokens in zip(*pieces, strict=True):
                mean = cross_entropy(some.float().flatten(0, 1), tokens.flatten())
                losses.append(len(some) * mean)
        return float(torch.stack(losses).sum()) / len(windows)
