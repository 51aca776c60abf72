"""Nested states as one safetensors file: tensors as tensors, the rest as JSON in its header."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

__all__ = ["packed", "unpacked"]

_STRUCTURE = "structure"


def packed(state: Any) -> bytes:
    """Return the bytes that `unpacked` makes `state` of again.

    State may be dictionaries (text or whole numbers as keys), lists, tuples, tensors, numbers, text
    and None, nested.

    Examples:
        >>> unpacked(packed({"steps": 3, 0: (torch.ones(2), None)}))
        {'steps': 3, 0: (tensor([1., 1.]), None)}
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_encode(state, tensors))
    return save(tensors, {_STRUCTURE: structure})


def unpacked(content: bytes) -> Any:
    """Return the state in `content`, its tensors on the CPU; ValueError where there is none."""
    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        return _decode(json.loads(header["__metadata__"][_STRUCTURE]), tensors)
    except (SafetensorError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"not a checkpoint: {error}") from error


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # A copy: tensors that share memory, as views do, cannot be saved as they are.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_key(key), _encode(part, tensors)] for key, part in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_encode(part, tensors) for part in value]}
    if isinstance(value, list):
        return [_encode(part, tensors) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be kept in a checkpoint")


def _key(key: Any) -> str | int:
    if not isinstance(key, (str, int)) or isinstance(key, bool):
        raise TypeError(f"a key of a state must be text or a whole number, got {key!r}")
    return key


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(part, tensors) for key, part in content}
    if kind == "tuple":
        return tuple(_decode(part, tensors) for part in content)
    raise ValueError(f"not a checkpoint: it has a {kind}")


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's own sources of random numbers (dropout draws from them)."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Set torch's own sources of random numbers to what `random_states` gave."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
