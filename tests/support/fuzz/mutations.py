"""Changes to valid inputs, from single bits to values, members of archives and kinds of files."""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import PurePosixPath
from random import Random
from typing import Any

import yaml

from fuzz.trees import OUTSIDE, Entry, Special, Tree

CHECKSUM = "checksum"  # of a checkpoint, made right again nearly always
LARGEST = 2_000_000  # bytes of a file: larger ones only take time

NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 7, 100, 255, 65536, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64, 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, 1.0, 99.999, float("nan"), float("inf"), float("-inf")),
]
TEXTS = [
    *("", " ", "\0", "\n", "a\nb", "\x1b[31mred", "\x1b]0;title\x07", "\u202e", "\ud800", "𝄞" * 9),
    *("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "{{data}}", "[red]x"),
    *("..", "../x", "/", "~", ".", "a/b", "C:\\x", "con", "%s%n", "${HOME}", "x" * 300, "é", "|"),
    *("true", "null", "1e5", "0x10", "1_000", "2024-01-01", "NaN", "Infinity", "0..4", "0,0", "=1"),
    *("__class__", "__proto__", "constructor", "joint", "syngap", "sgd", "er", "done", "running"),
    *("name", "method", "lr", "buffer", "mlp", "resnet18", "cifar100", "digits", "npz", "folder"),
    *("data.npz", "images", "pipe", "fp16", "bf16", "cuda", "auto", "choose", "log", "start"),
]
NESTED: list[Any] = [[], {}, [[]], {"": None}, [None], None, True, False, [1, "a"], {"name": 1}]
YAMLS = [
    *("&a [*a]", "*a", "!!python/object/apply:os.system [id]", "!!binary x", "!!set {a}"),
    *("<<: *a", "!!timestamp x", "---\n", "...\n", "%YAML 9.9\n---\n", "[" * 3000, "{a: " * 1500),
    *("- " * 2000, "!!float x", "!!int 0o9", "1:1:1", "!!omap [a: 1]", "\t", "@", "`", "\ufeff"),
    *("? [a]: b", "#"),
]
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{n}: &{n} [{','.join(['*' + p] * 9)}]\n"
    for p, n in zip("abcdefghi", "bcdefghij", strict=True)
)  # 9 ** 10 strings in 400 bytes


# Bytes --------------------------------------------------------------------------------------------


def bytes_changed(content: bytes, chance: Random) -> bytes:
    """Return `content` with one change that knows nothing of its format."""
    data = bytearray(content)
    at = chance.randrange(len(data) + 1)
    length = chance.choice([1, 2, 4, 8, 16, 100, 1000])
    kind = chance.randrange(10)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << chance.randrange(8)
    elif kind == 1 and data:
        data[at % len(data)] = chance.choice([0, 1, 9, 10, 13, 32, 34, 45, 92, 127, 128, 255])
    elif kind == 2:
        data[at:at] = chance.randbytes(length)
    elif kind == 3:
        del data[at : at + length]
    elif kind == 4:
        del data[at:]
    elif kind == 5:
        data[at:at] = data[at : at + length] * chance.choice([1, 2, 50])
    elif kind == 6:
        form = chance.choice(["<I", ">I", "<Q", ">Q", "<H", ">H", "B"])
        most = 256 ** struct.calcsize(form)
        number = chance.choice([0, 1, most - 1, most // 2, most // 2 - 1, chance.randrange(most)])
        data[at : at + struct.calcsize(form)] = struct.pack(form, number)
    elif kind == 7:
        data[at:at] = chance.choice([*TEXTS, *YAMLS]).encode("utf-8", "surrogatepass")
    elif kind == 8:
        other = chance.randrange(len(data) + 1)
        data[at : at + length] = data[other : other + length]
    else:
        data = bytearray(
            chance.choice([b"", b"\0", b"\xff\xfe", b"PK\x03\x04", b"\x80\x04.", b"\n"])
        )
    return bytes(data[:LARGEST])


# Values -------------------------------------------------------------------------------------------


def value_changed(value: Any, chance: Random) -> Any:
    """Return a nested value with one change somewhere in it."""
    whole = [copy.deepcopy(value)]
    places = _places(whole)
    holder, key = chance.choice(places)
    kind = chance.randrange(9)
    if kind == 0:
        _put(holder, key, chance.choice(NUMBERS))
    elif kind == 1:
        _put(holder, key, chance.choice(TEXTS))
    elif kind == 2:
        _put(holder, key, copy.deepcopy(chance.choice(NESTED)))
    elif kind == 3 and holder is not whole:
        del holder[key]
    elif kind == 4:
        other, at = chance.choice(places)
        _put(holder, key, copy.deepcopy(other[at]))
    elif kind == 5:
        for _ in range(chance.choice([1, 2, 30, 900])):
            _put(holder, key, [holder[key]] if chance.random() < 0.5 else {"a": holder[key]})
    elif kind == 6 and isinstance(holder, dict):
        name = chance.choice([*TEXTS, *NUMBERS, None, True, *map(str, holder)])
        holder[name] = holder.pop(key) if chance.random() < 0.5 else copy.deepcopy(holder[key])
    elif kind == 7 and isinstance(holder[key], list):
        holder[key] *= chance.choice([0, 2, 3, 100])
    elif isinstance(holder[key], (int, float)) and abs(holder[key]) < 1e300:
        change = chance.choice([-1, 1, 0.1, 1000, -1000])
        _put(holder, key, holder[key] + change if chance.random() < 0.5 else holder[key] * change)
    return whole[0]


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 5000:
        holder = waiting.pop()
        for key in [*holder] if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
    return found


def _put(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


# Formats ------------------------------------------------------------------------------------------


def json_changed(content: bytes, chance: Random) -> bytes:
    value = value_changed(json.loads(content), chance)
    return json.dumps(value, indent=chance.choice([None, 1])).encode("utf-8", "surrogatepass")


def jsonl_changed(content: bytes, chance: Random) -> bytes:
    lines = content.split(b"\n")
    at = chance.randrange(len(lines))
    kind = chance.randrange(5)
    if kind == 0:
        lines.insert(at, chance.choice(lines))
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        other = chance.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif lines[at]:
        lines[at] = json.dumps(value_changed(json.loads(lines[at]), chance)).encode()
    return b"\n".join(lines)


def yaml_changed(content: bytes, chance: Random) -> bytes:
    if chance.random() < 0.25:
        return _yaml_text_changed(content, chance)
    value = value_changed(yaml.safe_load(content), chance)
    flow = chance.choice([None, False, True])
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=flow)
    return text.encode("utf-8", "surrogatepass")


def _yaml_text_changed(content: bytes, chance: Random) -> bytes:
    lines = content.split(b"\n")
    at = chance.randrange(len(lines))
    token = chance.choice(YAMLS).encode()
    kind = chance.randrange(5)
    if kind == 0:
        lines[at] = lines[at].partition(b":")[0] + b": " + token
    elif kind == 1:
        lines.insert(at, token)
    elif kind == 2:
        lines.insert(at, chance.choice(lines))
    elif kind == 3:
        lines[at] = lines[at].replace(b": ", b": &a ", 1)
    else:
        lines = [*LAUGHS.encode().split(b"\n"), *lines]
        lines[-1] = chance.choice([b"name", b"seeds", b"stream", b"methods"]) + b": *j"
    return b"\n".join(lines)


def csv_changed(content: bytes, chance: Random) -> bytes:
    rows = [line.split(b",") for line in content.split(b"\n")]
    row = chance.choice(rows)
    at = chance.randrange(len(row))
    kind = chance.randrange(5)
    if kind == 0:
        row[at] = str(chance.choice([*NUMBERS[:-10], "nan", "inf", "1_0", "0x1"])).encode()
    elif kind == 1:
        row.insert(at, row[at])
    elif kind == 2:
        del row[at]
    elif kind == 3:
        rows.append(list(row))
    else:
        rows.remove(row)
    return b"\n".join(b",".join(row) for row in rows)


def png_changed(content: bytes, chance: Random) -> bytes:
    """Change a piece of an image and make its sum right again."""
    at = 8
    pieces = []
    while at + 12 <= len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        pieces.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    if not pieces:
        return bytes_changed(content, chance)
    which = chance.randrange(len(pieces))
    name, body = pieces[which]
    kind = chance.randrange(6)
    if kind == 0:
        pieces.insert(which, pieces[which])
    elif kind == 1:
        del pieces[which]
    elif kind == 2:
        extra = zlib.compress(b"\0" * 3_000_000)
        texts = [b"a\0" + b"\0" + extra, b"a\0\1\0\0\0" + extra, chance.randbytes(20)]
        pieces.insert(1, (chance.choice([b"zTXt", b"iTXt", b"tRNS", b"PLTE", b"iCCP", b"acTL"]),
                          chance.choice(texts)))  # fmt: skip
    else:
        pieces[which] = name, bytes_changed(body, chance)
    return content[:8] + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in pieces
    )


# Where a header of tar has its name, mode, size, time, kind, link and prefix, and their lengths.
HEADER = [(0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (345, 155)]


def gzip_changed(content: bytes, chance: Random) -> bytes:
    """Change what a compressed file holds: packed curves, or an archive."""
    try:
        inner = gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return bytes_changed(content, chance)
    if inner.startswith(b"{") and chance.random() < 0.8:
        return gzip.compress(jsonl_changed(inner, chance), 1, mtime=0)
    return tar_changed(content, chance)


def tar_changed(content: bytes, chance: Random) -> bytes:
    """Change what a compressed archive holds: a header, whose sum is made right, or a member."""
    try:
        inner = bytearray(gzip.decompress(content))
    except (OSError, EOFError, zlib.error):
        return bytes_changed(content, chance)
    if len(inner) < 1024:
        return bytes_changed(content, chance)
    if chance.random() < 0.5:
        try:
            return _tar_again(bytes(inner), chance)
        except (tarfile.TarError, OSError, ValueError):
            pass
    headers = [
        at for at in range(0, len(inner) - 511, 512) if inner[at + 257 : at + 262] == b"ustar"
    ]
    at = chance.choice(headers or [0])
    place, length = chance.choice(HEADER)
    said = chance.choice(
        [b"../../x", b"/etc/x", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"1234567", b"L", b"x", b"S",
         b"g", b"2", b"1", b"5", b"0", b"", chance.randbytes(length)]
    )  # fmt: skip
    inner[at + place : at + place + length] = said[:length].ljust(length, b"\0")
    inner[at + 148 : at + 156] = b" " * 8
    inner[at + 148 : at + 156] = b"%06o\0 " % sum(inner[at : at + 512])
    return gzip.compress(bytes(inner), 1, mtime=0)


def _tar_again(inner: bytes, chance: Random) -> bytes:
    """Pack an archive anew, with one member changed."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(inner)) as before,
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as after,
    ):
        members = before.getmembers()
        which = chance.randrange(len(members))
        kind = chance.randrange(4)
        for number, member in enumerate(members):
            file = before.extractfile(member)
            body = file.read() if file else b""
            if number == which:
                if kind == 0:
                    body = member_changed(member.name, body, chance)
                elif kind == 1:
                    member.name = chance.choice(["../" + member.name, "/" + member.name, "x" * 200])
                elif kind == 2:
                    member.type = chance.choice(
                        [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
                    )
                    member.linkname, body = "../../canary", b""
                else:
                    continue
            member.size = len(body)
            after.addfile(member, io.BytesIO(body))
    return packed.getvalue()


def member_changed(name: str, body: bytes, chance: Random) -> bytes:
    """Change a file as its name suggests, else its bytes."""
    change = FORMATS.get(PurePosixPath(name).suffix.lower())
    if change is None and body[:1] == b"\x80":
        change = pickle_changed
    if change is not None and chance.random() < 0.8:
        try:
            return change(body, chance)[:LARGEST]
        except Exception:  # it was changed before, and is no longer of its format
            return bytes_changed(body, chance)
    return bytes_changed(body, chance)


PICKLES = [
    *(b"cos\nsystem\n", b"c__builtin__\neval\n", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"R"),
    *(b"b", b"(", b"t", b")", b"\x85", b"\x86", b"\x87", b"}", b"]", b"u", b"s", b"e", b"a", b"N"),
    *(b"q\x00", b"h\x00", b"r\xff\xff\xff\x7f", b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\xff", b"."),
    *(b"\x8a\x08" + b"\xff" * 8, b"\x8a\xff", b"U\xff", b"T\xff\xff\xff\x7f"),
    b"\x8e" + b"\xff" * 8,
    *(b"X\x04\x00\x00\x00data", b"\x8c\x04data", b"U\x04data", b"\x94", b"\x93", b"\x81", b"\x82"),
]  # fmt: skip


def pickle_changed(content: bytes, chance: Random) -> bytes:
    """Put an instruction in, or in the place of a byte, near one of the ends where most stand."""
    window = min(len(content), 2000)
    start = chance.randrange(window + 1)
    at = start if chance.random() < 0.5 else len(content) - start
    return content[:at] + chance.choice(PICKLES) + content[at + chance.randrange(3) :]


def safetensors_changed(content: bytes, chance: Random) -> bytes:
    """Change the header of a checkpoint, or the structure in it, and make its length right."""
    length = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    kind = chance.randrange(3)
    if kind == 0:
        header = value_changed(header, chance)
    else:
        structure = value_changed(json.loads(header["__metadata__"]["structure"]), chance)
        header["__metadata__"]["structure"] = json.dumps(structure)
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + rest
    if chance.random() < 0.9 and isinstance(header.get(CHECKSUM), dict):
        first, last = (8 + len(text) + offset for offset in header[CHECKSUM]["data_offsets"])
        digest = hashlib.sha256(whole[:first] + bytes(last - first) + whole[last:]).digest()
        whole = whole[:first] + digest + whole[last:]
    return whole


def npz_changed(content: bytes, chance: Random) -> bytes:
    """Pack arrays anew, with one of them changed."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(packed, "w") as after:
        names = before.namelist()
        which = chance.choice(names)
        kind = chance.randrange(4)
        for name in names:
            body = before.read(name)
            if name == which and kind == 0:
                continue
            if name == which and kind == 1:
                body = before.read(chance.choice(names))
            elif name == which:
                body = npy_changed(body, chance)
            after.writestr(zipfile.ZipInfo(name), body)
    return packed.getvalue()


def npy_changed(content: bytes, chance: Random) -> bytes:
    length = int.from_bytes(content[8:10], "little")
    header = content[10 : 10 + length]
    kind = chance.randrange(3)
    if kind == 0:
        return bytes_changed(content, chance)
    if kind == 1:
        types = [b"|O", b">f4", b"<f2", b"|S9", b"<U4", b"<M8[s]", b"<c16", b"|V99999999", b"|b1"]
        header = header.replace(header.partition(b"'descr': '")[2][:3], chance.choice(types))
    else:
        shapes = [b"()", b"(1,)", b"(0, 3)", b"(9999999999,)", b"(-1, 2)", b"(1, " * 40 + b")" * 40]
        before = header.partition(b"'shape': ")[2].partition(b"),")[0] + b")"
        header = header.replace(before, chance.choice(shapes))
    return content[:8] + struct.pack("<H", len(header)) + header + content[10 + length :]


FORMATS: dict[str, Callable[[bytes, Random], bytes]] = {
    ".json": json_changed,
    ".jsonl": jsonl_changed,
    ".yaml": yaml_changed,
    ".csv": csv_changed,
    ".png": png_changed,
    ".gz": gzip_changed,
    ".npz": npz_changed,
    ".safetensors": safetensors_changed,
}


# Trees --------------------------------------------------------------------------------------------


def tree_changed(tree: Tree, chance: Random, others: list[Tree], shape: float = 0.15) -> Tree:
    """Return a tree with a few changes; `shape` is the share of those to what kind a file is."""
    changed = dict(tree)
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        if not changed:
            return dict(tree)
        name = chance.choice(sorted(changed))
        entry = changed[name]
        if chance.random() < shape:
            _shape_changed(changed, name, chance)
        elif chance.random() < 0.03:
            changed[name] = chance.choice(others).get(name, b"")
        elif isinstance(entry, bytes):
            changed[name] = member_changed(name, entry, chance)
    return changed


def _shape_changed(tree: Tree, name: str, chance: Random) -> None:
    kind = chance.randrange(8)
    entry: Entry = tree[name]
    if kind == 0:
        del tree[name]
    elif kind == 1:
        tree[name] = Special("folder")
    elif kind == 2:
        tree[name] = Special("fifo")
    elif kind == 3:
        aims = [f"{OUTSIDE}/canary", OUTSIDE, "nowhere", PurePosixPath(name).name, ".", ".."]
        tree[name] = Special("link", chance.choice(aims))
    elif kind == 4:
        tree[chance.choice(sorted(tree))] = entry
    elif kind == 5:
        folder = PurePosixPath(name).parent
        parts = [chance.choice(TEXTS)[:200], chance.choice(TEXTS)[:50] + PurePosixPath(name).suffix]
        aim = (folder / chance.choice(parts).replace("/", "_")).as_posix()
        if not {"..", "."} & {*PurePosixPath(aim).parts} and aim.isascii() | aim.isprintable():
            tree[aim] = entry
    elif kind == 6:  # the folder that it is in
        parent = PurePosixPath(name).parent.as_posix()
        if parent != ".":
            for other in [other for other in tree if other.startswith(f"{parent}/")]:
                del tree[other]
            instead = [Special("fifo"), Special("link", OUTSIDE), b"", Special("link", "."), None]
            if other_kind := chance.choice(instead):
                tree[parent] = other_kind
    else:
        parent = PurePosixPath(name).parent.as_posix()
        new = chance.choice(["a-0", "er-9", "..x", "é-1", "-"])
        if parent != ".":
            for other in [other for other in tree if other.startswith(f"{parent}/")]:
                tree[f"{new}/{other[len(parent) + 1 :]}"] = tree[other]
