"""One loop, one process or many: DDP and FSDP2 end where one process with the whole batch does.

    torchrun --nproc-per-node 2 examples/distributed.py ddp
    torchrun --nproc-per-node 2 examples/distributed.py fsdp2

Trains with SynGAP, and with what `syngap.protect` returns; compares weights and importance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import syngap
from syngap import SynGAP


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def sharded(model: nn.Sequential) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


WAYS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": sharded,
}


def learn(model: nn.Module, rank: int, of: int) -> list[Tensor]:
    """The loop of the README over this process's rows; returns weights and importance, whole."""
    # Drawn labels differ between processes, as they should; true ones let the runs be compared.
    group = None if of == 1 else dist.group.WORLD
    optimizer = SynGAP(model.parameters(), lr=0.3, estimator="empirical", process_group=group)
    for x, y in batches(rank, of):
        logits = model(x)
        optimizer.zero_grad()
        optimizer.observe(logits, targets=y)  # scores are summed over processes, as gradients are
        cross_entropy(logits, y).backward()
        optimizer.step()
    return whole([*model.parameters(), *optimizer.importance()])


def keep(model: nn.Module, rank: int, of: int) -> list[Tensor]:
    """The loop of `protect`, with the same known inputs in every process; returns weights."""
    known = torch.randn(256, 32, generator=torch.Generator().manual_seed(2)).double()
    group = None if of == 1 else dist.group.WORLD
    protection = syngap.protect(model, known, process_group=group)  # after DDP or fully_shard
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for x, y in batches(rank, of):
        loss = protection.loss() + cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return whole(list(model.parameters()))


def batches(rank: int, of: int) -> list[tuple[Tensor, Tensor]]:
    data = torch.Generator().manual_seed(1)
    drawn = [
        (torch.randn(32, 32, generator=data).double(), torch.randint(10, (32,), generator=data))
        for _ in range(20)
    ]
    return [(x[rank::of], y[rank::of]) for x, y in drawn]


def whole(tensors: list[Tensor]) -> list[Tensor]:
    return [part.full_tensor() if hasattr(part, "full_tensor") else part for part in tensors]


def compare(way: str, rank: int, of: int) -> None:
    for name, train in {"SynGAP": learn, "protect": keep}.items():
        found, alone = train(WAYS[way](network()), rank, of), train(network(), 0, 1)
        torch.testing.assert_close(found, alone, rtol=1e-7, atol=1e-9)
        if rank == 0:
            print(f"{way}, {name}, {of} processes: as one process with the whole batch")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for way in sys.argv[1:] or WAYS:
        compare(way, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
