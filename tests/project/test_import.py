import subprocess
import sys

import pytest

import syngap

PROBE = """
import sys

def packages():
    return {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)

import torch
before = packages()
from syngap import SynGAP
print(*sorted(packages() - before))
"""


def test_import_needs_torch_alone() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["syngap"]


def test_help_answers_without_torch() -> None:
    command = "from syngap.bench.cli import main; main(['--help'])"
    probe = f"import sys; {command}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert "compare methods" in result.stdout
    assert result.stdout.split()[-1] == "False"


def test_what_is_offered_is_there() -> None:
    assert {"SynGAP", "plasticity", "__version__"} <= set(dir(syngap))
    assert syngap.SynGAP.__module__.startswith("syngap.optim")
    probe = "import syngap; print(syngap.optim.Ballistic.__name__)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert result.stdout == "Ballistic\n", result.stderr
    with pytest.raises(AttributeError, match="no attribute 'SynGap'"):
        _ = syngap.SynGap  # type: ignore[attr-defined]


def test_the_command_without_its_packages_says_what_to_install() -> None:
    probe = "import sys; sys.modules['typer'] = None; from syngap.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert result.stderr.count("\n") == 1
    assert "needs typer" in result.stderr
    assert "pip install 'syngap[bench]'" in result.stderr
