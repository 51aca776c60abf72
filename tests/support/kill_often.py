"""Kill an experiment with SIGKILL again and again, and see whether it ends as if nothing had been.

    python tests/support/kill_often.py --kills 10 --method er
    python tests/support/kill_often.py --kills 10              # all methods at once
    python tests/support/kill_often.py --kills 17 --apart --csv results/safety/kills.csv  # in turn

An experiment runs in a process group of its own: command line, engine, workers and all. The group
is killed at random instants and started again with --resume until it is done; then R, the metrics
on the way and the weights are compared, byte for byte, with those of a run that nobody disturbed.

Importing torch takes longer than such a run. So torch is imported once, here, and every process is
forked from this one; --spawn starts each from nothing instead, as a user would.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

METHODS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.3},
    "sgdm": {"lr": 0.03},
    "adam": {"lr": 0.01},
    "ballistic": {"lr": 0.03},
    "er": {"lr": 0.3, "buffer": 50, "replay": 10},
    "er_ace": {"lr": 0.3, "buffer": 50, "replay": 10},
    "derpp": {"lr": 0.1, "buffer": 50, "replay": 10, "memory": "balanced"},
    "ewcpp": {"lr": 0.03, "momentum": 0.9, "interval": 20},
    "si": {"lr": 0.03, "momentum": 0.9, "strength": 0.1, "interval": 20},
    "mas": {"lr": 0.03, "strength": 0.001, "interval": 20},
    "lwf": {"lr": 0.03, "strength": 3.0, "warmup": 20},
    "agem": {"lr": 0.1, "buffer": 50, "replay": 10},
    "cls_er": {"lr": 0.1, "buffer": 50, "replay": 10, "average": 0.99, "plastic": 0.95},
    "scr": {"lr": 0.1, "buffer": 50, "replay": 10, "temperature": 0.3},
    "syngap": {"lr": 1.0, "buffer": 50, "replay": 10},
    "joint": {"lr": 0.1, "retrained": True},
}
COMPARED = ("accuracy.csv", "metrics.jsonl", "checkpoint/weights.safetensors")
PAUSES = (0.0, 0.05, 60.0)  # seconds between checkpoints; a task takes about one
MEMORY = "/dev/shm"  # a kill is not a loss of power, and on a disk the syncs take most of the time

Start = Callable[[list[str], Path], int]


@dataclass
class Outcome:
    """What became of a method: times it was killed, runs that it took, what differed."""

    kills: int = 0
    runs: int = 0
    differences: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="of each method, at least")
    parser.add_argument("--method", action="append", choices=METHODS, help="all by default")
    parser.add_argument("--pause", type=float, action="append", help="training.checkpoint_seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--spawn", action="store_true", help="start every process from nothing")
    parser.add_argument("--apart", action="store_true", help="one method after another")
    parser.add_argument("--json", action="store_true", help="print for a program")
    parser.add_argument("--csv", type=Path, help="also write a table to this file")
    given = parser.parse_args()
    rows = given.method or list(METHODS)
    start = spawned if given.spawn else forked()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        found: dict[str, dict[float, Outcome]] = {row: {} for row in rows}
        for pause in given.pause or PAUSES:
            for group in [[row] for row in rows] if given.apart else [rows]:
                here = Path(folder) / f"{group[0]}-{pause}"
                outcomes = attacked(group, pause, given.kills, chance, start, here)
                for row, outcome in outcomes.items():
                    found[row][pause] = outcome
                    if not given.json:
                        print(line(row, pause, outcome), flush=True)
                if given.csv:
                    write_table(given.csv, found)
    if given.json:
        print(json.dumps({row: {p: vars(o) for p, o in of.items()} for row, of in found.items()}))
    return int(any(o.differences for outcomes in found.values() for o in outcomes.values()))


def write_table(path: Path, found: dict[str, dict[float, Outcome]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["method", "checkpoint_seconds", "kills", "runs", "differences"])
        for row, outcomes in found.items():
            for pause, outcome in outcomes.items():
                differing = len(outcome.differences)
                table.writerow([row, f"{pause:g}", outcome.kills, outcome.runs, differing])


def line(row: str, pause: float, outcome: Outcome) -> str:
    verdict = "; ".join(outcome.differences) or f"identical: {', '.join(COMPARED)}"
    return (
        f"{row:9} checkpoints every {pause:g} s: {outcome.kills} kills in {outcome.runs} runs; "
        f"{verdict}"
    )


def attacked(
    rows: list[str], pause: float, kills: int, chance: random.Random, start: Start, folder: Path
) -> dict[str, Outcome]:
    """Kill until every row has died `kills` times; runs that end before are begun anew."""
    folder.mkdir()
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment(rows, pause)))
    command = ["run", str(folder / "experiment.yaml"), "--workers", str(len(rows))]
    whole = folder / "whole"
    began = time.time()
    ended(start([*command, "--out", str(whole)], folder / "log"), folder / "log")
    first, last = window(whole, began)
    outcomes = {row: Outcome() for row in rows}
    while min(outcome.kills for outcome in outcomes.values()) < kills:
        out = folder / f"killed-{outcomes[rows[0]].runs}"
        resumed = [*command, "--out", str(out), "--resume"]
        while left := [row for row in rows if not done(out, row)]:
            saved = sorted(out.glob("*/checkpoint/*"))
            group = start(resumed, folder / "log")
            if min(outcomes[row].kills for row in left) >= kills:
                ended(group, folder / "log")
                continue
            time.sleep(chance.uniform(0.9 * first, last))
            os.killpg(group, signal.SIGKILL)
            gone(group)
            if sorted(out.glob("*/checkpoint/*")) == saved:
                last *= 1.2  # or on a machine that got slower no task would ever end
            elif all(done(out, row) for row in left):
                first, last = 0.9 * first, 0.9 * last  # it got faster, and this was too late
            for row in left:
                outcomes[row].kills += (out / f"{row}-0/config.yaml").is_file()
                outcomes[row].kills -= done(out, row)
        for row, outcome in outcomes.items():
            outcome.runs += 1
            outcome.differences += differences(whole / f"{row}-0", out / f"{row}-0")
    return outcomes


def window(whole: Path, began: float) -> tuple[float, float]:
    """Return when the runs began to learn, and when the first of them was done."""
    first = min(path.stat().st_mtime for path in whole.glob("*/config.yaml"))
    last = min(path.stat().st_mtime for path in whole.glob("*/status.json"))
    return first - began, last - began


def experiment(rows: list[str], pause: float) -> dict[str, Any]:
    return {
        "name": "kill_often",
        "stream": {"name": "digits", "batch": 10},
        "model": {"name": "mlp", "hidden": [20]},
        "training": {"device": "cpu", "evaluate_every": 7, "checkpoint_seconds": pause},
        "methods": {row: METHODS[row] for row in rows},
    }


def done(out: Path, row: str) -> bool:
    status = out / f"{row}-0" / "status.json"
    return status.is_file() and json.loads(status.read_text())["state"] == "done"


def differences(whole: Path, killed: Path) -> list[str]:
    found = [n for n in COMPARED if (whole / n).read_bytes() != (killed / n).read_bytes()]
    # A kill after the run is done may leave its last checkpoints, and nothing else.
    known = {path.relative_to(whole) for path in whole.rglob("*")}
    others = (path.relative_to(killed) for path in killed.rglob("*"))
    found += [str(n) for n in others if n not in known and not n.match("checkpoint/step-*")]
    return [f"{killed.name}: {name} differs" for name in found]


# Processes ----------------------------------------------------------------------------------------


def forked() -> Start:
    """Import all that a run needs, and return a function that starts one in a moment."""
    import torch

    from syngap.bench.config.experiment import Experiment
    from syngap.bench.runner.plan import make_plan

    torch.set_num_threads(1)  # threads would not survive a fork
    make_plan(Experiment.from_mapping(experiment(list(METHODS), 0)), Path("never written"))

    def start(arguments: list[str], log: Path) -> int:
        sys.stdout.flush()
        if child := os.fork():
            os.setpgid(child, child)  # here as well as there: whoever comes first
            return child
        command(arguments, log)

    return start


def command(arguments: list[str], log: Path) -> NoReturn:
    """Be the command, with forked workers, in a process group of its own that writes to `log`."""
    from syngap.bench import cli

    fork = multiprocessing.get_context("fork")
    code = 1
    try:
        os.setpgid(0, 0)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
        code = cli.main(arguments)
    finally:
        sys.stderr.flush()
        os._exit(code)


def spawned(arguments: list[str], log: Path) -> int:
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "syngap", *arguments],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    process.returncode = 0  # waited for by its id, like the forked ones
    return process.pid


def ended(group: int, log: Path) -> None:
    """Wait for a run to end by itself, as it must."""
    _, status = os.waitpid(group, 0)
    if status:
        raise SystemExit(f"exit code {os.waitstatus_to_exitcode(status)}: {log.read_text()}")


def gone(group: int) -> None:
    """Wait until no process of a killed group is left."""
    os.waitpid(group, 0)
    while members(group):
        time.sleep(0.005)


def members(group: int) -> list[int]:
    """Return the processes of a group that live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, owner, *_ = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(owner) == group and state not in "ZX":
            found.append(int(entry.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
