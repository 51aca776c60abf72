import re
import shlex
import shutil
import subprocess
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest
import torch
import words
import yaml
from checkout import ROOT
from helpers import TensorsSince

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


def committed() -> list[str]:
    """Return the names of the files that git has."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listing.stdout.split("\0") if name]


def test_the_repository_has_at_most_700_files() -> None:
    """What nobody reads by itself, such as results, is packed."""
    assert len(committed()) <= 700


def test_no_committed_file_names_a_path_of_one_machine() -> None:
    offenders = []
    for name in committed():
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


def test_no_test_counts_what_other_tests_left_behind() -> None:
    """It may go at any moment. `tests/support/helpers.py` lists what a test made itself."""
    counting = re.compile(r"\bget_objects\(")
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "helpers.py"]
    assert not [path.name for path in files if counting.search(path.read_text("utf-8"))]


def test_what_goes_meanwhile_changes_no_count() -> None:
    left_behind = [torch.zeros(1) for _ in range(3)]
    made = TensorsSince()
    own = torch.zeros(1)
    left_behind.clear()
    assert [tensor is own for tensor in made()] == [True]
    del own
    assert not made()


def test_badges_say_what_the_project_says() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    readme = (ROOT / "README.md").read_text("utf-8")
    (badge,) = re.findall(r"badge/python-([^-]+)-", readme)
    assert badge == "%20%7C%20".join(named)
    (licence,) = re.findall(r'^license = "(.+)"', project, re.MULTILINE)
    assert f"badge/licence-{licence.replace('-', '--')}-" in readme


# docs/promises.md names tests that there are, and every file with tests.

TESTS = ROOT / "tests"


def named_tests(text: str) -> dict[str, set[str]]:
    """The test files that a page of promises names, each with the tests that it names there."""
    found: dict[str, set[str]] = {}
    for row in re.findall(r"^\|.+\|(.+)\|$", text, re.MULTILINE):
        for file, tests in re.findall(r"`([\w/]+\.py)`(?:: ((?:`test_\w+`(?:, )?)+))?", row):
            found.setdefault(file, set()).update(re.findall(r"`(\w+)`", tests))
    return found


def faults(text: str, folder: Path) -> list[str]:
    """Names on a page of promises that are no tests of `folder`, and files that it leaves out."""
    named = named_tests(text)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("test_*.py")}
    found = [f"there is no {file}" for file in sorted(named.keys() - there)]
    found += [f"{file} is not named" for file in sorted(there - named.keys())]
    for file in sorted(named.keys() & there):
        tests = re.findall(r"^def (test_\w+)", (folder / file).read_text("utf-8"), re.MULTILINE)
        found += [f"there is no {test} in {file}" for test in sorted(named[file] - set(tests))]
    return found


def test_every_promise_has_its_test_and_every_test_file_its_promise() -> None:
    text = (ROOT / "docs" / "promises.md").read_text("utf-8")
    assert faults(text, TESTS) == []
    assert sum(map(len, named_tests(text).values())) > 40


def test_what_is_missing_would_be_noticed(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text("def test_one() -> None: ...\n")
    text = "| x | `test_a.py`: `test_one`, `test_two` |\n| y | `test_b.py`, `test_d.py` |\n"
    assert faults(text, tmp_path) == [
        "there is no test_d.py",
        "test_c.py is not named",
        "there is no test_two in test_a.py",
    ]


# README, docs, code and examples use the field's own words.


def test_no_word_is_of_this_project_alone() -> None:
    assert [str(finding) for finding in words.findings()] == []


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("README.md", "a\nThe weights are turned.\n", ["turned"]),
        ("docs/a.md", "15 % of the\nway back, Judged by hand\n", ["way back", "Judged"]),
        ("docs/a.md", "it is not told apart, and not retold\n", ["told apart"]),
        ("src/a.py", "def f(given, forgiven):\n    _held = given\n", ["given", "_held"]),
        ("src/a.py", "on_the_way = 1\n", ["on the way"]),
        ("examples/a.ipynb", '{"source": ["what was heard"]}', ["heard"]),
        ("docs/a.md", "Neither returned, untold nor overheard is one of them.\n", []),
        ("tests/a.py", "told = 1\n", []),
    ],
)
def test_such_a_word_is_found_where_it_is_put(
    file: str, text: str, found: list[str], tmp_path: Path
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    assert [finding.word for finding in words.findings(tmp_path)] == found


def test_a_message_says_where_the_word_is_and_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a\nb turned\n", encoding="utf-8")
    (finding,) = words.findings(tmp_path)
    assert str(finding) == (
        'README.md:2: "turned": write rotated (into the K-FAC eigenbasis), or switched on or off'
    )
