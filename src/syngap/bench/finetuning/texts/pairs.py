"""Pairs of texts that belong together, without labels: the two halves of a paragraph."""

from __future__ import annotations

import re

__all__ = ["cut_pairs", "cut_paragraphs"]

FEWEST = 16  # words of a paragraph that is cut


def cut_paragraphs(text: str) -> list[str]:
    r"""Return the paragraphs of a text that have enough words, each in one line; none twice.

    Examples:
        >>> cut_paragraphs("too short\n\n" + "word " * 8 + "\n" + "more " * 8)[0][:15]
        'word word word '
    """
    found = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return list(dict.fromkeys(part for part in found if part.count(" ") + 1 >= FEWEST))


def cut_pairs(text: str) -> list[tuple[str, str]]:
    """Return each paragraph as its first and its second half of words.

    Two pieces of one text are what Contriever (Izacard 2022) learns from, too.

    Examples:
        >>> cut_pairs("a b c d e f g h i j k l m n o p q")
        [('a b c d e f g h', 'i j k l m n o p q')]
    """
    pairs = []
    for paragraph in cut_paragraphs(text):
        words = paragraph.split(" ")
        middle = len(words) // 2
        pairs.append((" ".join(words[:middle]), " ".join(words[middle:])))
    return pairs
