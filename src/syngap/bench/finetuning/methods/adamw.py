"""AdamW on all weights: what most people do, and what the others are compared with."""

from __future__ import annotations

from syngap.bench.finetuning.methods.method import Method

__all__ = ["AdamW"]


class AdamW(Method):
    """AdamW without decay.

    Args:
        setting: the model and data.
        lr: learning rate.
    """
