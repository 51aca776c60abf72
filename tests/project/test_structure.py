"""The optimizer is built by composition, from short files, with every default in one place."""

from __future__ import annotations

import ast
import copy
import gc
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import files_per_step
import pytest
import torch
from helpers import (
    MAKERS,
    assert_identical,
    has_forward_hooks,
    itself,
    network,
    train,
    values_of,
    wrapped,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import syngap
from syngap import SynGAP
from syngap.bench.store import layout
from syngap.optim import DEFAULTS, GatedOptimizer, gate_changes
from syngap.optim.basis import Basis
from syngap.optim.knowledge import Knowledge, Known
from syngap.optim.wrapped import WrappedSynGAP

PACKAGE = Path(syngap.__file__).parent
OPTIM = sorted((PACKAGE / "optim").glob("*.py"))
MOST_FILES = 8
# The same thing in two packages: an optimizer and its method, errors, the gate and its figure, the
# model's former self as a teacher, what streams and fine-tuning both have.
CORRESPONDING = {
    "__init__.py",
    "ballistic.py",
    "errors.py",
    "gate.py",
    "loop.py",
    "method.py",
    "plasticity.py",
    "sgd.py",
    "syngap.py",
    "teacher.py",
}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=path.relative_to(PACKAGE).as_posix()) for path in paths]


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SynGAP, importance refreshed", "ER"])
def test_a_step_runs_through_few_files(name: str) -> None:
    files = sorted(files_per_step.functions_by_file(name))
    assert len(files) <= MOST_FILES, files


def test_no_two_modules_of_the_package_share_a_name_unless_they_correspond() -> None:
    count = Counter(path.name for path in PACKAGE.rglob("*.py"))
    assert {name for name, times in count.items() if times > 1} == CORRESPONDING


def test_no_module_of_the_package_is_longer_than_400_lines() -> None:
    lengths = {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    assert lengths["optim/syngap.py"] <= 250
    assert lengths["optim/reference.py"] <= 80


def imports_in_functions(tree: ast.Module) -> Iterator[str]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    yield str(node.module)


@pytest.mark.parametrize("path", named(OPTIM))
def test_modules_of_the_optimizer_import_each_other_at_the_top(path: Path) -> None:
    assert not [name for name in imports_in_functions(parsed(path)) if name.startswith("syngap")]


@pytest.mark.parametrize("path", named(sorted((PACKAGE / "integrations").glob("*.py"))))
def test_integrations_use_public_names_alone(path: Path) -> None:
    private = [
        ast.unparse(node)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "super()")
    ]
    modules = [
        str(node.module) for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)
    ]
    assert not private
    assert not [name for name in modules if name.startswith("syngap.optim.")]


# Defaults -----------------------------------------------------------------------------------------


def default_values(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Every name of a signature or of a class that has a number for a default."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.FunctionDef):
            plain = [*node.args.posonlyargs, *node.args.args]
            last = plain[len(plain) - len(node.args.defaults) :]
            pairs += zip((arg.arg for arg in last), node.args.defaults, strict=True)
            keyed = (arg.arg for arg in node.args.kwonlyargs)
            pairs += zip(keyed, node.args.kw_defaults, strict=True)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs.append((node.target.id, node.value))
        for name, value in pairs:
            if isinstance(value, ast.Constant):
                yield name, value.value


def test_the_gates_defaults_stand_in_one_place() -> None:
    numbers = set(asdict(DEFAULTS).items())
    places = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if numbers & set(default_values(parsed(path)))
    ]
    assert places == ["optim/defaults.py"]


# Composition --------------------------------------------------------------------------------------


def test_syngap_and_the_wrapper_hold_a_gate_and_neither_is_the_other() -> None:
    assert not issubclass(WrappedSynGAP, SynGAP)
    assert not issubclass(SynGAP, WrappedSynGAP)
    own, other = itself()(network()), wrapped(AdamW, lr=0.01)(network())
    assert isinstance(own, GatedOptimizer)
    assert isinstance(other, GatedOptimizer)
    assert own.gate is not other.gate
    assert own.gate is own.gate
    for copier in (copy.copy, copy.deepcopy):
        assert copier(own).gate is not own.gate


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_goes_with_its_last_reference(name: str) -> None:
    model = network()
    optimizer = MAKERS[name](model)
    train(model, optimizer, range(2))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None  # at once, or two optimizers are in memory for a while
    finally:
        gc.enable()
    assert not has_forward_hooks(model)


def reversed_rows(param: Tensor) -> Basis | None:
    """The rows of a weight from the last to the first: other coordinates, the same rule."""
    return Basis(torch.eye(len(param)).flip(0), None) if param.dim() == 2 else None


BASES = {
    "itself": itself(momentum=0.9),
    "foreach": itself(foreach=True),
    "wrapped-sgd": wrapped(SGD, lr=0.1),
    "wrapped-adamw": wrapped(AdamW, lr=0.01),
    "wrapped-foreach": wrapped(AdamW, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("name", BASES)
def test_importance_and_mask_are_in_the_coordinates_of_the_basis(name: str) -> None:
    ended = []
    for has_basis in (False, True):
        model = network()
        optimizer = BASES[name](model)
        gate_changes.adopt(
            optimizer.gate,
            Knowledge(
                {
                    param: Known(
                        torch.zeros_like(param),
                        torch.zeros(()),
                        reversed_rows(param) if has_basis else None,
                    )
                    for param in model.parameters()
                }
            ),
        )
        train(model, optimizer, range(5))
        ended.append((values_of(model), optimizer.importance()))
    (plain, entries), (same, rows) = ended
    for key, value in plain.items():
        torch.testing.assert_close(same[key], value, rtol=1e-6, atol=1e-7)
    for mine, its in zip(entries, rows, strict=True):
        turned = its.flip(0) if its.dim() == 2 else its
        torch.testing.assert_close(turned, mine, rtol=1e-6, atol=0.0)
        assert its.dim() == 1 or not torch.equal(its, mine)


# A framework that replaces parameters itself ------------------------------------------------------

STATEFUL = {"itself": itself(momentum=0.9), "wrapped": wrapped(AdamW, lr=0.01)}


def grow_head(model: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    """Give the head two more classes; returns pairs of old and new parameters."""
    old, new = model[2], nn.Linear(6, 5)
    with torch.no_grad():
        for theirs, ours in zip(old.parameters(), new.parameters(), strict=True):
            ours[:3] = theirs
    model[2] = new
    return list(zip(old.parameters(), new.parameters(), strict=True))


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("name", STATEFUL)
def test_what_a_snapshot_knew_goes_to_the_parameters_that_replaced_others(
    name: str, momentum: bool
) -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = STATEFUL[name](model)
    train(model, optimizer, range(3))
    grown = STATEFUL[name](network())
    grown.load_state_dict(optimizer.state_dict())
    snapshot = optimizer.snapshot()
    kept = list(model[0].parameters())
    replaced = grow_head(model)
    for states in optimizer.snapshot():
        states.clear()  # a snapshot is the caller's own
    optimizer.state.clear()  # as a framework may, which knows nothing of importance
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.inherit(snapshot, [*zip(kept, kept, strict=True), *replaced], momentum=momentum)

    head = list(grown.param_groups[0]["params"][2:])
    for old, (_, new) in zip(head, replaced, strict=True):
        grown.grow(old, nn.Parameter(new.detach().clone()))
    assert_identical(optimizer.importance(), grown.importance())
    keys = {key for state in optimizer.state_dict()["state"].values() for key in state}
    whole = {key for state in grown.state_dict()["state"].values() for key in state}
    assert keys == (whole if momentum else {"importance", "mean"})


def test_nothing_outside_the_store_knows_the_files_of_a_run() -> None:
    names = {value for name, value in vars(layout).items() if name.isupper()}
    outside = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "store"]
    known = {
        (path.relative_to(PACKAGE).as_posix(), node.value)
        for path in outside
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert known == set()


# Messages -----------------------------------------------------------------------------------------

VERBS = r"(?:brings|changes|does|forgets|gives|goes|has|holds|learns|takes|was|writes)"
UNITS = {"bytes", "points"}
NO_COUNTS = {"kind", "name", "saved_sizes", "' or '.join(map(str, counts))"}


def counts_before_plurals(tree: ast.AST) -> Iterator[str]:
    """What f-strings put before a plural. With a format it is a measurement, in capitals fixed."""
    for text in ast.walk(tree):
        for value, after in pairwise(text.values if isinstance(text, ast.JoinedStr) else []):
            if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            noun = re.match(rf" (?!{VERBS}\b)(?:more )?([a-z]{{2,}}s)\b", str(after.value))
            what = ast.unparse(value.value)
            is_fixed = re.search(r"[a-z]", what) is None or value.format_spec is not None
            if noun and noun[1] not in UNITS and what not in NO_COUNTS and not is_fixed:
                yield f"{{{what}}}{noun[0]}"


def test_no_message_says_1_rows() -> None:
    """`count_of` writes every count together with its noun."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), said)
        for path in PACKAGE.rglob("*.py")
        for said in counts_before_plurals(parsed(path))
    }
    assert found == set()


def test_a_message_that_says_1_rows_would_be_noticed() -> None:
    code = "f'{n} rows, {len(x) - 1} more files, {n:.1f} nats, {MOST} rows, {path} has {n} in all'"
    assert list(counts_before_plurals(ast.parse(code))) == ["{n} rows", "{len(x) - 1} more files"]
