"""Checkpoints: a nested state as one safetensors file, with JSON in its header for all but tensors.

One more tensor is the SHA-256 of the file, computed with zeros in its place: a single changed bit
anywhere makes the file invalid. Files of earlier versions have no checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from syngap.bench.errors import UserError
from syngap.bench.storage import read

__all__ = ["pack", "read_state", "unpack"]

_STRUCTURE = "structure"
_VERSION, _KNOWN = "version", 1  # 0 did not say it
_CHECKSUM = "checksum"  # no other tensor's name: those are numbers
_LENGTH = 8  # bytes in which a safetensors file says how long its header is
_ZEROS = bytes(hashlib.sha256().digest_size)
_COPIES = 2  # the bytes of a file, and its tensors


def pack(state: Any) -> bytes:
    """Return `state` as bytes, which `unpack` reads.

    State may be dictionaries (text or whole numbers as keys), lists, tuples, tensors, numbers, text
    and None, nested.

    Examples:
        >>> unpack(pack({"steps": 3, 0: (torch.ones(2), None)}))
        {'steps': 3, 0: (tensor([1., 1.]), None)}
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps({_VERSION: [_KNOWN, _encode(state, tensors)]})
    tensors[_CHECKSUM] = torch.zeros(len(_ZEROS), dtype=torch.uint8)
    content = save(tensors, {_STRUCTURE: structure})
    before, _, after = _around_checksum(content)
    return b"".join([before, _digest(before, after), after])


def unpack(content: bytes) -> Any:
    """Return the state in `content`, its tensors on the CPU.

    Raises:
        ValueError: if it is not a checkpoint, or damaged.
        UserError: if a newer version wrote it.
    """
    try:
        tensors = load(content)
        if _CHECKSUM in tensors:
            before, found, after = _around_checksum(content)
            if found != _digest(before, after):
                raise ValueError("not a checkpoint: its checksum is another")
            del tensors[_CHECKSUM]
        structure = _check_version(json.loads(_header(content)["__metadata__"][_STRUCTURE]))
        state = _decode(structure, tensors)
        if tensors:  # a checksum whose name has changed, for one
            raise ValueError(f"not a checkpoint: unknown tensors {', '.join(tensors)}")
        return state
    except (SafetensorError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"not a checkpoint: {error}") from error


def read_state(path: Path) -> Any:
    """Return the state in a file that `pack` made the bytes of.

    Its length is compared with its header, and with the free memory, before any memory is taken.

    Raises:
        ValueError: if it is not a checkpoint, or damaged.
        UserError: if a newer version wrote it, or it is larger than the memory.
    """
    if path.is_symlink() or not path.is_file():
        raise ValueError("not a checkpoint: it is not a plain file")
    try:
        with safe_open(path, framework="pt"):  # reads the header, and how long the file must be
            size, free = path.stat().st_size, _free_memory()
    except SafetensorError as error:
        raise ValueError(f"not a checkpoint: {error}") from error
    too_large = (
        f"reading it takes {size * _COPIES / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free; "
        "free some, or remove the file to go on from the checkpoint before it"
    )
    if size * _COPIES > free:
        raise UserError(too_large)
    try:
        return unpack(read(path, size))
    except MemoryError as error:
        raise UserError(too_large) from error


def _free_memory() -> float:
    """Return how many bytes can be taken; infinity where the system does not say."""
    try:
        match = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return float("inf")
    return 1024 * int(match[1]) if match else float("inf")


def _check_version(structure: Any) -> Any:
    """Return the encoded state; UserError if a newer version wrote it."""
    if not isinstance(structure, dict) or _VERSION not in structure:
        return structure
    version, encoded = structure[_VERSION]
    if version > _KNOWN:
        raise UserError(
            f"written by a newer syngap (format {version}, this one reads {_KNOWN}); upgrade syngap"
        )
    return encoded


def _header(content: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(content[_LENGTH : _start(content)])
    return header


def _start(content: bytes) -> int:
    """Return where the tensors begin."""
    return _LENGTH + int.from_bytes(content[:_LENGTH], "little")


def _around_checksum(content: bytes) -> tuple[memoryview, memoryview, memoryview]:
    """Return what is before the checksum, the checksum, and what is after it."""
    start, view = _start(content), memoryview(content)
    first, last = (start + offset for offset in _header(content)[_CHECKSUM]["data_offsets"])
    return view[:first], view[first:last], view[last:]


def _digest(before: memoryview, after: memoryview) -> bytes:
    digest = hashlib.sha256(before)
    digest.update(_ZEROS)
    digest.update(after)
    return digest.digest()


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
        return tensors.pop(content)
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
