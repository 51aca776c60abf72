"""Take data to a machine without a network, in parts of limited size.

parts.py pack PARTS DATA NAME...   writes PARTS/part1, part2, … with these files and folders of DATA
parts.py load PARTS DATA           collects the parts that are there; with the last of them, unpacks

Take one part at a time: after each, `load` keeps what has arrived in DATA. All parts are one
archive (tar, xz), whose SHA-256 each part has, so that parts of different archives are not joined.
Links in DATA are followed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import shutil
import tarfile
from pathlib import Path

LARGEST = 50_000_000  # bytes of a part
PRESET = 1  # models hardly shrink, whatever it costs


def pack(parts: Path, data: Path, names: list[str], largest: int = LARGEST) -> list[Path]:
    """Write the parts and return their folders."""
    archive = io.BytesIO()
    with (
        lzma.open(archive, "w", preset=PRESET) as packed,
        tarfile.open(fileobj=packed, mode="w", dereference=True) as tar,
    ):
        for name in names:
            tar.add(data / name, name)
    content = archive.getvalue()
    shutil.rmtree(parts, ignore_errors=True)
    digest = hashlib.sha256(content).hexdigest()
    count = -(-len(content) // largest)
    size = -(-len(content) // count)
    folders = []
    for number in range(count):
        folder = parts / f"part{number + 1}"
        folder.mkdir(parents=True)
        piece = content[number * size : (number + 1) * size]
        (folder / f"{digest}.{number + 1}-{count}").write_bytes(piece)
        folders.append(folder)
    return folders


def load(parts: Path, data: Path) -> str:
    """Collect parts and unpack what is whole; return a sentence that says how far it is."""
    pieces = data / "packed" / parts.name
    pieces.mkdir(parents=True, exist_ok=True)
    for path in parts.glob("part*/*"):
        shutil.copy(path, pieces)
    found = {path.name: path for path in pieces.iterdir()}
    if not found:
        return f"{parts.name}: no part is there"
    digest, _, numbers = next(iter(found)).partition(".")
    count = int(numbers.partition("-")[2])
    wanted = [f"{digest}.{number}-{count}" for number in range(1, count + 1)]
    if other := found.keys() - set(wanted):
        raise SystemExit(f"{parts.name}: parts of two archives, {digest} and {min(other)}")
    if missing := [name for name in wanted if name not in found]:
        return f"{parts.name}: {len(found)} of {count} parts, {len(missing)} to come"
    content = b"".join(found[name].read_bytes() for name in wanted)
    if hashlib.sha256(content).hexdigest() != digest:
        raise SystemExit(f"{parts.name}: the parts are damaged: SHA-256 is not {digest}")
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(content))) as tar:
        tar.extractall(data, filter="data")
    return f"{parts.name}: complete"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("pack", "load"):
        command = commands.add_parser(name)
        command.add_argument("parts", type=Path, help="folder of part1, part2, …")
        command.add_argument("data", type=Path, help="folder of the data")
        if name == "pack":
            command.add_argument("names", nargs="+", help="files and folders of the data")
    args = parser.parse_args()
    if args.command == "load":
        print(load(args.parts, args.data))
        return
    for part in pack(args.parts, args.data, args.names):
        print(f"{part}: {sum(path.stat().st_size for path in part.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
