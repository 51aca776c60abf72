"""README, docs, code and examples use the field's own words."""

from __future__ import annotations

from pathlib import Path

import pytest
import words


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
