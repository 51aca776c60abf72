"""What importance costs: loss gradient and Fisher diagonal over the loss gradient alone.

Peers compute the same per-sample diagonal; those that are not installed are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
from cases import NETWORKS
from measure import in_turns, machine, peak_memory, progress, table, tight_malloc
from torch import Tensor, nn
from torch.nn import functional

from syngap import SynGAP

BASE = "forward + backward"
Case = Callable[[], None]


def data(batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, 32, 32, generator=generator)
    return x, torch.randint(100, (batch,), generator=generator)


def base(model: nn.Module, batch: int) -> Case:
    x, y = data(batch)

    def run() -> None:
        functional.cross_entropy(model(x), y).backward()
        model.zero_grad()

    return run


def syngap(model: nn.Module, batch: int, estimator: str) -> Case:
    x, y = data(batch)
    optimizer = SynGAP(model.parameters(), lr=0.1, estimator=estimator, every=1, model=model)

    def run() -> None:
        logits = model(x)
        loss = functional.cross_entropy(logits, y)
        optimizer.observe(logits)
        loss.backward()
        optimizer.zero_grad()  # gradients and observation, so that nothing is left of a run

    return run


def vmap(model: nn.Module, batch: int) -> Case:
    """Per-sample gradients by torch.func, on labels drawn from the model, besides the loss."""
    x, y = data(batch)
    params = {name: param.detach() for name, param in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def log_likelihood(params: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, (params, buffers), (sample[None],))
        return -functional.cross_entropy(logits, label[None])

    gradients = torch.func.vmap(torch.func.grad(log_likelihood), in_dims=(None, 0, 0))

    def run() -> None:
        model.train()
        logits = model(x)
        functional.cross_entropy(logits, y).backward()
        labels = torch.distributions.Categorical(logits=logits.detach()).sample()
        model.eval()  # vmap has no train-mode BatchNorm
        {name: g.square().mean(0) for name, g in gradients(params, x, labels).items()}
        model.zero_grad()

    return run


def backpack(model: nn.Module, batch: int) -> Case:
    """BackPACK's sum of squared per-sample gradients, on labels drawn from the model."""
    from backpack import backpack as extending
    from backpack import extend
    from backpack.extensions import SumGradSquared

    x, y = data(batch)
    extended = extend(model, use_converter=any(isinstance(m, nn.Conv2d) for m in model.modules()))
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))

    def run() -> None:
        extended.train()
        functional.cross_entropy(extended(x), y).backward()
        extended.eval()  # nor has BackPACK
        logits = extended(x)
        labels = torch.distributions.Categorical(logits=logits.detach()).sample()
        with extending(SumGradSquared()):
            loss(logits, labels).backward()
        extended.zero_grad()
        for param in extended.parameters():
            del param.sum_grad_squared

    return run


def nngeometry(model: nn.Module, batch: int) -> Case:
    """nngeometry's diagonal Fisher, on labels drawn from the model."""
    from nngeometry.metrics import FIM_MonteCarlo
    from nngeometry.object import PMatDiag

    x, y = data(batch)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=batch)

    def run() -> None:
        model.train()
        functional.cross_entropy(model(x), y).backward()
        model.eval()
        FIM_MonteCarlo(model=model, loader=loader, representation=PMatDiag, trials=1)
        model.zero_grad()

    return run


CASES: dict[str, Callable[[nn.Module, int], Case]] = {
    BASE: base,
    "SynGAP, sampled": lambda model, batch: syngap(model, batch, "sampled"),
    "SynGAP, exact": lambda model, batch: syngap(model, batch, "exact"),
    "torch.func vmap": vmap,
    "BackPACK": backpack,
    "nngeometry": nngeometry,
}


def make(network: str, case: str, batch: int) -> Case | None:
    """Return a case ready to run, None where its package is missing or cannot do it."""
    torch.manual_seed(0)
    try:
        run = CASES[case](NETWORKS[network](), batch)
        if case not in (BASE, "SynGAP, sampled", "SynGAP, exact"):
            run()  # a peer that cannot is left out rather than ending the run
    except Exception as error:
        print(f"{case} on {network} is left out: {type(error).__name__}: {str(error)[:120]}")
        return None
    return run


def memory(network: str, case: str, batch: int) -> float | None:
    """Return the peak megabytes of a case, measured in a process of its own."""
    command = [sys.executable, __file__, "--memory", network, case, "--batch", str(batch)]
    done = subprocess.run(command, env=tight_malloc(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"memory of {case} is unknown: {done.stderr.strip().splitlines()[-1:]}")
        return None
    last = done.stdout.strip().splitlines()[-1]
    return None if last == "None" else float(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--memory", nargs=2, metavar=("NETWORK", "CASE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if args.memory:
        run = make(*args.memory, args.batch)
        peak = peak_memory(run) if run else None
        print(None if peak is None else peak / 1e6)
        return

    for network in NETWORKS:
        cases = {case: make(network, case, args.batch) for case in CASES}
        present = {case: run for case, run in cases.items() if run is not None}
        rounds = args.rounds if "64" in network else 3 * args.rounds
        seconds = in_turns(present, rounds)
        del cases
        peaks = {}
        for case in present:
            progress(f"memory of {case}")
            peaks[case] = memory(network, case, args.batch)
        progress("")
        rows = []
        for case, value in seconds.items():
            peak, least = peaks[case], peaks[BASE]
            over = f"{peak - least:+.0f}" if peak is not None and least is not None else "?"
            ratio = f"{value.over(seconds[BASE]):.2f}"
            rows.append([case, f"{1e3 * value.median():.1f}", ratio, "" if case == BASE else over])
        table(
            f"{network}, batch {args.batch}, {machine()}",
            ["", "ms", f"× {BASE}", "peak memory, MB over it"],
            rows,
        )


if __name__ == "__main__":
    main()
