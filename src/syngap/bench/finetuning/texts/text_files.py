"""Texts in a folder: KIND.train.txt and KIND.test.txt for each kind."""

from __future__ import annotations

from pathlib import Path

from syngap.bench.errors import UserError
from syngap.bench.finetuning.texts.kinds import Text, Texts
from syngap.bench.storage import read

__all__ = ["text_files"]

_LARGEST = 1 << 30  # bytes


def text_files(data: Path | None, *, new: str, old: list[str], folder: str = "texts") -> Texts:
    """Return the texts of a folder.

    Args:
        data: where the folder is.
        new: the kind that is learned; "" for none.
        old: the kinds that are to be kept; that of the anchors first. Others need no train text.
        folder: its name.
    """
    if data is None:
        raise UserError("files: --data has to say where the folder of texts is")
    if not old or new in old or len(set(old)) < len(old):
        raise UserError(f'old: expected different kinds of text, and not the new one, "{new}"')
    learned = (old[0], new)
    names = [*old, new] if new else old
    kinds = {kind: _text(data / folder, kind, tests_alone=kind not in learned) for kind in names}
    return Texts(new, old[0], kinds)


def _text(folder: Path, kind: str, *, tests_alone: bool) -> Text:
    parts = {}
    for part in ("train", "test"):
        path = folder / f"{kind}.{part}.txt"
        if part == "train" and tests_alone and not path.exists():
            parts[part] = ""
            continue
        try:
            parts[part] = read(path, _LARGEST).decode("utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return Text(parts["train"], parts["test"])
