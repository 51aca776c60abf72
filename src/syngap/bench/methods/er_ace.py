"""ER with asymmetric cross-entropy (Caccia 2022): new classes do not push old ones away."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.bench.methods.er import ER
from syngap.bench.streams.stream import Batch

__all__ = ["ERACE"]


class ERACE(ER):
    """What arrives competes only with the classes of its own batch; what is replayed with all."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the stream's loss over the classes present plus the replay's over all."""
        x, y = self.with_replay(batch)
        arriving, replayed = self.predict(x, y).tensor_split([len(batch.y)])
        absent = torch.ones(arriving.shape[1], dtype=torch.bool, device=arriving.device)
        absent.index_fill_(0, batch.y, False)  # an assignment would bring False from the CPU
        loss = cross_entropy(arriving.masked_fill(absent, -torch.inf), batch.y)
        if len(replayed):
            loss = loss + cross_entropy(replayed, y[len(batch.y) :])
        return loss
