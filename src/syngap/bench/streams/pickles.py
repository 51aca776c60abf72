"""Read a pickle of lists, texts and byte arrays without running it.

A pickle is a program: whoever runs one runs whatever its author wrote. This machine knows only the
instructions that plain data needs. It imports nothing and calls nothing: the few functions by which
NumPy writes an array are recognised by name and acted out here; everything else is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from syngap.bench.errors import UserError

__all__ = ["read_pickle"]

MOST_STEPS = 2_000_000  # official archives need 350,000; each takes a few dozen bytes of memory
LONG = 4096  # longer strings stay where they are instead of being copied


def read_pickle(data: bytes | memoryview, where: str) -> dict[bytes | str, Any]:
    """Return the dictionary that `data` is a pickle of, protocol 2 or later.

    Texts that Python 2 wrote come back as bytes, arrays as read-only views of `data`.

    Args:
        data: all of the file.
        where: what messages call it.

    Examples:
        >>> import pickle
        >>> read_pickle(pickle.dumps({b"labels": [3, 1]}), "file")
        {b'labels': [3, 1]}
        >>> read_pickle(pickle.dumps({b"labels": eval}), "file")
        Traceback (most recent call last):
        syngap.bench.errors.UserError: file: refused, it asks for "builtins.eval"; ...
    """
    machine = _Machine(memoryview(data), where)
    try:
        return machine.run()
    except UserError:
        raise
    except (LookupError, OverflowError, TypeError, ValueError, struct.error) as error:
        raise UserError(f"{where}: damaged, its pickle makes no sense") from error


class _Global(Enum):
    """What a pickle may name, and the one type that naming leads to."""

    RECONSTRUCT = auto()
    FROM_BUFFER = auto()
    NDARRAY = auto()
    DTYPE = auto()
    ENCODE = auto()
    BYTES = auto()
    UINT8 = auto()


_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Global.RECONSTRUCT,  # before NumPy 2
    ("numpy._core.multiarray", "_reconstruct"): _Global.RECONSTRUCT,
    ("numpy.core.numeric", "_frombuffer"): _Global.FROM_BUFFER,
    ("numpy._core.numeric", "_frombuffer"): _Global.FROM_BUFFER,
    ("numpy", "ndarray"): _Global.NDARRAY,
    ("numpy", "dtype"): _Global.DTYPE,
    ("_codecs", "encode"): _Global.ENCODE,  # how Python 3 writes bytes for Python 2
    ("__builtin__", "bytes"): _Global.BYTES,
}

_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i"}
_BYTES = {b"U": 1, b"C": 1, b"T": 4, b"B": 4, b"\x8e": 8, b"\x96": 8}  # to the width of the length
_TEXTS = {b"\x8c": 1, b"X": 4, b"\x8d": 8}
_TUPLES = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}
_PUTS = {b"q": 1, b"r": 4}
_GETS = {b"h": 1, b"j": 4}


@dataclass(eq=False)
class _Array:
    """An array whose values may come later: a pickle refers to it before it is complete."""

    values: NDArray[np.uint8] | None = None


class _Machine:
    def __init__(self, data: memoryview, where: str) -> None:
        self.data, self.where, self.at = data, where, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        # One remembered text could be encoded again and again: together no more than the file.
        self.spare = len(data)

    def run(self) -> dict[bytes | str, Any]:
        if bytes(self.take(1)) != b"\x80" or self.number(1) not in range(2, 6):
            raise UserError(f"{self.where}: not a pickle of protocol 2 to 5")
        for _ in range(MOST_STEPS):
            code = bytes(self.take(1))
            if code == b".":
                return self.result()
            self.step(code)
        raise UserError(f"{self.where}: refused, a pickle of more than {MOST_STEPS} steps")

    def result(self) -> dict[bytes | str, Any]:
        whole = self.pop()
        if type(whole) is not dict:
            raise UserError(f"{self.where}: holds a {type(whole).__name__}, expected a dictionary")
        return {k: _values(v) if isinstance(v, _Array) else v for k, v in whole.items()}

    def step(self, code: bytes) -> None:
        if code in _NUMBERS:
            form = _NUMBERS[code]
            self.stack.append(struct.unpack(form, self.take(struct.calcsize(form)))[0])
        elif code in _PUTS:
            self.memo[self.number(_PUTS[code])] = self.top()
        elif code in _BYTES:
            self.stack.append(self.string(self.number(_BYTES[code])))
        elif code in _TEXTS:
            self.stack.append(self.text(self.number(_TEXTS[code])))
        elif code in _GETS:
            self.stack.append(self.memo[self.number(_GETS[code])])
        elif code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
        elif code in _TUPLES:
            parts = [self.pop() for _ in range(_TUPLES[code])]
            self.stack.append(tuple(reversed(parts)))
        elif code in _OTHERS:
            _OTHERS[code](self)
        else:
            self.refuse(f"it holds the instruction {code!r}")

    # Reading ------------------------------------------------------------------------------------

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise UserError(f"{self.where}: cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def string(self, length: int) -> bytes | memoryview:
        view = self.take(length)
        return view if length > LONG else bytes(view)

    def text(self, length: int) -> str:
        view = self.take(length)
        # Long are only bytes written as text, all below U+0100; a wider text would take four times
        # its length.
        if length > LONG and int(np.frombuffer(view, np.uint8).max()) > 0xC3:
            self.refuse("it holds a long text")
        return str(view, "utf-8")

    def line(self) -> str:
        line = bytes(self.data[self.at : self.at + 256]).partition(b"\n")[0]
        self.take(len(line) + 1)
        return line.decode("ascii")

    # The stack ----------------------------------------------------------------------------------

    def top(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise IndexError
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        parts = self.stack[start:]
        del self.stack[start:]
        return parts

    # Instructions -------------------------------------------------------------------------------

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.top()

    def integer(self) -> None:
        width = self.number(1)
        if width > 8:
            self.refuse(f"it holds a whole number of {width} bytes")
        self.stack.append(int.from_bytes(self.take(width), "little", signed=True))

    def append(self) -> None:
        self.extend([self.pop()])

    def extend(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            raise TypeError
        target.extend(values)

    def set_items(self, flat: list[Any]) -> None:
        target, keys = self.top(), flat[::2]
        # Only these: hashing a tuple of tuples of tuples … would exhaust the interpreter's stack.
        if type(target) is not dict or any(type(key) not in (bytes, str) for key in keys):
            raise TypeError
        target.update(zip(keys, flat[1::2], strict=True))

    def name(self, module: Any, name: Any) -> None:
        if not (type(module) is type(name) is str):
            raise TypeError
        if (module, name) not in _NAMES:
            function = ascii(f"{module}.{name}")[1:-1]
            self.refuse(f'it asks for "{function[:80]}"')
        self.stack.append(_NAMES[module, name])

    def stack_name(self) -> None:
        name = self.pop()
        self.name(self.pop(), name)

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if type(arguments) is not tuple:
            raise TypeError
        self.stack.append(self.call(function, arguments))

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return what NumPy or Python would have made."""
        if function is _Global.ENCODE:
            text, coding = arguments
            if type(text) is not str or coding != "latin1":
                raise TypeError
            self.spare -= len(text)
            if self.spare < 0:
                self.refuse("it would grow beyond its size")
            return text.encode("latin-1")
        if function is _Global.BYTES and not arguments:
            return b""
        if function is _Global.RECONSTRUCT and arguments[0] is _Global.NDARRAY:
            return _Array()
        if function is _Global.FROM_BUFFER:
            buffer, kind, shape, order = arguments
            return _Array(_reshape(buffer, kind, shape, fortran=order == "F"))
        if function is _Global.DTYPE:
            if arguments[0] not in ("u1", b"u1"):
                self.refuse("it holds an array of other things than bytes")
            return _Global.UINT8
        self.refuse("it calls what is not a function")

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if isinstance(target, _Array):
            _, shape, kind, fortran, buffer = state
            target.values = _reshape(buffer, kind, shape, fortran=fortran is True)
        elif target is not _Global.UINT8:  # whose state adds nothing to a byte
            self.refuse("it sets the state of an object")

    def refuse(self, why: str) -> NoReturn:
        raise UserError(f"{self.where}: refused, {why}; only plain data is read")


_OTHERS: dict[bytes, Callable[[_Machine], object]] = {
    b"\x95": lambda machine: machine.take(8),  # a frame: how much to read ahead
    b"(": _Machine.mark,
    b"\x94": _Machine.memoize,
    b"\x8a": _Machine.integer,
    b"t": lambda machine: machine.stack.append(tuple(machine.since_mark())),
    b"]": lambda machine: machine.stack.append([]),
    b"a": _Machine.append,
    b"e": lambda machine: machine.extend(machine.since_mark()),
    b"}": lambda machine: machine.stack.append({}),
    b"s": lambda machine: machine.set_items([machine.pop(), machine.pop()][::-1]),
    b"u": lambda machine: machine.set_items(machine.since_mark()),
    b"c": lambda machine: machine.name(machine.line(), machine.line()),
    b"\x93": _Machine.stack_name,
    b"R": _Machine.reduce,
    b"b": _Machine.build,
}


def _reshape(buffer: Any, kind: Any, shape: Any, *, fortran: bool) -> NDArray[np.uint8]:
    if kind is not _Global.UINT8 or type(shape) is not tuple or len(shape) > 8:
        raise TypeError
    if type(buffer) not in (bytes, memoryview) or any(type(n) is not int or n < 0 for n in shape):
        raise TypeError
    if prod(shape) != len(buffer):
        raise ValueError
    return np.frombuffer(buffer, np.uint8).reshape(shape, order="F" if fortran else "C")


def _values(array: _Array) -> NDArray[np.uint8]:
    if array.values is None:
        raise ValueError
    return array.values
