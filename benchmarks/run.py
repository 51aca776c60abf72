"""Run every benchmark of this folder that a CPU can; `make bench` calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

for script in ("step.py", "importance.py"):
    subprocess.run([sys.executable, str(HERE / script), *sys.argv[1:]], check=True)
