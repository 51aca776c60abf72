"""Files that were exchanged between two commands: nothing that was made of the former is used."""

from __future__ import annotations

from pathlib import Path

import pytest
from finetuned import EXPERIMENT, tiny_images

from syngap.bench.config.component import Value
from syngap.bench.config.finetuning import AnyExperiment, parse_experiment
from syngap.bench.errors import UserError
from syngap.bench.finetuning.images import Images
from syngap.bench.finetuning.texts import Question, Text, Texts
from syngap.bench.runner.local import run_here
from syngap.bench.runner.plan import IfThere, make_plan
from syngap.bench.store.folder_reader import read_run
from syngap.bench.store.folder_writer import FolderJournal
from syngap.bench.store.keep import keep
from syngap.bench.store.shared import digests


class Killed(BaseException):
    """What a kill looks like from within."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with texts of three kinds."""
    folder = tmp_path / "data" / "texts"
    folder.mkdir(parents=True)
    for kind in ("old", "other", "new"):
        for part in ("train", "test"):
            (folder / f"{kind}.{part}.txt").write_text(f"This is {kind}, to {part}. " * 40)
    return folder.parent


def experiment() -> AnyExperiment:
    texts = {"name": "files", "new": "new", "old": ["old", "other"]}
    return parse_experiment({**EXPERIMENT, "texts": texts, "methods": {"kl": {"lr": 0.01}}})


def run_all(out: Path, data: Path, if_there: IfThere = "refuse") -> None:
    plan = make_plan(experiment(), out, data=data, if_there=if_there)
    with plan.begin():
        for job in plan.jobs:
            run_here(job)


def shared(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "shared").iterdir())


def killed(self: FolderJournal, step: int) -> bool:
    if step > 2:
        raise Killed
    return True


def exchange(data: Path, name: str) -> None:
    """Put another text of the same length there."""
    path = data / "texts" / name
    path.write_text(path.read_text().swapcase())


@pytest.mark.parametrize("name", ["old.train.txt", "other.train.txt", "old.test.txt"])
def test_no_start_or_samples_are_shared_by_other_texts(
    name: str, data: Path, tmp_path: Path
) -> None:
    """A byte model is trained on the old texts, and writes its samples thereafter."""
    out = tmp_path / "out"
    run_all(out, data)
    first = shared(out)
    assert [each.partition("-")[0] for each in first] == ["samples", "start"]
    run_all(out, data, if_there="replace")
    assert shared(out) == first
    exchange(data, name)
    run_all(out, data, if_there="replace")
    assert len(shared(out)) == 4
    exchange(data, name)
    run_all(out, data, if_there="replace")
    assert len(shared(out)) == 4


@pytest.mark.parametrize("name", ["old.train.txt", "other.test.txt", "new.train.txt"])
def test_a_run_does_not_go_on_with_other_texts(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(FolderJournal, "advance", killed)
        with pytest.raises(Killed):
            run_all(out, data)
    exchange(data, name)
    with pytest.raises(UserError, match="the data, or the files of the model, are not those"):
        run_all(out, data, if_there="resume")
    exchange(data, name)
    run_all(out, data, if_there="resume")
    assert read_run(out / "kl-0").done


def test_a_run_that_an_earlier_version_began_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept no digest of what a run depends on."""
    begin = FolderJournal.__init__
    with monkeypatch.context() as patched:
        patched.setattr(FolderJournal, "advance", killed)
        patched.setattr(
            FolderJournal,
            "__init__",
            lambda *args, **options: begin(*args, **{**options, "fingerprint": ""}),
        )
        with pytest.raises(Killed):
            run_all(tmp_path / "out", data)
    run_all(tmp_path / "out", data, if_there="resume")
    assert read_run(tmp_path / "out" / "kl-0").done


def test_a_record_is_taken_over_whatever_the_texts_are_now(data: Path, tmp_path: Path) -> None:
    """Records hold no digests."""
    run_all(tmp_path / "out", data)
    keep(tmp_path / "out", tmp_path / "kept")
    exchange(data, "old.train.txt")
    plan = make_plan(experiment(), tmp_path / "again", data=data, record=tmp_path / "kept")
    assert (len(plan.recorded), plan.jobs) == (1, [])


def test_every_part_of_a_source_changes_its_digest() -> None:
    kinds = {"old": Text("a", "b"), "new": Text("c", "d")}
    texts = [
        Texts("new", "old", kinds),
        Texts("old", "new", kinds),
        *(Texts("new", "old", {**kinds, "old": Text(*parts)}) for parts in ("ax", "xb")),
        Texts("new", "old", {**kinds, "old": Text("ab", "")}),
        Texts("new", "old", dict(reversed(kinds.items()))),
        Texts("new", "old", kinds, (Question("e", "f"),)),
        Texts("new", "old", kinds, (Question("e", "x"),)),
    ]
    assert len({each.fingerprint for each in texts}) == len(texts)
    assert texts[0].fingerprint == Texts("new", "old", dict(kinds)).fingerprint


@pytest.mark.parametrize("part", ["train", "test", "known", "old"])
@pytest.mark.parametrize("field", ["images", "labels"])
def test_every_image_and_label_changes_the_digest(part: str, field: str) -> None:
    def images(change: int) -> Images:
        found = tiny_images()
        place = found.old["animals"] if part == "old" else getattr(found, part)
        getattr(place, field)[-1] += change
        return found

    assert images(0).fingerprint == images(0).fingerprint != images(1).fingerprint


# Files of models ----------------------------------------------------------------------------------

LLAMA = ("model.safetensors", "tokenizer.json", "q4.gguf", "q8.gguf", "README.md", ".gitattributes")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder of models: one with all kinds of files, and a file by itself."""
    folder = tmp_path / "models" / "llama"
    (folder / "inner").mkdir(parents=True)
    for name in LLAMA:
        (folder / name).write_text(name)
    (folder / "inner" / "q2.gguf").write_text("q2")
    (folder.parent / "net.pth").write_text("net")
    (folder.parent / "mean").write_text("no model")
    return folder.parent


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"folder": "llama"}, "model.safetensors q4.gguf q8.gguf tokenizer.json"),
        ({"folder": "llama", "gguf": None}, "model.safetensors q4.gguf q8.gguf tokenizer.json"),
        ({"folder": "llama", "gguf": "q4.gguf"}, "model.safetensors q4.gguf tokenizer.json"),
        (
            {"folder": "llama", "gguf": "inner/q2.gguf"},
            "inner/q2.gguf model.safetensors tokenizer.json",
        ),
    ],
)
def test_of_a_folder_the_files_count_that_a_model_may_be_read_from(
    options: dict[str, Value], files: str, models: Path
) -> None:
    found = digests({**options, "pooling": "mean", "context": 64}, models)
    assert list(found) == [str(Path("llama", name)) for name in files.split()]
    there = digests({**options, "folder": str(models / "llama")}, None)
    assert list(there.values()) == list(found.values())


def test_a_text_that_is_also_the_name_of_a_file_is_none(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    options: dict[str, Value] = {"file": "net.pth", "pooling": "mean"}
    assert list(digests(options, None)) == ["net.pth"]
    assert digests({"folder": "nowhere", "gguf": "q4.gguf", "file": "a" * 999}, None) == {}
