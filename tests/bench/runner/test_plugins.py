"""What another package adds by an entry point is found, and one that is broken hurts nobody."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_identical

from syngap.bench import methods, models, streams
from syngap.bench.errors import UserError
from syngap.bench.methods import Learner
from syngap.bench.options import checked, signature
from syngap.bench.registry import Registry
from syngap.bench.training import train

MODULE = '''
import torch
from torch import nn

from syngap.bench.methods import Method
from syngap.bench.options import Count, Positive
from syngap.bench.streams import arrays


class Slow(Method):
    """Descends, slowly."""

    def __init__(self, learner, *, lr: Positive = 1e-3):
        super().__init__(learner)
        self.optimizer = torch.optim.SGD(learner.parameters(), lr=lr)


def stripes(seed, data, *, width: Count = 4, tasks: Count = 2):
    y = torch.arange(12) % 4
    x = torch.nn.functional.one_hot(y, width).float()
    return arrays(x, y, x, y, tasks=tasks, seed=seed)


def line(shape, classes, *, bias: bool = True):
    return nn.Linear(shape[0], classes, bias=bias)


class Impostor:
    """Has the name of a method of the package."""
'''

ENTRIES = """
[syngap.methods]
slow = their_module:Slow
er = their_module:Impostor
unfinished = their_module:NotThere
absent = no_such_module_anywhere:Thing
raising = their_broken_module:Thing
nonsense = not a place at all

[syngap.streams]
stripes = their_module:stripes
lost = no_such_module_anywhere:stream

[syngap.models]
line = their_module:line
gone = no_such_module_anywhere:model

[somebody.elses.group]
slow = no_such_module_anywhere:Slow
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package is installed beside this one, as pip would leave it."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "their_module.py").write_text(MODULE)
    (tmp_path / "their_broken_module.py").write_text("raise RuntimeError('half an update')")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("their_module", "their_broken_module"):
        sys.modules.pop(name, None)


def test_names_of_other_packages_come_after_ours() -> None:
    for registry, ours, theirs in (
        (methods.registry, "sgd", "slow"),
        (streams.registry, "digits", "stripes"),
        (models.registry, "mlp", "line"),
    ):
        names = registry.names()
        assert names[0] == ours
        assert theirs in names
        assert len(names) == len(set(names))


def test_naming_imports_nothing() -> None:
    for registry in (methods.registry, streams.registry, models.registry):
        registry.names()
    assert "their_module" not in sys.modules


def test_their_options_are_checked_like_ours() -> None:
    allowed = signature(methods.registry.get("slow"))
    assert checked({}, allowed, "methods.slow") == {"lr": 1e-3}
    with pytest.raises(UserError, match=r'methods\.slow\.lr: got "fast", expected a positive'):
        checked({"lr": "fast"}, allowed, "methods.slow")
    with pytest.raises(UserError, match=r"stream\.width: got 0, expected a whole number ≥ 1"):
        streams.load("stripes", width=0)
    assert {"width", "tasks", "batch", "epochs"} <= set(streams.options("stripes"))


def test_their_method_learns_their_stream_with_their_network() -> None:
    stream = streams.load("stripes", seed=1, width=5, batch=4)
    assert (stream.tasks, stream.classes, stream.shape) == (2, 4, (5,))
    network = models.registry.get("line")(stream.shape, stream.classes, bias=False)
    before = network.weight.detach().clone()
    method = methods.registry.get("slow")(Learner(network, stream.transform), lr=0.5)

    rows: list[Any] = []

    class Journal:
        def load(self) -> None:
            return None

        def record(self, evaluation: Any, summary: Any) -> None:
            rows.append(evaluation)

        def advance(self, step: int) -> bool:
            return False

        def save(self, state: dict[str, Any]) -> None:
            assert set(state["method"]) == {"learner", "optimizer"}

    assert train(stream, lambda: method, Journal()) is method
    assert not torch.equal(network.weight, before)
    assert len(rows) == 3


def test_a_plug_in_cannot_replace_what_ships_with_the_package() -> None:
    assert methods.registry.get("er").__module__ == "syngap.bench.methods.er"


@pytest.mark.parametrize(
    ("registry", "name", "reason"),
    [
        (methods.registry, "unfinished", "NotThere"),
        (methods.registry, "absent", "No module named 'no_such_module_anywhere'"),
        (methods.registry, "raising", "half an update"),
        (methods.registry, "nonsense", "not a place at all"),
        (streams.registry, "lost", "No module named 'no_such_module_anywhere'"),
        (models.registry, "gone", "No module named 'no_such_module_anywhere'"),
    ],
)
def test_a_broken_plug_in_is_an_error_for_whoever_asks_for_it(
    registry: Registry, name: str, reason: str
) -> None:
    assert name in registry.names()
    with pytest.raises(UserError) as caught:
        registry.get(name)
    assert str(caught.value).startswith(f'{registry.kind} "{name}" cannot be imported from ')
    assert reason in str(caught.value)


def test_a_broken_plug_in_is_none_for_whoever_does_not() -> None:
    for name in ("sgd", "syngap", "slow"):
        assert methods.registry.get(name)
    assert streams.registry.get("digits")
    assert streams.load("stripes", batch=3)[0].y.shape == (3,)
    assert models.registry.get("mlp")((4,), 2)


def test_an_unknown_name_is_answered_with_a_near_one_of_anybody() -> None:
    with pytest.raises(UserError, match=r'^unknown method "slwo"; did you mean "slow"\?$'):
        methods.registry.get("slwo")
    with pytest.raises(UserError, match=r'^unknown stream "zzz"; there are digits, .*stripes'):
        streams.registry.get("zzz")


def test_what_an_entry_point_gives_is_what_is_there() -> None:
    import their_module  # type: ignore[import-not-found]

    assert methods.registry.get("slow") is their_module.Slow
    one, other = (streams.load("stripes", seed=3) for _ in range(2))
    assert_identical(list(one), list(other))
