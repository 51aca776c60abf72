"""Fuzz one target: python tests/support/fuzz/fuzz.py TARGET --minutes M --seed S --out FOLDER.

The fuzzing is done in a process of its own, which is started again where it dies.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuzz.trees import Tree

HERE = Path(__file__).resolve().parent
NAMES = ("configuration", "settings", "runfolder", "checkpoint", "cifar100", "core50")
KEPT = 400  # inputs that led to something new and are changed further
WARM = 300.0  # seconds for what is done the first time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder for what is found")
    asked = parser.parse_args()
    out = (asked.out or Path(tempfile.mkdtemp(prefix="fuzz-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    total = supervised(asked.target, asked.minutes * 60, asked.seed, out)
    (out / "result.json").write_text(json.dumps(total, indent=1) + "\n")
    print(json.dumps({**total, "findings": {k: v["count"] for k, v in total["findings"].items()}}))
    return 1 if total["findings"] else 0


def supervised(target: str, seconds: float, seed: int, out: Path) -> dict[str, Any]:
    """Fuzz in processes of their own until the time is over; return what all of them found."""
    total: dict[str, Any] = {"target": target, "seed": seed, "inputs": 0, "seconds": 0.0}
    total |= {"lines": 0, "restarts": -1, "last_new_finding": 0.0, "findings": {}}
    begun = time.monotonic()
    while (left := seconds - (time.monotonic() - begun)) > 0:
        total["restarts"] += 1
        before = time.monotonic() - begun
        progress, current = out / "progress.json", out / "current.json"
        for path in (progress, current):
            path.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            code = 70
            try:
                fuzzed(target, left, f"{seed}-{total['restarts']}", out)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        found = json.loads(progress.read_text()) if progress.is_file() else {}
        total["inputs"] += found.get("inputs", 0)
        total["lines"] = max(total["lines"], found.get("lines", 0))
        for key, finding in found.get("findings", {}).items():
            known = total["findings"].setdefault(key, {**finding, "count": 0})
            known["count"] += finding["count"]
            if known["count"] == finding["count"]:
                total["last_new_finding"] = before + finding["first"]
        if status and current.is_file():
            key = f"process died with status {status}"
            died = total["findings"].setdefault(key, {"count": 0, "step": "?", "message": key})
            died["count"] += 1
            shutil.copy(current, out / f"died-{total['restarts']}.json")
        elif status and not found:
            total["findings"]["did not start"] = {"count": 1, "step": "start", "message": ""}
            break
    total["seconds"] = round(time.monotonic() - begun, 1)
    return total


def fuzzed(name: str, seconds: float, seed: str, out: Path) -> None:
    """Try inputs until the time is over, and write what is found to `out` as it goes."""
    sys.path[:0] = [str(HERE.parent)]
    os.environ.setdefault("MPLCONFIGDIR", str(out / "matplotlib"))
    import torch

    from fuzz.targets import hurried

    torch.set_num_threads(1)
    logging.disable()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory))
    try:
        with hurried():
            Hunt(name, seed, out, root).go_on(seconds)
    finally:
        os.chdir("/")
        shutil.rmtree(root, ignore_errors=True)


class Hunt:
    """One process' search: inputs that lead to something new are kept and changed further."""

    def __init__(self, name: str, seed: str, out: Path, root: Path) -> None:
        from fuzz.coverage import Lines
        from fuzz.guard import Sandbox, limit_memory
        from fuzz.targets import TARGETS
        from fuzz.trees import corpus

        self.target, self.out = TARGETS[name], out
        self.bases = self.target.bases()
        self.sandbox, self.chance, self.lines = Sandbox(root), Random(seed), Lines()
        self.heard: set[str] = set()
        self.state: dict[str, Any] = {"inputs": 0, "findings": {}}
        self.known = [*corpus(HERE / "corpus" / f"{name}.jsonl", self.bases).values()]
        self.pool = [*self.bases.values(), *self.known]
        for tree in self.bases.values():  # loads all that valid inputs need
            self.sandbox.tried(tree, [replace(step, seconds=WARM) for step in self.target.steps])
        limit_memory()

    def go_on(self, seconds: float) -> None:
        """Try the corpus, then new inputs, for so long."""
        from fuzz.mutations import tree_changed

        begun = told = time.monotonic()
        while (now := time.monotonic()) - begun < seconds:
            if self.known:
                self._try(self.known.pop(), now - begun)
            else:
                with suppress(MemoryError):  # a change grew too large
                    chosen = self.chance.choice(self.pool)
                    changed = tree_changed(chosen, self.chance, self.pool, self.target.shape)
                    self._try(changed, now - begun)
            if now - told > 2:
                told = now
                self._tell()
        self._tell()

    def _try(self, tree: Tree, at: float) -> None:
        from fuzz.guard import end_if_stuck
        from fuzz.trees import dumped

        (self.out / "current.json").write_text(dumped(tree, self.bases, "current"))
        end_if_stuck()
        finding, said = self.sandbox.tried(tree, self.target.steps)
        self.state["inputs"] += 1
        if finding:
            known = self.state["findings"].setdefault(finding.key, {"count": 0, "first": at})
            known["count"] += 1
            if known["count"] == 1:
                digest = hashlib.sha256(finding.key.encode()).hexdigest()[:12]
                (self.out / f"{digest}.json").write_text(dumped(tree, self.bases, digest))
                known |= {"step": finding.step, "message": finding.message}
                known |= {"input": f"{digest}.json"}
        new = {_shape(line) for line in said} - self.heard
        self.heard |= new
        if not finding and (self.lines.new() or new):
            latest = self.pool[len(self.bases) :]
            self.pool = [*self.bases.values(), *latest[-KEPT:], tree]

    def _tell(self) -> None:
        (self.out / "progress.tmp").write_text(
            json.dumps({**self.state, "lines": self.lines.count})
        )
        os.replace(self.out / "progress.tmp", self.out / "progress.json")


def _shape(line: str) -> str:
    """Return a message without what is different each time."""
    return "".join(char for char in line[:300] if char.isalpha() or char == " ")[:80]


if __name__ == "__main__":
    sys.exit(main())
