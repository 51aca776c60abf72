"""The loop, what it measures, and how it goes on after an interruption."""

from syngap.bench.training.loop import Journal, train

__all__ = ["Journal", "train"]
