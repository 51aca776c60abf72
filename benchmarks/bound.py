"""How far is a step of ER from what the machine can do? Its time against two bounds.

"Products": the FLOP of forward and backward pass, as torch counts them, at the speed of one large
product. "Memory": each layer's output written and read once, its gradient too, weights read twice,
their gradients written and read, weights written, at the speed of a large copy; who fuses layers
can do with less. Both speeds are measured in the same turns. On a CPU one thread in seconds of its
CPU; with `cuda` as argument on a GPU, in bfloat16, captured, by the clock. "Compiled" is a step
with `compiled: true`; "compiling, s" is what the compiler took before, less where a cache helped.

On a CPU further tables have the operations that take most of a step of ER and of SynGAP.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells when it starts and stops

import torch
from cases import CASES, Case
from loop import DEVICE, GPU, ROUNDS, ours, timed
from measure import in_turns, machine, progress, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

SIDE = 8192 if GPU else 1024  # of the large product
COPIED = 1 << (31 if GPU else 28)  # bytes, half of them read
DTYPE = torch.bfloat16 if GPU else torch.float32
TOP = 8  # operations


def work(case: Case) -> tuple[float, float]:
    """Return the FLOP of a step, and the bytes that it moves at least, layer by layer."""
    model = case.network().to(DEVICE)
    samples, labels = (part.to(DEVICE) for part in case.samples(2 * case.batch))
    written = 0

    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal written
        written += output.numel() * output.element_size()

    for layer in model.modules():
        if not list(layer.children()):
            layer.register_forward_hook(note)
    with (
        FlopCounterMode(display=False) as counter,
        torch.autocast(DEVICE.type, DTYPE, enabled=GPU),
    ):
        cross_entropy(model(samples.float()), labels).backward()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return counter.get_total_flops(), 4 * written + 5 * weights


def measure(case: Case) -> list[list[str]]:
    """Return a row for the step as it is by default, and one for the compiled step."""
    flop, moved = work(case)
    matrix = torch.randn(SIDE, SIDE, device=DEVICE, dtype=DTYPE)
    source = torch.ones(COPIED // 8, device=DEVICE)
    target = torch.empty_like(source)
    out = torch.empty_like(matrix)
    compiled = f"{case.name}, compiled"
    loops = {case.name: ours(case, "er"), compiled: ours(case, "er", compiled=True)}
    turns = {name: timed(loop) for name, loop in loops.items()} | {
        "product": timed(lambda: torch.mm(matrix, matrix, out=out)),
        "copy": timed(lambda: torch.mul(source, 1.0, out=target)),
    }
    found = {name: seconds.median() for name, seconds in in_turns(turns, ROUNDS).items()}
    speed, bandwidth = 2 * SIDE**3 / found["product"], COPIED / found["copy"]
    products, memory = flop / speed, moved / bandwidth
    bounds = [
        f"{flop / 1e9:.3g}",
        f"{speed / 1e9:.4g}",
        f"{1e3 * products:.3g}",
        f"{moved / 1e6:.3g}",
        f"{bandwidth / 1e9:.4g}",
        f"{1e3 * memory:.3g}",
    ]
    rows = []
    for name, loop in loops.items():
        step = found[name] / case.steps
        compiling = f"{loop.learner.compiling:.1f}" if name == compiled else ""
        times = f"{step / max(products, memory):.2f}"
        rows.append([name, f"{1e3 * step:.3g}", *bounds, times, compiling])
    return rows


def operations(case: Case, method: str) -> list[list[str]]:
    """Return the operations of a step that take most, a row each."""
    turn = ours(case, method)
    turn()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        turn()
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in events)
    return [
        [
            event.key,
            f"{event.self_cpu_time_total / case.steps:.0f}",
            f"{event.self_cpu_time_total / whole:.0%}",
            f"{event.count / case.steps:.0f}",
        ]
        for event in events[:TOP]
    ]


def main() -> None:
    torch.set_num_threads(1)
    print(f"{__doc__}\n{torch.cuda.get_device_name() if GPU else machine()}")
    rows = []
    for case in CASES[DEVICE.type].values():
        progress(case.name)
        rows += measure(case)
    head = ["", "ms a step", "GFLOP", "GFLOP/s", "products, ms"]
    head += ["MB", "GB/s", "memory, ms", "× the larger bound", "compiling, s"]
    table("ER:", head, rows)
    for case in () if GPU else list(CASES["cpu"].values())[1:]:
        for method in ("er", "syngap"):
            head = ["operation", "µs a step", "of all", "calls a step"]
            table(f"{case.name}, {method}:", head, operations(case, method))


if __name__ == "__main__":
    main()
