"""`torchrun --nproc-per-node 2 examples/distributed.py ddp`, or `fsdp2`: as one process does."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import syngap


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def sharded(model: nn.Sequential) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(model: nn.Module, protects: bool, rank: int, of: int) -> list[Tensor]:
    """The loop of the README over this process's rows; returns weights and importance."""
    group, data = None if of == 1 else dist.group.WORLD, torch.Generator().manual_seed(1)
    if protects:  # with the same known inputs in every process
        known = torch.randn(256, 32, generator=data).double()
        protection = syngap.protect(model, known, process_group=group)
        optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:  # drawn labels differ between processes, as they should; true ones can be compared
        optimizer = syngap.SynGAP(
            model.parameters(), 0.3, estimator="empirical", process_group=group
        )
    for _ in range(20):
        x, y = torch.randn(32, 32, generator=data), torch.randint(10, (32,), generator=data)
        former = protection.loss() if protects else 0.0
        logits, y = model(x[rank::of].double()), y[rank::of]
        optimizer.zero_grad()
        if not protects:
            optimizer.observe(logits, targets=y)  # scores are summed over processes
        (former + cross_entropy(logits, y)).backward()
        optimizer.step()
    parts = [*model.parameters(), *(() if protects else optimizer.importance())]
    return [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, of = dist.get_rank(), dist.get_world_size()
    for way in sys.argv[1:] or ("ddp", "fsdp2"):
        for protects in (False, True):
            model = (DistributedDataParallel if way == "ddp" else sharded)(network())
            found, alone = train(model, protects, rank, of), train(network(), protects, 0, 1)
            torch.testing.assert_close(found, alone, rtol=1e-7, atol=1e-9)
        print(f"{way}, {of} processes: as one process with the whole batch\n" * (rank == 0), end="")
    dist.barrier()
    dist.destroy_process_group()
