"""Try an installed syngap where nothing else is: `make package` runs this, in an empty folder.

python -I smoke.py optimizer    in an environment that has torch and syngap, and nothing else
python -I smoke.py tool SOURCE  with all dependencies; SOURCE is the package's folder in a checkout
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata, resources
from itertools import pairwise
from pathlib import Path

COMMAND = Path(sys.executable).with_name("syngap")
EXPERIMENT = ["digits", "--methods", "sgd,syngap", "--seeds", "0", "--set", "stream.epochs=1"]


def optimizer() -> None:
    """What `from syngap import SynGAP` gives trains, with torch alone."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch, which does without
    import torch
    from torch.nn.functional import cross_entropy

    before = packages()
    from syngap import SynGAP

    added = packages() - before
    expect(added == {"syngap"}, f"importing it brings nothing along: {sorted(added)}")
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for trainer in (SynGAP(model.parameters(), lr=0.1), SynGAP.wrap(adam)):
        losses = []
        for _ in range(3):
            logits = model(x)
            loss = cross_entropy(logits, y)
            trainer.zero_grad()
            trainer.observe(logits)
            loss.backward()  # type: ignore[no-untyped-call]
            trainer.step()
            losses.append(loss.item())
        expect(all(a > b for a, b in pairwise(losses)), f"the loss falls: {losses}")
    done = subprocess.run([COMMAND], capture_output=True, text=True)
    said = done.stderr.strip()
    expect(
        done.returncode == 2 and "pip install 'syngap[bench]'" in said and "\n" not in said,
        f"the command says what to install: {said}",
    )


def packages() -> set[str]:
    """Return the packages that were imported, Python's own apart."""
    return {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)


def tool(source: Path) -> None:
    """All files of the checkout were installed, and the command goes from a run to a page."""
    installed = resources.files("syngap")
    expect(Path(sys.prefix) in Path(str(installed)).parents, f"what is tried is {installed}")
    shipped, there = files(source), files(Path(str(installed)))
    expect(shipped == there, f"all files are shipped, and no others: {sorted(shipped ^ there)}")

    expect(metadata.version("syngap") in syngap("--version"), "it says its version")
    expect("doctor" in syngap("--help"), "it lists its commands")
    found = syngap("doctor")
    for experiment in source.glob("bench/config/shipped/*.yaml"):
        expect(experiment.stem in found, f"{experiment.stem} is offered")
    expect("missing" not in found, f"every dependency came along:\n{found}")

    syngap("run", *EXPERIMENT, "--out", "runs")
    table = syngap("report", "runs", "--markdown", "--figures", "figures")
    expect("| SGD " in table and "| SynGAP " in table, f"both rows are in the table:\n{table}")
    expect(Path("runs/index.html").stat().st_size > 0, "there is a page")
    expect(list(Path("figures").glob("*.svg")) != [], "there are figures")


def files(package: Path) -> set[str]:
    """Return what lies under `package`, bytecode apart."""
    return {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


def syngap(*arguments: str) -> str:
    """Run the installed command and return what it printed."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([COMMAND, *arguments], env=alone, capture_output=True, text=True)
    shown = f"syngap {' '.join(arguments)}"
    expect(done.returncode == 0, f"{shown}: ended with {done.returncode}\n{done.stderr}")
    print(f"  {shown}")
    return done.stdout


def expect(held: bool, claim: str) -> None:
    """End with `claim` where it does not hold."""
    if not held:
        sys.exit(f"smoke test: not so: {claim}")


def main(arguments: Sequence[str]) -> None:
    """Try what the first argument names."""
    match arguments:
        case ["optimizer"]:
            optimizer()
        case ["tool", source]:
            tool(Path(source))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
