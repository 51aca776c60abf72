"""Tensors that a test made and that are still there."""

from __future__ import annotations

import gc

from torch import Tensor


def tensors() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


class TensorsSince:
    """Lists the tensors that were made after this object and are still there.

    What other tests left behind may go at any moment. It is kept until then, so that no count
    falls, and no new tensor gets the address of an old one.
    """

    def __init__(self) -> None:
        self.before = tensors()

    def __call__(self) -> list[Tensor]:
        before = {id(tensor) for tensor in self.before}
        return [tensor for tensor in tensors() if id(tensor) not in before]
