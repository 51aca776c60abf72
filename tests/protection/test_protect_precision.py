"""`syngap.protect` in float32 and bfloat16 is its oracle in float64, up to rounding.

The oracle starts from the same rounded weights and inputs, and takes the labels that were drawn.
Tolerances are a few roundings of the weights' type, relative to the largest number. Where
eigenvalues are close, rounding decides which eigenvectors come out. So bases are compared by what
makes them one, that they are orthonormal and diagonalise the oracle's moments; importance, mask and
steps are compared in that basis.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import protect_oracle as oracle
import pytest
import torch
from protect_cases import CASES, GROUPED, Case, SeededNormal, random_gradients
from protect_oracle import Gate, Rank, Rule, Task, Trace
from torch import Tensor, nn
from torch.nn import functional

import syngap
from syngap.optim import scores

pytestmark = pytest.mark.filterwarnings("ignore:the weights are bfloat16")
DTYPES = (torch.float32, torch.bfloat16)
ROUNDINGS = 16  # an importance of half precision is the square of a product of a few
ROUNDED = ("mlp", "gpt", "gpt_tied", "gpt_padding_idx")
HAS_GROUPS = hasattr(functional, "grouped_mm")  # not in older versions of torch
PRECISIONS = [
    *((case, torch.float32) for case in (*CASES, *([GROUPED] if HAS_GROUPS else []))),
    *((case, torch.bfloat16) for case in CASES if case.name in ROUNDED),
]
every_precision = pytest.mark.parametrize(
    ("case", "dtype"), PRECISIONS, ids=[f"{case.name}-{dtype}" for case, dtype in PRECISIONS]
)
STEPS: list[tuple[Rank, bool, Any, Rule]] = [
    (2, False, lambda params: torch.optim.SGD(params, lr=0.5), oracle.sgd(0.5)),
    ("full", False, lambda params: torch.optim.SGD(params, lr=0.5), oracle.sgd(0.5)),
    ("full", True, lambda params: torch.optim.Adam(params, lr=0.5), oracle.adam(0.5)),
]


def tolerance(dtype: torch.dtype) -> float:
    return ROUNDINGS * torch.finfo(dtype).eps


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest number."""
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def rounded(known: Any, dtype: torch.dtype) -> Any:
    if isinstance(known, list):
        return known  # of tokens
    return known.to(dtype) if known.is_floating_point() else known


@dataclass
class Protected:
    """A model of low precision with its protection, and the oracle's traces of the same."""

    model: nn.Module
    protection: Any
    task: Task
    traces: list[list[list[Trace]]]  # for the moments, and for the importance

    def bases(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return the bases that were found, in float64."""
        found = {}
        for product in self.task.products:
            param = self.model.get_parameter(product.name)
            basis = self.protection.known[param].basis
            assert basis is not None, product.name
            matrices = oracle.as_matrices(product, param)
            sides = []
            for side, rows in enumerate(oracle.matrix_shape(product, param)):
                directions = (basis.left, basis.right)[side]
                if directions is None:
                    directions = torch.eye(rows).expand(len(matrices), rows, rows)
                sides.append(directions.double().reshape(len(matrices), rows, -1))
            found[product.name] = list(zip(*sides, strict=True))
        return found

    def gate(self) -> Gate:
        """Return the oracle's gate in the bases that were found."""
        return oracle.build_gate(self.task, *self.traces, given=self.bases())


def protect(
    case: Case,
    dtype: torch.dtype,
    rank: Rank,
    rotate: bool,
    patch: pytest.MonkeyPatch,
    traces: list[list[list[Trace]]] | None = None,
) -> Protected:
    """Protect a new model of the case; traces of an earlier one have the same labels."""
    model, known = case.make()
    model, known = model.to(dtype), rounded(known, dtype)
    drawn: list[Tensor] = []

    def noted(draw: Any) -> Any:
        def draw_and_note(*args: Any) -> Tensor:
            drawn.append(draw(*args))
            return drawn[-1]

        return draw_and_note

    with patch.context() as patched:
        patched.setattr(scores, "sample_labels", noted(scores.sample_labels))
        patched.setattr(SeededNormal, "sample", noted(SeededNormal.sample))
        SeededNormal.restart()
        protection = syngap.protect(
            model, known, rank=rank, rotate=rotate, batch_size=case.batch_size, teacher=False
        )
    wide = rounded(known, torch.float64)
    batches = wide if isinstance(wide, list) else oracle.cut(wide, case.batch_size)
    task = Task(
        copy.deepcopy(model).double(), batches, case.products, case.biases, case.spelled_out
    )
    labels = [each.double() if each.is_floating_point() else each for each in drawn]
    passes = labels[: len(batches)], labels[len(batches) :]
    traces = traces or [oracle.trace_batches(task, each) for each in passes]
    return Protected(model, protection, task, traces)


def departures(one: Protected) -> Iterator[tuple[str, float]]:
    """Yield how far directions are from eigenvectors.

    They diagonalise the moments, have the largest eigenvalues, and are orthonormal.
    """
    bases = one.bases()
    for product in one.task.products:
        moments = oracle.second_moments(one.task, product, one.traces[0])
        for pair, sides in zip(bases[product.name], moments, strict=True):
            for basis, moment in zip(pair, sides, strict=True):
                rows, count = basis.shape
                if torch.equal(basis, torch.eye(rows).double()):
                    continue
                seen = basis.T @ moment @ basis
                values = torch.linalg.eigvalsh(moment).flip(0)
                yield product.name, error(seen, seen.diagonal().diag())
                yield product.name, float((values[:count].sum() - seen.trace()) / values.sum())
                one_each = torch.eye(count, dtype=torch.float64)
                yield product.name, error(basis.T @ basis, one_each)


def after_steps(
    one: Protected, gate: Gate, make: Any, rule: Rule, rotate: bool
) -> dict[str, float]:
    """Return how far weights are from the oracle's after two steps, which are taken back."""
    start = {name: param.detach().clone() for name, param in one.model.named_parameters()}
    gradients = random_gradients(one.model, steps=2)
    optimizer = one.protection.optimizer(make(one.model.parameters()))
    for step in gradients:
        for name, param in one.model.named_parameters():
            param.grad = step[name].clone() if param.requires_grad else None
        optimizer.step()
    wide = [{name: value.double() for name, value in step.items()} for step in gradients]
    before = {name: value.double() for name, value in start.items()}
    expected = oracle.protected_steps(gate, before, wide, rule, rotate=rotate)
    errors = {}
    for name, param in one.model.named_parameters():
        errors[name] = 0.0
        if param.requires_grad:
            # Rounding of a weight is relative to it, and not to its update.
            errors[name] = error(param.detach(), expected[name])
        with torch.no_grad():
            param.copy_(start[name])
    return errors


@every_precision
def test_rounding_alone_is_between_it_and_the_oracle(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces, most = None, tolerance(dtype)
    for rank, rotate, make, rule in STEPS:
        one = protect(case, dtype, rank, rotate, monkeypatch, traces)
        traces = one.traces
        for name, found in departures(one):
            assert found <= most, f"basis of {name}"
        gate = one.gate()
        for name, values in gate.importance.items():
            known = one.protection.known[one.model.get_parameter(name)]
            flat = torch.cat([each.reshape(-1) for each in values])
            assert error(known.importance.reshape(-1), flat) <= most, f"importance of {name}"
        for name, found in after_steps(one, gate, make, rule, rotate).items():
            assert found <= most, f"weights of {name}"


def worst(one: Protected, gate: Gate, dtype: torch.dtype) -> float:
    _, rotate, make, rule = STEPS[1]
    return max(after_steps(one, gate, make, rule, rotate).values()) / tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_mask_or_basis_is_more_than_rounding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = protect(CASES[0], dtype, "full", False, monkeypatch)
    gate = one.gate()
    assert worst(one, gate, dtype) <= 1
    masks = gate.mask
    for change in (torch.ones_like, lambda mask: mask.flip(0), lambda mask: mask.square()):
        gate.mask = {name: [change(each) for each in values] for name, values in masks.items()}
        assert worst(one, gate, dtype) > 1
    gate.mask = masks
    gate.bases = {
        name: [(left.flip(0), right) for left, right in pairs] for name, pairs in gate.bases.items()
    }
    assert worst(one, gate, dtype) > 1
