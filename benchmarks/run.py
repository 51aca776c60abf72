"""Run every benchmark of this folder that a CPU can; `make bench` calls it. It takes minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

for script in ("step.py", "importance.py", "stream.py"):
    print(f"\n{script}: {(HERE / script).read_text().splitlines()[0].strip(chr(34))}", flush=True)
    subprocess.run([sys.executable, str(HERE / script)], check=True)
