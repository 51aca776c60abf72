"""How far is a step of ER from what the machine can do? Its time against two bounds.

"Products": the FLOP of forward and backward pass, as torch counts them, at the speed of one large
product. "Memory": each layer's output written and read once, its gradient too, weights read twice,
their gradients written and read, weights written, at the speed of a large copy; who fuses layers
can do with less. Both speeds are measured in the same turns. On a CPU one thread in seconds of its
CPU; with `cuda` as argument on a GPU, in bfloat16, captured, by the clock. "Compiled" is a step
with `compiled: true`; "compiling, s" is what the compiler took before, less where a cache helped.
"At once": as many runs as `syngap run` has on such a GPU, each a process; the time that passes over
the steps of all of them.

On a CPU further tables have the operations that take most of a step of ER and of SynGAP.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells when it starts and stops

import torch
from cases import CASES, Case
from loop import DEVICE, GPU, ROUNDS, ours, timed
from measure import Kernel, busy, in_turns, kind_of, machine, progress, rows_by, short_name, table
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from syngap.bench.runner.mps import mps_daemon, runs_per_gpu

SIDE = 8192 if GPU else 1024  # of the large product
COPIED = 1 << (31 if GPU else 28)  # bytes, half of them read
DTYPE = torch.bfloat16 if GPU else torch.float32
TOP = 8  # operations
KERNELS = 16
PROFILED = 20  # steps on a GPU
TURN, SECONDS = 20, 10.0  # steps of a run beside others between two looks at the clock; all time
ON_GPU = """
Further tables are a profile of captured steps: kernels by kind, then those that take most. A fused
kernel has one kind: normalisation if that is in it, else activation. "No kernel" is the time
between kernels while they are profiled, which makes a step longer; "by the clock" it is what
remains of a step that nobody profiles.
"""


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
    runs = runs_per_gpu(len(os.sched_getaffinity(0))) if GPU else 1
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
    compiling = {compiled: f"{loops[compiled].learner.compiling:.1f}"}
    steps = {name: found[name] / case.steps for name in loops}
    if runs > 1:
        for name in loops:
            steps[f"{name}, {runs} at once"] = at_once(case, runs, name == compiled)
    rows = []
    for name, step in steps.items():
        times = f"{step / max(products, memory):.2f}"
        rows.append([name, f"{1e3 * step:.3g}", *bounds, times, compiling.get(name, "")])
    return rows


def at_once(case: Case, runs: int, compiled: bool) -> float:
    """Return the seconds of a step of ER while so many runs share the GPU."""
    progress(f"{case.name}, {runs} at once")
    how = "compiled" if compiled else "as it is"
    command = [sys.executable, __file__, DEVICE.type, case.name, how]
    with mps_daemon():
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes) for _ in range(runs)]
        try:
            ready = [each.stdout.readline() for each in processes]
            if not all(ready):
                advice = f"echo 0 1 | {' '.join(command)}"
                raise SystemExit(f"a run ended before it was ready; to see why: {advice}")
            begin = time.time() + 1
            for each in processes:
                each.stdin.write(f"{begin} {begin + SECONDS}\n")
                each.stdin.flush()
            taken = [each.stdout.readline() for each in processes]
        finally:
            for each in processes:
                each.kill()
                each.wait()
    if not all(taken):
        raise SystemExit("a run ended before its time was over")
    return SECONDS / sum(map(float, taken))


def run_beside_others(case: Case, compiled: bool) -> None:
    """Say when a run is ready, and then how many steps it took from one given time to another."""
    loop = ours(case, "er", compiled=compiled)
    for _ in range(2):  # in the first all is compiled, in the second captured
        loop()
    loop.turn = TURN
    turn = timed(loop)
    print("ready", flush=True)
    begin, end = map(float, input().split())
    taken = 0.0
    while (began := time.time()) < end:
        turn()
        now = time.time()
        taken += TURN * max(0.0, min(now, end) - max(began, begin)) / (now - began)
    print(taken, flush=True)


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


def kernels_of(events: Any, device: DeviceType = DeviceType.CUDA) -> list[Kernel]:
    """Return what ran on a device: no calls on the CPU, and no names that a user gave to parts."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == device and not getattr(event, "is_user_annotation", False)
    ]


def profile_tables(case: Case, compiled: bool) -> None:
    """Print where the captured step of ER spends a GPU's time."""
    name = f"{case.name}, er{', compiled' if compiled else ''}"
    progress(name)
    loop = ours(case, "er", compiled=compiled)
    for _ in range(2):  # in the first all is compiled, in the second captured
        loop()
    clock = timed(loop)
    step = min(clock() for _ in range(ROUNDS)) / case.steps
    loop.turn = PROFILED
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        loop()
        torch.cuda.synchronize()
    print_kernels(name, 1e6 * step, kernels_of(found.events()))


def print_kernels(name: str, step: float, kernels: list[Kernel]) -> None:
    """Print two tables of the kernels of PROFILED steps, which take `step` µs each by the clock."""
    title = f"{name}, {step / 1e3:.3g} ms a step by the clock"
    if not kernels:
        print(f"\n{title}: the profiler saw no kernel")
        return
    head = ["µs a step", "of the time", "kernels a step"]
    gap = step - busy(kernels) / PROFILED
    rows = rows_by(kind_of, kernels, PROFILED)
    rows.append(["no kernel, by the clock", f"{gap:.1f}", f"{gap / step:.1%}", ""])
    table(f"{title}, by kind:", ["kind", *head], rows)

    def label(name: str) -> str:
        return f"{kind_of(name)}: {short_name(name)}"

    rows = rows_by(label, kernels, PROFILED, KERNELS)[:-1]
    table(f"{title}, kernels:", ["kernel", *head], rows)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[2:]:
        run_beside_others(CASES[DEVICE.type][sys.argv[2]], sys.argv[3] == "compiled")
        return
    print(f"{__doc__}\n{torch.cuda.get_device_name() if GPU else machine()}")
    rows = []
    for case in CASES[DEVICE.type].values():
        progress(case.name)
        rows += measure(case)
    head = ["", "ms a step", "GFLOP", "GFLOP/s", "products, ms"]
    head += ["MB", "GB/s", "memory, ms", "× the larger bound", "compiling, s"]
    table("ER:", head, rows)
    if GPU:
        print(ON_GPU)
    for case in CASES["cuda"].values() if GPU else ():
        for compiled in (False, True):
            profile_tables(case, compiled)
    for case in () if GPU else list(CASES["cpu"].values())[1:]:
        for method in ("er", "syngap"):
            head = ["operation", "µs a step", "of all", "calls a step"]
            table(f"{case.name}, {method}:", head, operations(case, method))


if __name__ == "__main__":
    main()
