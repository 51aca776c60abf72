"""One loop, one process or many: `torchrun --nproc-per-node 2 examples/distributed.py`.

DDP and FSDP2 end where one process with the whole batch does, weights and importance alike.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from syngap import SynGAP


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def sharded(model: nn.Sequential) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(model: nn.Module, rank: int, of: int) -> list[Tensor]:
    """The loop of the README over this process's rows; returns weights and importance, whole."""
    # Drawn labels differ between processes, as they should; true ones let the runs be compared.
    group = None if of == 1 else dist.group.WORLD
    optimizer = SynGAP(model.parameters(), lr=0.3, estimator="empirical", process_group=group)
    data = torch.Generator().manual_seed(1)
    for _ in range(20):
        x, y = torch.randn(32, 32, generator=data), torch.randint(10, (32,), generator=data)
        x, y = x[rank::of], y[rank::of]
        logits = model(x)
        optimizer.zero_grad()
        optimizer.observe(logits, targets=y)  # scores are summed over processes, as gradients are
        cross_entropy(logits, y).backward()
        optimizer.step()
    found = [*model.parameters(), *optimizer.importance()]
    return [part.full_tensor() if hasattr(part, "full_tensor") else part for part in found]


def compare(rank: int, of: int) -> None:
    alone = train(network(), 0, 1)
    for model in (DistributedDataParallel(network()), sharded(network())):
        torch.testing.assert_close(train(model, rank, of), alone, rtol=1e-4, atol=1e-6)
        if rank == 0:
            print(f"{type(model).__name__}, {of} processes: as one process with the whole batch")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    compare(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
