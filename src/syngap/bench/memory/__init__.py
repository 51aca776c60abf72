"""Memories for replay: what is kept of a stream that does not come back.

- `reservoir`: each sample seen has the same chance; `balanced`: each class has, as far as it can
- `base`: what they share; `fields`: where the samples lie
"""

from syngap.bench.memory.balanced import ClassBalanced
from syngap.bench.memory.base import Memory
from syngap.bench.memory.reservoir import Reservoir

__all__ = ["ClassBalanced", "Memory", "Reservoir"]
