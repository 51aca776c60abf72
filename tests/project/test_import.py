import json
import subprocess
import sys
from typing import Any

import pytest

import syngap

pytestmark = pytest.mark.xdist_group("imports")  # one process is for all of them
PROBE = """
import json, sys

def packages():
    return {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)

import torch
before = packages()
import syngap
said = {"offered": syngap.optim.Ballistic.__name__}
from syngap import SynGAP
said["needed"] = sorted(packages() - before)
import syngap.bench.reporting.page, syngap.bench.reporting.figures
traced = ("syngap.bench.training", "matplotlib")
said["for a report"] = [name for name in sys.modules if name.startswith(traced)]
import syngap.bench.cli, syngap.bench.tuning.study
said["for the command"] = sorted(packages())
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What imports brought along, one after the other in a new process."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_import_needs_torch_alone(imported: dict[str, Any]) -> None:
    assert imported["needed"] == ["syngap"]


def test_a_report_imports_no_training(imported: dict[str, Any]) -> None:
    assert imported["for a report"] == []


def test_help_answers_without_torch() -> None:
    command = "from syngap.bench.cli import main; main(['--help'])"
    probe = f"import sys; {command}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert "compare methods" in result.stdout
    assert result.stdout.split()[-1] == "False"


def test_what_is_offered_is_there(imported: dict[str, Any]) -> None:
    assert {"SynGAP", "plasticity", "__version__"} <= set(dir(syngap))
    assert syngap.SynGAP.__module__.startswith("syngap.optim")
    assert imported["offered"] == "Ballistic"
    with pytest.raises(AttributeError, match="no attribute 'SynGap'"):
        _ = syngap.SynGap  # type: ignore[attr-defined]


def test_the_command_without_its_packages_says_what_to_install() -> None:
    probe = "import sys; sys.modules['typer'] = None; from syngap.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert result.stderr.count("\n") == 1
    assert "needs typer" in result.stderr
    assert "pip install 'syngap[bench]'" in result.stderr
