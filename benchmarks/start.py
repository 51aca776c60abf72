"""How long until something happens? Imports, help and the demo, each in a process of its own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import progress, table

ROUNDS = 7
AFTER_TORCH = """
import time, torch
start = time.process_time()
from syngap import SynGAP
print(time.process_time() - start)
"""


def said(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def seconds(*command: str) -> float:
    start = time.perf_counter()
    said(*command)
    return time.perf_counter() - start


def main() -> None:
    print(__doc__)
    cases: dict[str, Callable[[], float]] = {
        "import torch": lambda: seconds("-c", "import torch"),
        "from syngap import SynGAP, after that": lambda: float(said("-c", AFTER_TORCH)),
        "syngap --help": lambda: seconds("-m", "syngap", "--help"),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(ROUNDS):
        progress(f"round {number}")
        for name, case in cases.items():
            found[name].append(case())
    rows = [[name, f"{statistics.median(each):.3f}"] for name, each in found.items()]
    progress("demo")
    with tempfile.TemporaryDirectory() as folder:
        demo = seconds("-m", "syngap", "demo", "--out", str(Path(folder) / "demo"))
    rows.append(["syngap demo", f"{demo:.1f}"])
    table("Seconds:", ["", "seconds"], rows)


if __name__ == "__main__":
    main()
