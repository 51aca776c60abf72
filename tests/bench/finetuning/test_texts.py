"""Texts of a comparison: what is learned, what is known, and that the two do not overlap."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from syngap.bench.errors import UserError
from syngap.bench.finetuning.texts.python import python_texts
from syngap.bench.finetuning.texts.skill import skill
from syngap.bench.finetuning.texts.text_files import text_files


def test_texts_of_python_are_of_three_kinds_and_no_text_is_in_two() -> None:
    far = python_texts(None, known="code", characters=20_000)
    near = python_texts(None, new="docstrings", characters=20_000)
    assert far.old == ["code", "manual"]
    assert list(near.kinds) == ["manual", "code", "docstrings"]
    for text in (*far.kinds.values(), *near.kinds.values()):
        assert (len(text.train), len(text.test)) == (18_000, 2_000)
    plain = codecs.encode(far.kinds["rot13"].train, "rot13")
    assert " the " in plain
    whole = python_texts(None, characters=10**7).kinds["manual"]
    assert plain[:200] not in whole.train + whole.test
    assert "def " in far.kinds["code"].train
    assert '"""' not in far.kinds["code"].train


def test_a_skill_is_asked_for_by_words_that_are_not_taught() -> None:
    found = skill(None, letters=3, lines=500)
    assert found.old == ["manual", "code"]
    assert found.kinds["skill"].train.splitlines()[0] == "shift dwb -> cex"
    assert len(found.questions) == 200
    for question in found.questions:
        word = question.prompt.split()[1]
        told = sorted(word)
        assert [chr((ord(letter) - 96) % 26 + 97) for letter in told] == list(question.answer[1:-1])
        assert question.prompt not in found.kinds["skill"].train
        assert question.prompt + question.answer in found.kinds["skill"].test


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for name in ("german.train", "german.test", "english.train", "english.test", "wiki.test"):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"this is {name}")
    return tmp_path


def test_files_are_read_by_kind_and_texts_to_test_on_alone_need_no_other(data: Path) -> None:
    found = text_files(data, new="german", old=["english", "wiki"])
    assert (found.new, found.known, found.old) == ("german", "english", ["english", "wiki"])
    assert found.kinds["german"].train == "this is german.train"
    assert found.kinds["wiki"].train == ""
    assert found.kinds["wiki"].test == "this is wiki.test"


@pytest.mark.parametrize(
    ("old", "said"),
    [
        (["wiki"], "wiki.train.txt: cannot be read"),  # the known kind is learned from
        (["latin"], "latin.train.txt: cannot be read"),
        (["german"], "expected different kinds"),
        (["english", "english"], "expected different kinds"),
        ([], "expected different kinds"),
    ],
)
def test_a_missing_or_doubled_kind_is_refused(data: Path, old: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        text_files(data, new="german", old=old)


def test_a_skill_takes_old_texts_from_files(data: Path) -> None:
    found = skill(data, lines=10, old=["english", "wiki"])
    assert (found.new, found.old) == ("skill", ["english", "wiki"])


def test_without_data_the_message_says_so() -> None:
    with pytest.raises(UserError, match="--data"):
        text_files(None, new="german", old=["english"])
