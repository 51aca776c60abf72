import os
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from syngap.bench.errors import UserError
from syngap.bench.streams import pickles as module
from syngap.bench.streams.pickles import read_pickle

PIXELS = np.arange(6 * 3072, dtype=np.uint64).astype(np.uint8).reshape(6, 3072)
BATCH: dict[bytes | str, Any] = {
    b"data": PIXELS,
    b"fine_labels": [1, 99, 300, 70_000, -1, 0],
    b"filenames": [b"cat_s_1.png", b"\xff.png", b""],
    b"batch_label": b"training batch 1 of 1",
    "text": "Größe",
    "none": [None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {"a": []}],
}

# As Python 2 and the NumPy of its time wrote the official files: texts are byte strings.
ARRAY_BY_PYTHON_2 = (
    b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07"
    b"(K\x01\x8a\x01\x02M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09"
    b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
    + struct.pack("<i", 2 * 3072)
    + PIXELS[:2].tobytes()
    + b"tb"
)
BY_PYTHON_2 = (
    b"\x80\x02}q\x01(U\x0bfine_labelsq\x02]q\x03(K\x07K\x08eU\x04dataq\x04"
    + ARRAY_BY_PYTHON_2
    + b"u."
)


def same(found: dict[Any, Any], expected: dict[Any, Any]) -> bool:
    arrays = [key for key, value in expected.items() if isinstance(value, np.ndarray)]
    plain = {key: value for key, value in found.items() if key not in arrays}
    return plain == {key: value for key, value in expected.items() if key not in arrays} and all(
        np.array_equal(found[key], expected[key]) for key in arrays
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_todays_numpy_wrote_comes_back(protocol: int, order: Any) -> None:
    batch = {**BATCH, b"data": np.array(PIXELS, order=order)}
    assert same(read_pickle(pickle.dumps(batch, protocol), "f"), BATCH)


def test_read_only_arrays_come_back() -> None:
    fixed = PIXELS.copy()
    fixed.flags.writeable = False
    assert same(read_pickle(pickle.dumps({b"data": fixed}, 5), "f"), {b"data": PIXELS})


def test_what_python_2_wrote_comes_back() -> None:
    expected = {b"data": PIXELS[:2], b"fine_labels": [7, 8]}
    assert same(pickle.loads(BY_PYTHON_2, encoding="bytes"), expected)  # the file is what it says
    assert same(read_pickle(BY_PYTHON_2, "f"), expected)


# What must not happen ----------------------------------------------------------------------------


class Attack:
    """Pickled, it is a call of os.mkdir(name); unpickled by pickle, that call is made."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.name,)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def attacks() -> dict[str, Callable[[str], bytes]]:
    """Programs that make a folder of the given name when pickle runs them."""
    mkdir, bare = f"c{os.mkdir.__module__}\nmkdir\n".encode(), os.mkdir.__module__.encode()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"

    def within(program: Callable[[bytes], bytes], head: bytes = b"\x80\x04") -> Any:
        return lambda name: head + b"}" + short("data") + program(short(name)) + b"s."

    made = {
        f"protocol {n}": lambda name, n=n: pickle.dumps({b"data": Attack(name)}, n)
        for n in (2, 3, 4, 5)
    }
    return made | {
        "nested": lambda name: pickle.dumps({b"data": [({"x": [Attack(name)]},)]}, 2),
        "top": lambda name: pickle.dumps(Attack(name), 2),
        "global": within(lambda name: mkdir + name + b"\x85R"),
        "stack global": within(
            lambda name: short(bare.decode()) + short("mkdir") + b"\x93" + name + b"\x85R"
        ),
        "remembered": within(lambda name: mkdir + b"q\x00" + name + b"\x85q\x010" + b"h\x00h\x01R"),
        "inst": within(lambda name: b"(" + name + b"i" + bare + b"\nmkdir\n"),
        "obj": within(lambda name: b"(" + mkdir + name + b"o"),
        "build": within(lambda name: array + b"}" + short("x") + mkdir + name + b"\x85Rsb"),
        "after the array's name": within(
            lambda name: b"cnumpy\nndarray\n0" + mkdir + name + b"\x85R"
        ),
        "before a refused end": within(lambda name: mkdir + name + b"\x85R" + b"\xff"),
    }


@pytest.mark.parametrize("kind", attacks())
def test_a_program_is_refused_and_not_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = attacks()[kind]
    with suppress(Exception):  # some go off before they fail
        pickle.loads(program("trap"))
    assert Path("trap").is_dir(), "the attack is none: pickle would not have run it"
    with refused("f: refused"):
        read_pickle(program("ours"), "f")
    assert not Path("ours").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cantigravity\nfly\n.",
        short("antigravity") + short("fly") + b"\x93.",
        b"cnumpy\nload\n.",
        b"cnumpy\nndarray.tofile\n.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"cbuiltins\neval\n.",
        b"cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"cnumpy\nndarray\n)}\x92.",  # NEWOBJ_EX
        b"cnumpy\nndarray\nK\x00\x85R.",  # a known name, called as a function
        b"cbuiltins\nbytes\n\x8a\x04\x00\x00\x00\x40\x85R.",  # bytes(2**30)
        b"c__builtin__\nbytes\n\x8a\x04\x00\x00\x00\x40\x85R.",
        b"]K\x00\x85R.",
        b"Pname\n.",  # PERSID
        b"\x82\x01.",  # EXT1
        b"\x97.",  # NEXT_BUFFER
        b"I1\n.",
        b"}}b.",
        b"cnumpy\ndtype\n" + short("O8") + b"\x89\x88\x87R.",
    ],
    ids=repr,
)
def test_what_plain_data_does_not_need_is_refused(program: bytes) -> None:
    loaded = set(sys.modules)
    with refused("refused"):
        read_pickle(b"\x80\x04" + program, "f")
    assert set(sys.modules) == loaded


@pytest.mark.parametrize("length", range(2, len(BY_PYTHON_2), 331))
def test_a_cut_file_is_called_that(length: int) -> None:
    with refused("f: cut short"):
        read_pickle(BY_PYTHON_2[:length], "f")


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\x80\x01}.",
        b"}.",
        b"\x80\x02K\x01.",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02}(e.",
        b"\x80\x02}h\x07.",
        b"\x80\x02}q\x00}h\x00K\x01s.",  # a dictionary as key
        b"\x80\x04}" + short("a") + b"(s.",  # past the mark
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.",
        b"\x80\x04}"
        + short("a")
        + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85Rs.",
        BY_PYTHON_2.replace(b"\x8a\x01\x02", b"\x8a\x01\x03"),  # a row more than there are bytes
        BY_PYTHON_2.replace(b"\x8a\x01\x02", b"\x8a\x01\xfe"),
        BY_PYTHON_2[:-40],
    ],
    ids=lambda program: repr(program[:40]),
)
def test_damage_is_refused(program: bytes) -> None:
    with refused("f: "):
        read_pickle(program, "f")


@pytest.mark.parametrize(
    "program",
    [
        b"\x8e" + struct.pack("<Q", 1 << 62),
        b"\x8d" + struct.pack("<Q", 1 << 40),
        b"\x96" + struct.pack("<Q", (1 << 64) - 1),
        b"T" + struct.pack("<i", -1),
        b"B" + struct.pack("<I", (1 << 32) - 1),
        b"X" + struct.pack("<I", 1 << 31),
        b"\x8a\xff" + b"\x01" * 255,
        b"r" + struct.pack("<I", (1 << 32) - 1),
        b"X" + struct.pack("<I", 1_000_001) + b"a" * 999_997 + "𐀀".encode(),  # four bytes a letter
        b"X" + struct.pack("<I", 400_000) + b"a" * 400_000 + b"q\x00"
        + b"c_codecs\nencode\nq\x01" + short("latin1") + b"q\x02"
        + b"h\x01h\x00h\x02\x86R" * 1000,
    ],
    ids=lambda program: repr(program[:12]),
)  # fmt: skip
def test_claimed_sizes_take_no_memory(program: bytes) -> None:
    data = b"\x80\x04" + program + b"."
    tracemalloc.start()
    try:
        with refused("f: "):
            read_pickle(data, "f")
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


def test_endless_programs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 1000)
    with refused("more than 1000 steps"):
        read_pickle(b"\x80\x02" + b"]" * 5000 + b".", "f")


def test_deep_nesting_does_not_exhaust_the_interpreter() -> None:
    deep = b")" + b"\x85" * 100_000
    with refused("f: "):
        read_pickle(b"\x80\x02}" + deep + b"K\x01s.", "f")  # to be hashed as a key
    assert read_pickle(b"\x80\x04}" + short("a") + deep + b"s.", "f").keys() == {"a"}


# Whatever the bytes ------------------------------------------------------------------------------

WHOLE = [pickle.dumps({**BATCH, b"data": PIXELS[:, :2]}, n) for n in (2, 3, 4, 5)] + [BY_PYTHON_2]
PIECES = [
    *(bytes([code]) for code in b"NKMJUCTBX\x8c\x8d\x8e\x96)\x85\x86\x87tqrhj(\x94\x8a]ae}suRb.0"),
    *(b"c%s\n%s\n" % (m.encode(), n.encode()) for m, n in module._NAMES),
    *(b"\x88", b"K\x01", b"U\x01b", b"U\x02u1", short("latin1"), short("data"), ARRAY_BY_PYTHON_2),
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    whole = bytearray(draw(st.sampled_from(WHOLE)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(whole) - 1))
        whole[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(whole)


@given(
    damaged() | st.lists(st.sampled_from(PIECES)).map(lambda parts: b"\x80\x04" + b"".join(parts))
)
def test_any_bytes_give_a_dictionary_or_a_refusal(data: bytes) -> None:
    with suppress(UserError):
        assert isinstance(read_pickle(data, "f"), dict)
