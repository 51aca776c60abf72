"""What one optimizer step costs beside torch's own, for the 11 M parameters of a ResNet-18."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable

import torch
from cases import resnet18
from measure import in_turns, machine, table

from syngap import SynGAP
from syngap.optim.fisher import Observation

PEER = "Adam, fused"


def parameters() -> list[torch.nn.Parameter]:
    params = list(resnet18().parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    states = [value for state in optimizer.state.values() for value in state.values()]
    total = sum(s.numel() * s.element_size() for s in states if isinstance(s, torch.Tensor))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return total / sum(param.numel() for param in params)


def timed(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> Callable[[], float]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    scores = {param: torch.randn_like(param) for param in params}

    def run() -> float:
        if isinstance(optimizer, SynGAP):  # as observe would have left it
            optimizer.gate.observation = Observation.of_scores(scores, 64, 1.0)
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    optimizers = {
        "SGD": torch.optim.SGD(parameters(), lr=1e-5),
        "SGD, momentum": torch.optim.SGD(parameters(), lr=1e-5, momentum=0.9),
        "Adam, foreach": torch.optim.Adam(parameters(), lr=1e-5, foreach=True),
        PEER: torch.optim.Adam(parameters(), lr=1e-5, fused=True),
        "SynGAP": SynGAP(parameters(), lr=1e-5),
    }
    cases = {name: timed(optimizer, optimizer.step) for name, optimizer in optimizers.items()}
    if shutil.which("g++") or shutil.which("clang++"):
        compiled = SynGAP(parameters(), lr=1e-5)
        optimizers["SynGAP, compiled"] = compiled
        cases["SynGAP, compiled"] = timed(compiled, torch.compile(compiled.step))
    else:
        print("no C++ compiler: the compiled step is left out")

    seconds = in_turns(cases, args.rounds)
    table(
        f"Optimizer step, 11.2 M parameters, {machine()}",
        ["", "ms", f"× {PEER}", "state, bytes a parameter"],
        [
            [
                name,
                f"{1e3 * value.median():.1f}",
                f"{value.over(seconds[PEER]):.2f}",
                f"{state_bytes(optimizers[name]):.1f}",
            ]
            for name, value in seconds.items()
        ],
    )


if __name__ == "__main__":
    main()
