"""Data in the order it arrives.

A source (`digits`, `cifar100`, `core50`, `folder`, `npz`) says which sample belongs to which task;
`Stream` puts them in order. A new source is a file here and a line in `registry`: a function
(seed, data, *, options) that returns `Tasks`. Another package adds one by an entry point of the
group "syngap.streams".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from syngap.bench.options import Seed, check_value, checked, signature
from syngap.bench.registry import Registry
from syngap.bench.streams.arrays import arrays
from syngap.bench.streams.stream import Batch, Stream
from syngap.bench.streams.tasks import InMemory, Pixels, Samples, Split, Tasks

__all__ = [
    "Batch",
    "InMemory",
    "Pixels",
    "Samples",
    "Split",
    "Stream",
    "Tasks",
    "arrays",
    "load",
    "options",
    "registry",
]

registry = Registry(
    "stream",
    "syngap.streams",
    {
        "digits": "syngap.bench.streams.digits:digits",
        "cifar100": "syngap.bench.streams.cifar100:cifar100",
        "core50": "syngap.bench.streams.core50:core50",
        "folder": "syngap.bench.streams.folder:folder",
        "npz": "syngap.bench.streams.arrays:npz",
    },
)


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """Return what can be set for the stream `name`: the source's options, then the order's."""
    return {**signature(registry.get(name)), **signature(Stream)}


def load(name: str, *, seed: int = 0, data: Path | None = None, **values: Any) -> Stream:
    """Return the stream `name`.

    Args:
        name: one of `registry.names()`.
        seed: of the order of classes and samples.
        data: the folder its files are in; None looks at SYNGAP_DATA and the default cache.
        **values: options of the source and of `Stream`.

    Examples:
        >>> stream = load("digits", batch=10)
        >>> stream.tasks, stream.classes, stream[0].x.shape[1:]
        (5, 10, torch.Size([1, 8, 8]))
    """
    check_value(seed, Seed, "seed")
    source: Callable[..., Tasks] = registry.get(name)
    complete = checked(values, options(name), "stream")
    ordering = signature(Stream)
    tasks = source(seed, data, **{k: v for k, v in complete.items() if k not in ordering})
    return Stream(tasks, seed, **{k: v for k, v in complete.items() if k in ordering})
