"""A text of one kind, and the texts of a comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Question", "Text", "Texts"]


@dataclass(frozen=True)
class Text:
    """A text of one kind.

    Args:
        train: the part that may be learned from.
        test: the part that losses are measured on.
    """

    train: str
    test: str


@dataclass(frozen=True)
class Question:
    """What a taught skill is tested by: a text, and the only right continuation."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Texts:
    """What a model learns and what it is to keep.

    Args:
        new: the name of the kind that is learned.
        known: the name of the kind that anchors are of, where they are not own samples.
        kinds: every text, by the name of its kind; all but `new` are old.
        questions: of the skill that is taught, where the new text teaches one.
    """

    new: str
    known: str
    kinds: Mapping[str, Text]
    questions: tuple[Question, ...] = ()

    @property
    def old(self) -> list[str]:
        """The names of the old kinds, that of the anchors first."""
        others = [kind for kind in self.kinds if kind not in (self.new, self.known)]
        return [self.known, *others]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all texts and questions, and of what they are for."""
        whole = repr((self.new, self.known, dict(self.kinds), self.questions))
        return hashlib.sha256(whole.encode()).hexdigest()[:12]
