"""A checkpoint gives back what was put in, and bytes that are none give a ValueError."""

from __future__ import annotations

import json
import math
import pickle
import struct
from contextlib import suppress
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from syngap.bench.training.checkpoint import pack, random_states, restore_random_states, unpack

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(actual: Any, expected: Any, where: str = "state") -> None:
    """The same types and the same bits, where not a number is the same as not a number."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), where
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(bits(actual), bits(expected)), where
        return
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        assert [type(key) for key in actual] == [type(key) for key in expected], where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, part in enumerate(expected):
            assert_same(actual[index], part, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert struct.pack("d", actual) == struct.pack("d", expected) or (
            math.isnan(actual) and math.isnan(expected)
        ), where
    else:
        assert actual == expected, where


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any type and layout: empty, scalar, transposed, cut out of a larger one, expanded."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(seed)
    values = (100 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    layout = draw(st.sampled_from(["plain", "transposed", "cut", "expanded", "special"]))
    if layout == "transposed" and len(shape) > 1:
        return values.transpose(0, -1)
    if layout == "cut" and shape and shape[0] > 1:
        return values[1::2]
    if layout == "expanded":
        return values.expand(2, *shape)
    if layout == "special" and dtype.is_floating_point and values.numel():
        return values / torch.zeros_like(values)  # infinite, or not a number
    return values


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5)
    | tensors()
)
states = st.recursive(
    leaves,
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.lists(parts, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), parts, max_size=4)
    ),
    max_leaves=12,
)


@given(state=states)
@example(state={"1": 1, 1: 2, "": 3, -1: {}})
@example(state=({}, [], (), [()], {"dict": [], "tuple": (), "tensor": "0"}))
@example(state=[math.nan, math.inf, -math.inf, -0.0, 5e-324, 2**70, True, 1, 1.0])
def test_what_goes_in_comes_out(state: Any) -> None:
    assert_same(unpack(pack(state)), state)


@given(state=states)
def test_equal_states_give_equal_bytes(state: Any) -> None:
    assert pack(state) == pack(state)


def test_tensors_that_share_memory_come_out_apart_and_whole() -> None:
    whole = torch.arange(6.0)
    state = {"whole": whole, "part": whole[2:4], "again": whole, "turned": whole.reshape(2, 3).T}
    found = unpack(pack(state))
    assert_same(found, state)
    found["whole"].zero_()
    assert_same(found["part"], whole[2:4])


def test_a_packed_state_keeps_nothing_of_what_happens_later() -> None:
    model = nn.Linear(2, 2)
    content = pack(model.state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight.zero_()
    assert_same(unpack(content), before)


def test_parameters_come_out_as_plain_tensors() -> None:
    found = unpack(pack([nn.Parameter(torch.ones(2))]))[0]
    assert type(found) is Tensor
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [object()]}, "a object cannot be kept in a checkpoint"),
        ({1, 2}, "a set cannot be kept"),
        (b"bytes", "a bytes cannot be kept"),
        (1j, "a complex cannot be kept"),
        ({1.5: 0}, "a key of a state must be text or a whole number, got 1.5"),
        ({(1, 2): 0}, r"a key of a state must be text or a whole number, got \(1, 2\)"),
        ({True: 0}, "a key of a state must be text or a whole number, got True"),
        ({None: 0}, "a key of a state must be text or a whole number, got None"),
    ],
    ids=["object", "set", "bytes", "complex", "float-key", "tuple-key", "bool-key", "no-key"],
)
def test_what_would_not_come_out_is_not_let_in(state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(state)


# Bytes that are no checkpoint ---------------------------------------------------------------------

WHOLE = pack({"step": 3, 0: (torch.arange(5), None), "weights": [torch.ones(2, 2)]})


def test_a_truncated_checkpoint_is_none() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(ValueError, match=r"\S"):
            unpack(WHOLE[:length])
    with pytest.raises(ValueError, match="not a checkpoint"):
        unpack(WHOLE + b"\0")


def read(content: bytes) -> None:
    """Take it or say ValueError; anything else is a failure."""
    with suppress(ValueError):
        unpack(content)


@pytest.mark.parametrize("mask", [0x01, 0x08, 0x20, 0x80, 0xFF])
def test_a_changed_byte_anywhere_gives_a_state_or_a_value_error(mask: int) -> None:
    for place in range(len(WHOLE)):
        changed = bytearray(WHOLE)
        changed[place] ^= mask
        read(bytes(changed))


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 6), st.binary(max_size=6)),
        min_size=1,
        max_size=4,
    )
)
def test_cut_and_pasted_bytes_give_a_state_or_a_value_error(
    edits: list[tuple[int, int, bytes]],
) -> None:
    content = WHOLE
    for place, removed, added in edits:
        content = content[:place] + added + content[place + removed :]
    read(content)


@given(content=st.binary(max_size=60))
def test_any_bytes_give_a_state_or_a_value_error(content: bytes) -> None:
    read(content)


def with_structure(structure: str) -> bytes:
    return safetensors.torch.save({"0": torch.ones(2)}, {"structure": structure})


def test_an_honest_structure_is_read() -> None:
    assert_same(unpack(with_structure('{"tensor": "0"}')), torch.ones(2))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["0", "1", "ab"]),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.dictionaries(st.sampled_from(["tensor", "dict", "tuple", "x"]), parts, max_size=2)
    ),
    max_leaves=10,
)


@given(structure=anything)
@example(structure={"tensor": ["0"]})
@example(structure={"tensor": "1"})
@example(structure={"dict": [[["a"], 1]]})
@example(structure={"dict": [["a"]]})
@example(structure={"dict": 3})
@example(structure={"tuple": None})
@example(structure={})
def test_any_structure_gives_a_state_or_a_value_error(structure: Any) -> None:
    read(with_structure(json.dumps(structure)))


@pytest.mark.parametrize("structure", ["", "{", '"', "[" * 100_000, "\\", "{}", "nul"])
def test_a_structure_that_is_no_json_gives_a_value_error(structure: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        unpack(with_structure(structure))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=str)
def test_a_safetensors_file_of_someone_else_is_no_checkpoint(metadata: Any) -> None:
    with pytest.raises(ValueError, match="not a checkpoint"):
        unpack(safetensors.torch.save({"weight": torch.ones(2)}, metadata))


def test_a_pickle_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = pickle.dumps({"step": 3})

    def refuse(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("a pickle was read or written")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    assert unpack(pack({"step": 3, 0: torch.ones(2)}))["step"] == 3
    with pytest.raises(ValueError, match="not a checkpoint"):
        unpack(bomb)


# Random numbers -----------------------------------------------------------------------------------


def test_torchs_own_random_numbers_go_on_where_they_stopped() -> None:
    device = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        torch.rand(3)
        kept = pack(random_states(device))
        expected = torch.rand(5), torch.nn.functional.dropout(torch.ones(20))
        torch.manual_seed(2)
        restore_random_states(unpack(kept), device)
        assert_same((torch.rand(5), torch.nn.functional.dropout(torch.ones(20))), expected)
