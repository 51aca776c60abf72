"""Is the step bound by memory? Its bytes a second over those of a plain copy, on a GPU.

A step that folds an observation in reads F, gradient, observation and parameter and writes F and
parameter: 24 bytes a parameter. The ceiling is measured in the same turns: as many bytes, or 2 GiB
where that is less, from one tensor to another, half read and half written, by torch's copy or by a
kernel that multiplies by one, whichever is faster. "ResNet-18" has its
62 tensors, the others one tensor of 1024 columns. Steps are captured in a CUDA graph, ten in each,
so that launches from Python do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from cases import resnet18
from measure import captured, progress, table
from torch import Tensor, nn

from syngap import SynGAP
from syngap.optim.fisher import Observation

BYTES, INNER, ROUNDS = 24, 10, 15
SIZES = {"1 M": 1 << 20, "11 M": 11 << 20, "100 M": 100 << 20, "1 B": 1000 << 20}


def parameters_of(name: str) -> list[nn.Parameter]:
    if name == "ResNet-18":
        network = resnet18().cuda().to(memory_format=torch.channels_last)
        return list(network.parameters())
    return [nn.Parameter(torch.randn(SIZES[name] // 1024, 1024, device="cuda"))]


def seconds(replay: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / INNER


def stepping(parameters: list[nn.Parameter], fused: bool | None) -> Callable[[], None]:
    """Return a step with an observation at hand, as after `observe`."""
    optimizer = SynGAP(parameters, lr=1e-6, capturable=True, fused=fused)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.randn_like(parameter)
    scores: dict[Tensor, Tensor] = {p: torch.randn_like(p) for p in parameters}
    observation = Observation.of_scores(scores, 64, 1.0)

    def once() -> None:
        optimizer.gate.observation = observation  # as observe would have left it
        optimizer.step()

    return once


def measure(name: str) -> list[str]:
    parameters = parameters_of(name)
    count = sum(parameter.numel() for parameter in parameters)
    copied = min(count * BYTES, 1 << 31)
    source = torch.empty(copied // 8, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    turns = {
        "copy": captured(lambda: target.copy_(source), INNER),
        "times one": captured(lambda: torch.mul(source, 1.0, out=target), INNER),
        "step": captured(stepping(parameters, None), INNER),
        "foreach": captured(stepping(parameters, False), INNER),
    }
    found: dict[str, list[float]] = {case: [] for case in turns}
    for _ in range(ROUNDS):
        for case, replay in turns.items():
            found[case].append(seconds(replay))
    copy, times_one, step, lists = (statistics.median(found[case]) for case in turns)
    copy = min(copy, times_one)
    ceiling, speed = copied / copy, count * BYTES / step
    return [
        name,
        f"{1e6 * step:.0f}",
        f"{1e6 * lists:.0f}",
        f"{ceiling / 1e12:.2f}",
        f"{speed / 1e12:.2f}",
        f"{speed / ceiling:.0%}",
    ]


def main() -> None:
    print(__doc__)
    rows = []
    for name in ("ResNet-18", *SIZES):
        progress(name)
        rows.append(measure(name))
        torch.cuda.empty_cache()
    head = ["parameters", "step, µs", "foreach, µs", "copy, TB/s", "step, TB/s", "of the copy"]
    table(f"{torch.cuda.get_device_name()}, torch {torch.__version__}:", head, rows)


if __name__ == "__main__":
    main()
