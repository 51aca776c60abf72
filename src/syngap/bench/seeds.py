"""Random numbers of a run: one independent generator for each purpose, all from one seed."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["derive", "generator"]


def derive(seed: int, purpose: str) -> int:
    """Return a seed derived from both; the draws of one purpose do not affect another.

    Examples:
        >>> derive(0, "order") == derive(0, "order")
        True
        >>> derive(0, "order") == derive(0, "labels")
        False
    """
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, purpose: str, device: torch.device | str | None = None) -> torch.Generator:
    """Return a new random generator on `device` (None: the CPU)."""
    return torch.Generator(device or "cpu").manual_seed(derive(seed, purpose))
