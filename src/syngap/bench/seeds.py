"""Random numbers of a run: one independent source for each purpose, all from one seed."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["derived", "generator"]


def derived(seed: int, purpose: str) -> int:
    """Return a seed that depends on both; changing one purpose's draws leaves the others alone.

    Examples:
        >>> derived(0, "order") == derived(0, "order")
        True
        >>> derived(0, "order") == derived(0, "labels")
        False
    """
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, purpose: str, device: torch.device | str | None = None) -> torch.Generator:
    """Return a new source of random numbers on `device` (the CPU where None is given)."""
    return torch.Generator(device or "cpu").manual_seed(derived(seed, purpose))
