"""Real data that the repository does not hold: unpacked once, or a skip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from checkout import ROOT
from filelock import FileLock

VARIABLE = "SYNGAP_SHARED"


def unpacked(name: Literal["cifar100", "coil100", "core50"]) -> Path:
    """Return the folder into which the data set `name` was unpacked; skip where there is none.

    It stays below build/: to write and remove 7,200 images takes longer than the tests of them.
    """
    script = _script(name)
    target, fresh = (ROOT / "build/realdata" / f"{name}{end}" for end in ("", ".fresh"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):  # one test process unpacks, the others wait
        if not target.exists():
            shutil.rmtree(fresh, ignore_errors=True)  # of one that was killed
            subprocess.run([sys.executable, script, fresh, name], check=True)
            fresh.rename(target)
    return target


def _script(name: str) -> Path:
    places = [ROOT.parent / "shared" / "data"]
    if variable := os.environ.get(VARIABLE):
        places.insert(0, Path(variable))
    for place in places:
        if (place / "unpack.py").is_file() and (place / name).is_dir():
            return place / "unpack.py"
    pytest.skip(f"no real {name}: neither ../shared/data nor the folder of {VARIABLE} has it")
