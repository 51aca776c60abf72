"""Timing in turns, peak memory, kernels by kind, and tables, for every benchmark alike."""

from __future__ import annotations

import gc
import os
import platform
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch


class Seconds(list[float]):
    """What each round of a case took."""

    def median(self) -> float:
        """Return the middle one."""
        return statistics.median(self)

    def over(self, other: Seconds) -> float:
        """Return the median of the rounds' ratios, which drifts of the machine leave alone."""
        return statistics.median(a / b for a, b in zip(self, other, strict=True))


def in_turns(cases: Mapping[str, Callable[[], float | None]], rounds: int) -> dict[str, Seconds]:
    """Return each case's seconds over `rounds` in which every case has its turn.

    Turns spread the machine's moods evenly over the cases, so that ratios hold even where absolute
    times drift. A case may return the seconds that count; otherwise its whole call does.
    """
    seconds = {name: Seconds() for name in cases}
    for number in range(-1, rounds):  # the first round warms up
        for name, case in cases.items():
            progress(f"round {max(number, 0)}/{rounds}  {name}")
            start = time.perf_counter()
            counted = case()
            elapsed = time.perf_counter() - start
            if number >= 0:
                seconds[name].append(elapsed if counted is None else counted)
    progress("")
    return seconds


def peak_memory(case: Callable[[], object]) -> float | None:
    """Return how many bytes of memory `case` needs at its peak, None where that is not known.

    Call it in a process started with `tight_malloc()`, so that freed tensors go back at once.
    """
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    case()
    gc.collect()
    reset.write_text("5")  # sets the peak to what is used now
    before = _status("VmRSS")
    case()
    return _status("VmHWM") - before


def resident() -> float:
    """Return the memory of this process in MB."""
    gc.collect()
    return _status("VmRSS") / 1024**2


def captured(once: Callable[[], object], times: int = 1) -> Callable[[], None]:
    """Return what replays `once`, so many times in a row, from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            once()

    def replay(kept_alive: object = once) -> None:  # a graph does not keep what it reads alive
        graph.replay()

    return replay


class Kernel(NamedTuple):
    """What a GPU did once, as a profiler names it, in microseconds."""

    name: str
    start: float
    end: float


# The first that a name has says the kind, so a fused kernel counts as what takes most in it. Names
# that torch.compile makes list all operations that are fused, "convolution_backward" for a cast of
# its result too: convolutions themselves are cuDNN's, or made from a template ("tem").
KINDS = {
    "convolutions": r"fprop|dgrad|wgrad|scudnn|convolve|conv2d|winograd|triton_tem_\w*convolution",
    "products": r"gemm|gemv|nvjet|splitKreduce|triton_tem",
    "normalisation": r"batch_?norm|layer_?norm|cudnn::bn_|triton_\w*_var_mean",
    "copies and layout": r"Memcpy|Memset|multi_tensor_apply.*(Copy<|Zero)|FillFunctor|CatArray"
    r"|_copy_kernel|nchwToNhwc|nhwcToNchw|AddPadding|triton_poi_fused_(to_copy|clone|cat|convolution|_)+\d+$",
    "optimizer update": r"multi_tensor_apply|triton_for_|^step$",
    "loss": r"(?i)softmax|nll_loss",
    "activation": r"clamp|threshold|relu|gelu|silu",
    "draws and indices": r"distribution|[iI]ndex|gather|scatter|[sS]ort|[sS]can|arange|random",
    "sums and means": r"reduce|triton_(per|red)_",
    "other arithmetic": r"elementwise|triton_",
}


def kind_of(name: str) -> str:
    """Return the kind of a kernel: a key of KINDS, or "others"."""
    return next((kind for kind, words in KINDS.items() if re.search(words, name)), "others")


def busy(kernels: Sequence[Kernel]) -> float:
    """Return the microseconds in which at least one of the kernels ran."""
    total, until = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def rows_by(
    label: Callable[[str], str], kernels: Sequence[Kernel], steps: int, most: int | None = None
) -> list[list[str]]:
    """Return µs a step, share of the whole time and kernels a step for each label of a name.

    The last row is the time in which no kernel ran. The whole time is that from the first kernel's
    start to the last one's end.
    """
    if not kernels:
        return []
    spent, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for name, start, end in kernels:
        spent[label(name)] += end - start
        counts[label(name)] += 1
    whole = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
    order = sorted(spent, key=lambda each: -spent[each])[:most]
    found = [(each, spent[each], f"{counts[each] / steps:.1f}") for each in order]
    found.append(("no kernel", whole - busy(kernels), ""))
    return [
        [each, f"{time / steps:.1f}", f"{time / whole:.1%}", times] for each, time, times in found
    ]


def short_name(name: str, most: int = 72) -> str:
    """Return a kernel's name without what all have, for a cell of a table."""
    parts = r"^void |at::native::|c10::|std::|\(anonymous namespace\)::|<unnamed>::|\(int\)"
    name = re.sub(parts, "", name).replace("|", "/")
    return name if len(name) <= most else f"{name[: most - 1]}…"


def tight_malloc() -> dict[str, str]:
    """Return an environment in which the C library gives every large block back to the system."""
    return os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024.0 * float(line.split()[1])
    raise KeyError(field)


def progress(text: str) -> None:
    """Show where a long measurement is, on a terminal or as nothing in a log."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table with its columns lined up."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *rest = cells
        aligned = [first.ljust(widths[0])]
        aligned += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        return "| " + " | ".join(aligned) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    print(f"\n{title}\n", line(header), line(rule), *map(line, rows), sep="\n", flush=True)


def machine() -> str:
    """Return what the numbers were measured on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = models[0].split(":")[1].strip() if models else name
    return f"{name}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"
