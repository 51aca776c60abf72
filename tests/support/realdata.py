"""Real data that the repository does not hold: unpacked once a test session, or a skip."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
from checkout import ROOT

VARIABLE = "SYNGAP_SHARED"


def unpacked(name: Literal["cifar100", "coil100", "core50"], tmp: pytest.TempPathFactory) -> Path:
    """Return the folder into which the data set `name` was unpacked; skip where there is none.

    Parallel test processes share it: one unpacks, the others wait.
    """
    script = _script(name)
    base = tmp.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    target, claim, fresh = (base / f"realdata-{name}{end}" for end in ("", ".claim", ".fresh"))
    deadline = time.monotonic() + 120
    while not target.exists():
        try:
            claim.mkdir()
        except FileExistsError:
            if time.monotonic() > deadline:
                pytest.fail(f"{claim} is held by a process that does not unpack {name}")
            time.sleep(0.05)
            continue
        try:
            if not target.exists():
                subprocess.run([sys.executable, script, fresh, name], check=True)
                fresh.rename(target)
        finally:
            claim.rmdir()
    return target


def _script(name: str) -> Path:
    places = [ROOT.parent / "shared" / "data"]
    if variable := os.environ.get(VARIABLE):
        places.insert(0, Path(variable))
    for place in places:
        if (place / "unpack.py").is_file() and (place / name).is_dir():
            return place / "unpack.py"
    pytest.skip(f"no real {name}: neither ../shared/data nor the folder of {VARIABLE} has it")
