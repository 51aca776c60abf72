"""Text of three domains, from files that are installed wherever torch is."""

from __future__ import annotations

import hashlib
import multiprocessing
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["DOMAINS", "collect_text", "describe", "windows"]

MAX_BYTES = 200_000  # of a file; larger ones are generated
PLAIN = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.\n"
COMMON = frozenset(b"the of and to a in is that for be it are as by with this or on not".split())


def is_prose(text: bytes) -> bool:
    words = text.lower().split()
    others = len(text.translate(None, PLAIN))
    return len(words) >= 12 and others < 0.06 * len(text) and _common_share(words) > 0.2


def _common_share(words: list[bytes]) -> float:
    return sum(word in COMMON for word in words) / max(len(words), 1)


def split_docstrings(program: bytes) -> tuple[bytes, list[bytes]]:
    """Return a program without its docstrings, and the docstrings.

    A docstring is a string in triple quotes that begins a line.
    """
    rest, docstrings = b"", []
    for index, part in enumerate(program.split(b'"""')):
        if index % 2 == 0:
            rest += part
        elif rest.rpartition(b"\n")[2].strip() in (b"", b"r"):
            docstrings.append(part)
        else:
            rest += b'"""' + part + b'"""'
    return rest, docstrings


def english(path: Path) -> bytes:
    """Return the prose of a file; of a program, that of its docstrings."""
    text = path.read_bytes()
    if path.suffix == ".py":
        text = b"\n\n".join(split_docstrings(text)[1])
    lines = b"\n".join(line.strip() for line in text.splitlines())
    return b"\n\n".join(part for part in re.split(rb"\n\n+", lines) if is_prose(part))


def python(path: Path) -> bytes:
    """Return a program without its docstrings, which are English."""
    return split_docstrings(path.read_bytes())[0]


PACKAGES, LIBRARY = Path(torch.__file__).parents[1], Path(sysconfig.get_path("stdlib"))
PROGRAMS = [(PACKAGES, "*.py"), (LIBRARY, "*.py")]
DOCUMENTS = [
    (root, name)
    for root in (PACKAGES, LIBRARY, Path("/usr/share/doc"))
    for name in ("*.md", "*.rst", "*.txt", "METADATA", "LICENSE*")
]
HEADERS = [(PACKAGES / "torch" / "include", name) for name in ("*.h", "*.hpp", "*.cuh")]
# Where the files of a domain are, and what is taken from each.
DOMAINS: dict[str, tuple[list[tuple[Path, str]], Callable[[Path], bytes]]] = {
    "python": (PROGRAMS, python),
    "cpp": (HEADERS, Path.read_bytes),
    "english": (DOCUMENTS + PROGRAMS, english),
}


def files_of(domain: str) -> list[tuple[bytes, Path]]:
    """Return hashes of names and files, in the order of the hashes: the same each time."""
    files = {}
    for root, pattern in DOMAINS[domain][0]:
        for path in root.rglob(pattern):
            name = path.relative_to(root).as_posix()
            if path.is_file() and path.stat().st_size < MAX_BYTES and "ATen/ops/" not in name:
                files[hashlib.sha256(name.encode()).digest()] = path
    return sorted(files.items())


def collect_text(domain: str, megabytes: float) -> dict[str, Tensor]:
    """Return train and test text, a tenth of the files for test, no paragraph of it twice."""
    parts: dict[str, list[bytes]] = {"train": [], "test": []}
    seen: set[bytes] = set()
    length = 0
    files = files_of(domain)
    with multiprocessing.Pool() as pool:
        texts = pool.imap(DOMAINS[domain][1], [path for _, path in files], chunksize=32)
        for (digest, _), text in zip(files, texts, strict=True):
            pieces = text.split(b"\n\n") if domain == "english" else [text]
            hashes = [hashlib.md5(piece).digest() for piece in pieces]
            fresh = [p for p, h in zip(pieces, hashes, strict=True) if p and h not in seen]
            seen.update(hashes)
            parts["test" if digest[-1] < 26 else "train"] += fresh
            length += sum(len(piece) + 2 for piece in fresh)
            if length >= megabytes * 1e6:
                break
    joined = {name: b"\n\n".join(pieces) for name, pieces in parts.items()}
    return {
        name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in joined.items()
    }


def describe(domain: str, text: dict[str, Tensor]) -> None:
    """Print how much text there is, and how much of the test text reads like English."""
    test = text["test"].numpy().tobytes()
    plain = 1 - len(test.translate(None, PLAIN)) / max(len(test), 1)
    sizes = ", ".join(f"{len(part):,} bytes {name}" for name, part in text.items())
    words = _common_share(test.lower().split())
    print(
        f"{domain}: {sizes}; {plain:.0%} letters and spaces, {words:.0%} common words", flush=True
    )


def windows(text: Tensor, offsets: Tensor, context: int) -> Tensor:
    """Return the texts of `context` bytes that begin at `offsets`."""
    return text[offsets[:, None] + torch.arange(context, device=text.device)].long()
