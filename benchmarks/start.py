"""How long until something happens? Imports, help and the demo, each in a process of its own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import progress, table

ROUNDS = 7


def seconds(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    print(__doc__)
    commands = {
        "import torch": ("-c", "import torch"),
        "from syngap import SynGAP": ("-c", "from syngap import SynGAP"),
        "syngap --help": ("-m", "syngap", "--help"),
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(ROUNDS):
        progress(f"round {number}")
        for name, command in commands.items():
            found[name].append(seconds(*command))
    added = statistics.median(
        one - other
        for one, other in zip(
            found["from syngap import SynGAP"], found["import torch"], strict=True
        )
    )
    rows = [[name, f"{statistics.median(each):.2f}"] for name, each in found.items()]
    rows.insert(2, ["over import torch", f"{added:.3f}"])
    progress("demo")
    with tempfile.TemporaryDirectory() as folder:
        demo = seconds("-m", "syngap", "demo", "--out", str(Path(folder) / "demo"))
    rows.append(["syngap demo", f"{demo:.1f}"])
    table("Seconds:", ["", "seconds"], rows)


if __name__ == "__main__":
    main()
