"""What do torch.compile and channels last save a CPU? Steps of ER against those of the plain loop.

The loops of `loop.py`, one thread, in turns, in seconds of the CPU. "Compiled" has forward pass and
loss under torch.compile. "Compiling" is how much longer the first turn takes, for batches without
and with replay, with empty caches, the C++ compiler's seconds among it. "Repaid after" is how many
steps save that time.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from cases import CASES, Case
from loop import ours, plain, timed
from measure import in_turns, machine, progress, table

ROUNDS = 7
LOOPS = {
    "plain PyTorch": lambda case: plain(case),
    "plain PyTorch, channels last": lambda case: plain(case, channels_last=True),
    "plain PyTorch, compiled": lambda case: plain(case, compiled=True),
    "both": lambda case: plain(case, compiled=True, channels_last=True),
    "syngap, er": lambda case: ours(case, "er"),
    "syngap, er, channels_last": lambda case: ours(case, "er", channels_last=True),
    "syngap, er, compiled": lambda case: ours(case, "er", compiled=True),
    "syngap, er, both": lambda case: ours(case, "er", compiled=True, channels_last=True),
}


def compare(case: Case, caches: str) -> list[list[str]]:
    """Return a row for each loop; `caches` is an empty folder for what is compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
    torch.set_num_threads(1)
    turns, first = {}, {}
    for name, make in LOOPS.items():
        progress(f"{case.name}: {name}")
        turn = make(case)
        start = sum(os.times()[:4])  # of this process and those that it has waited for
        turn()
        first[name], turns[name] = sum(os.times()[:4]) - start, timed(turn)
    seconds = in_turns(turns, ROUNDS)
    base = seconds["plain PyTorch"].median()
    rows = []
    for name, each in seconds.items():
        row = [name, f"{1e3 * each.median() / case.steps:.2f}"]
        row.append(f"{each.over(seconds['plain PyTorch']):.3f}")
        compiles, saved = "compiled" in name or "both" in name, (base - each.median()) / case.steps
        compiling = first[name] - each.median()
        repaid = f"{compiling / saved:.0f} steps" if saved > 0 else "never"
        rows.append([*row, *([f"{compiling:.0f}", repaid] if compiles else ["", ""])])
    return rows


def main() -> None:
    torch.set_num_threads(1)
    print(f"{__doc__}\n{machine()}")
    header = ["", "ms a step", "× plain PyTorch", "compiling, s", "repaid after"]
    for case in CASES["layout"].values():
        with (
            tempfile.TemporaryDirectory() as caches,
            ProcessPoolExecutor(1, get_context("spawn")) as process,  # which has compiled nothing
        ):
            table(f"{case.name}:", header, process.submit(compare, case, caches).result())


if __name__ == "__main__":
    main()
