"""docs/promises.md names tests that there are, and every file with tests."""

from __future__ import annotations

import re
from pathlib import Path

from checkout import ROOT

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
