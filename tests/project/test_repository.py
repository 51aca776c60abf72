import re
import shlex
import shutil
import subprocess
from importlib import metadata, resources
from typing import Any

import pytest
import yaml
from checkout import ROOT

import syngap

MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|farm|tmp|root|home)/")


def test_installed_version_is_the_package_version() -> None:
    try:
        installed = metadata.version("syngap")
    except metadata.PackageNotFoundError:
        pytest.skip("syngap is imported from source, not installed")
    assert installed == syngap.__version__


def test_package_ships_its_types() -> None:
    assert resources.files(syngap).joinpath("py.typed").is_file()


def test_no_committed_file_names_a_path_of_one_machine() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    offenders = []
    for name in filter(None, listing.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        offenders += [
            f"{name}:{number}"
            for number, line in enumerate(text.splitlines(), start=1)
            if MACHINE_PATH.search(line)
        ]
    assert not offenders


# Continuous integration


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    return loaded


def commands(workflow: dict[str, Any]) -> list[str]:
    """Return all that the workflow runs, for each value of each job's matrix."""
    found = []
    for job in workflow["jobs"].values():
        axes = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            lines = [step["run"]] if "run" in step else []
            for axis, values in axes.items():
                said = f"${{{{ matrix.{axis} }}}}"
                lines = [line.replace(said, value) for line in lines for value in values]
            found += lines
    return found


def targets(lines: list[str]) -> set[str]:
    """Return the targets of commands, each of which is make with one target."""
    called = [shlex.split(line) for line in lines]
    assert [line for line in called if len(line) != 2 or line[0] != "make"] == []
    return {target for _, target in called}


def test_the_workflow_calls_targets_of_the_makefile_alone(workflow: dict[str, Any]) -> None:
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    called = targets(commands(workflow))
    assert called <= set(known)
    assert called >= {"lint", "test", "test-integrations", "test-avalanche", "docs", "package"}


def test_the_workflow_checks_what_the_local_check_does(workflow: dict[str, Any]) -> None:
    script = (ROOT / ".ci/run").read_text("utf-8")
    local = targets([line for line in script.splitlines() if line.startswith("make ")])
    assert local
    assert local <= targets(commands(workflow))


def test_the_workflow_tests_every_python_that_the_package_names(workflow: dict[str, Any]) -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == named
    assert {"run": "make test"} in job["steps"]
    (setup,) = (step for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert setup["with"]["python-version"] == "${{ matrix.python }}"


def test_the_workflow_may_only_read_and_stops_when_a_newer_one_begins(
    workflow: dict[str, Any],
) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    assert workflow["concurrency"]["cancel-in-progress"] is True
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        (setup,) = (step for step in job["steps"] if "setup-python" in step.get("uses", ""))
        assert setup["with"]["cache"] == "pip"


def test_no_test_is_left_out_of_make_test() -> None:
    for name in ("Makefile", "pyproject.toml", ".github/workflows/ci.yml", ".ci/run"):
        settings = (ROOT / name).read_text("utf-8").replace("`pytest -m 'not slow'`", "")  # advice
        assert "not slow" not in settings, name


def test_badges_say_what_the_project_says() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    readme = (ROOT / "README.md").read_text("utf-8")
    (badge,) = re.findall(r"badge/python-([^-]+)-", readme)
    assert badge == "%20%7C%20".join(named)
    (licence,) = re.findall(r'^license = "(.+)"', project, re.MULTILINE)
    assert f"badge/licence-{licence.replace('-', '--')}-" in readme
