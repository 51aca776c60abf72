import subprocess
import sys

PROBE = """
import sys

def packages():
    return {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)

import torch
before = packages()
import syngap
print(*sorted(packages() - before))
"""


def test_import_needs_torch_alone() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["syngap"]
