"""Run the benchmarks of this folder, on a CPU or with `cuda` on a GPU; it takes minutes.

`make bench` and `make bench-gpu` call it. What each prints goes to a file of its name in `--keep`
as well, such as results/speed/cpu.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
from measure import machine

HERE = Path(__file__).parent
SCRIPTS = {
    "cpu": (
        *("loop", "layout", "bound", "step", "importance", "memory", "growth", "protection"),
        "start",
    ),
    "cuda": ("loop", "bound", "gpu", "bandwidth", "memory", "growth", "protection"),
}


VARIANTS = ["--only", "^gate$|default|LoRA"]
PROTECTION = {
    "cpu": ["--sizes", "15M", "--length", "64", "--known", "64", "--turns", "3", *VARIANTS],
    "cuda": ["--sizes", "15M,135M,270M,1.3B", *VARIANTS],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=SCRIPTS, nargs="?", default="cpu")
    parser.add_argument("--only", help="such as loop,step")
    parser.add_argument("--keep", type=Path, help="a folder for what is printed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    on = machine()
    if args.device == "cuda":
        on = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    for script in args.only.split(",") if args.only else SCRIPTS[args.device]:
        said = [f"# {script}\n", f"{date.today()}, {on}\n"]
        print(*said, sep="\n", flush=True)
        where = {
            "loop": [args.device],
            "bound": [args.device],
            "memory": ["--device", args.device],
            "growth": ["--device", args.device],
            "protection": ["--device", args.device, *PROTECTION[args.device]],
        }.get(script, [])
        command = [sys.executable, str(HERE / f"{script}.py"), *where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            for line in process.stdout:
                print(line, end="", flush=True)
                said.append(line.removesuffix("\n"))
        if process.returncode:
            raise SystemExit(f"{script} failed")
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            text = "\n".join(said).rstrip() + "\n"
            (args.keep / f"{script}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
