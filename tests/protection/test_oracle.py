"""The oracle of `syngap.protect` agrees with itself, with autograd and with torch's optimizers."""

import protect_oracle as oracle
import pytest
import torch
from protect_cases import BASES, CASES, Case, SeededNormal, random_gradients, traced
from protect_oracle import Gate, Rank, build_gate, protected_steps
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

pytestmark = pytest.mark.xdist_group("oracle")  # whose traces are taken once
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
MLP = CASES[0]

every_base = pytest.mark.parametrize("base", BASES)


def gate_of(case: Case, rank: Rank = "full") -> Gate:
    return build_gate(*traced(case), rank=rank)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@every_case
def test_rows_of_all_uses_make_the_gradient_of_autograd(case: Case) -> None:
    task, first, _ = traced(case)
    for trace in (trace for batch in first for trace in batch):
        for product in task.products:
            matrices = oracle.as_matrices(product, trace.gradients[product.name])
            for index, gradient in enumerate(matrices):
                total = torch.zeros_like(gradient)
                for rows in trace.rows:
                    if rows.name == product.name and rows.index == index:
                        for left, right in zip(rows.left, rows.right, strict=True):
                            total += torch.outer(left, right)
                assert close(total, gradient)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.spelled_out], ids=lambda case: case.name
)
def test_spelled_out_forward_is_the_forward(case: Case) -> None:
    task = case.task()
    assert task.spelled_out is not None
    for batch in task.batches:
        spelled = task.spelled_out(task.model, batch, lambda name, x, output, **_: output)
        assert close(oracle.run_model(task.model, batch), spelled)


@every_case
def test_every_trainable_parameter_takes_part(case: Case) -> None:
    task, _, second = traced(case)
    for name, param in oracle.trainable(task.model).items():
        total = torch.zeros_like(param)
        for trace in (trace for batch in second for trace in batch):
            total += trace.gradients[name].abs()
        assert total.any(), name


@every_case
def test_gradients_of_a_batch_are_sums_of_those_of_samples(case: Case) -> None:
    task, _, second = traced(case)
    SeededNormal.restart()
    _, labels = oracle.draw_labels_twice(task.model, task.batches, seed=0)
    for batch, drawn, traces in zip(task.batches, labels, second, strict=True):
        prediction = oracle.run_model(task.model, batch)
        score, number = oracle.log_probability(
            prediction, drawn, oracle.counted_positions(batch, drawn.shape)
        )
        assert number == sum(trace.predictions for trace in traces)
        params = oracle.trainable(task.model)
        for name, gradient in zip(
            params, torch.autograd.grad(score, list(params.values())), strict=True
        ):
            assert close(sum(trace.gradients[name] for trace in traces), gradient)


@every_case
def test_bases_are_orthonormal(case: Case) -> None:
    for rank in ("full", 2, 0.5):
        for pairs in gate_of(case, rank).bases.values():
            for basis in (basis for pair in pairs for basis in pair):
                assert close(basis.T @ basis, torch.eye(basis.shape[1], dtype=basis.dtype))


@every_case
def test_eigenvalues_are_well_apart(case: Case) -> None:
    """Otherwise eigenvectors, and all that follows, depend on rounding."""
    task, first, _ = traced(case)
    for product in task.products:
        for pair in oracle.second_moments(task, product, first):
            for side, moment in enumerate(pair):
                if side != product.one_hot_side:
                    values = torch.linalg.eigvalsh(moment)
                    gap = ((values[1:] - values[:-1]) / values[-1]).min()
                    assert gap > 1e-4, (product.name, side, float(gap))


@every_case
def test_coefficients_are_those_of_the_kronecker_product(case: Case) -> None:
    task, _, second = traced(case)
    gate = gate_of(case, 2)
    trace = second[0][0]
    for product in task.products:
        matrices = oracle.as_matrices(product, trace.gradients[product.name])
        for gradient, (left, right) in zip(matrices, gate.bases[product.name], strict=True):
            expected = oracle.kronecker_coefficients(left, gradient, right)
            assert close(left.T @ gradient @ right, expected)


@every_case
def test_mean_importance_does_not_depend_on_the_basis(case: Case) -> None:
    """mu is the mean of F over all entries, in the full basis and in plain entries."""
    task, _, _ = traced(case)
    gates = [gate_of(case, rank) for rank in ("full", 1.0, 2)]
    assert gates[0].mean == gates[1].mean == gates[2].mean
    size = sum(param.numel() for param in oracle.trainable(task.model).values())
    for gate in gates[:2]:  # complete bases: no coefficient is left out
        total = sum(float(f.sum()) for values in gate.importance.values() for f in values)
        assert total / size == pytest.approx(gate.mean, rel=1e-12)


def test_importance_is_the_brute_force_double_loop() -> None:
    _, _, second = traced(MLP)
    gate = gate_of(MLP)
    ((left, right),) = gate.bases["first.weight"]
    (importance,) = gate.importance["first.weight"]
    traces = [trace for batch in second for trace in batch]
    for a in range(left.shape[1]):
        for b in range(right.shape[1]):
            total = 0.0
            for trace in traces:
                (rows,) = [rows for rows in trace.rows if rows.name == "first.weight"]
                score = 0.0
                for i in range(left.shape[0]):
                    for j in range(right.shape[0]):
                        entry = rows.left[0, i] * rows.right[0, j]
                        score += float(left[i, a] * entry * right[j, b])
                total += score**2
            assert total / len(traces) == pytest.approx(float(importance[a, b]), rel=1e-10)


def test_padding_counts_for_nothing() -> None:
    case = next(case for case in CASES if case.name == "gpt_padded")
    task, first, _ = traced(case)
    real = sum(int(batch["attention_mask"].sum()) for batch in task.batches)
    assert gate_of(case).predictions == real
    for batch, traces in zip(task.batches, first, strict=True):
        for sample, trace in enumerate(traces):
            for rows in trace.rows:
                assert rows.counted.tolist() == batch["attention_mask"][sample].bool().tolist()


@every_base
@every_case
def test_open_mask_is_the_base_optimizer(case: Case, base: str) -> None:
    optimizer_of = BASES[base]
    task = case.task()
    gate = gate_of(case)
    gate.mask = {name: [torch.ones_like(m) for m in ms] for name, ms in gate.mask.items()}
    gradients = random_gradients(task.model)
    start = {name: param.detach().clone() for name, param in task.model.named_parameters()}
    steps = protected_steps(gate, start, gradients, optimizer_of.rule, rotate=False)
    optimizer = optimizer_of.kind(task.model.parameters(), **optimizer_of.options)
    for step in gradients:
        for name, param in task.model.named_parameters():
            param.grad = step[name].clone() if param.requires_grad else None
        optimizer.step()
    for name, param in task.model.named_parameters():
        assert close(param.detach(), steps[name]), name


def test_rotated_and_filtered_sgd_are_the_same() -> None:
    """SGD does not depend on coordinates, so both forms scale the same coefficients."""
    for case in CASES:
        task, gate = case.task(), gate_of(case)
        weights = dict(task.model.named_parameters())
        gradients = random_gradients(task.model)
        rule = oracle.sgd(0.1, momentum=0.9, weight_decay=0.1)
        filtered = protected_steps(gate, weights, gradients, rule, rotate=False)
        rotated = protected_steps(gate, weights, gradients, rule, rotate=True)
        for name, weight in filtered.items():
            assert close(weight, rotated[name], 1e-10), (case.name, name)


def test_rotated_adam_does_not_depend_on_signs_of_eigenvectors() -> None:
    task, gate = MLP.task(), gate_of(MLP)
    weights, gradients = dict(task.model.named_parameters()), random_gradients(task.model)
    rule = oracle.adam(0.01, weight_decay=0.1)
    expected = protected_steps(gate, weights, gradients, rule, rotate=True)
    for pairs in gate.bases.values():
        pairs[:] = [(-left, right * torch.tensor(-1.0)) for left, right in pairs]
        pairs[0][0][:, 0] *= -1
    found = protected_steps(gate, weights, gradients, rule, rotate=True)
    for name, weight in expected.items():
        assert close(weight, found[name])


def test_frozen_layer_stays() -> None:
    case = next(case for case in CASES if case.name == "mlp_frozen_layer")
    task, gate = case.task(), gate_of(case)
    assert "second.weight" not in gate.mask
    weights = dict(task.model.named_parameters())
    found = protected_steps(
        gate, weights, random_gradients(task.model), oracle.sgd(0.1), rotate=False
    )
    assert torch.equal(found["second.weight"], weights["second.weight"])
    assert not torch.equal(found["first.weight"], weights["first.weight"])


def test_mask_at_the_mean_and_at_zero() -> None:
    mask = oracle.plasticity_mask(torch.tensor([0.0, 3.0, 1e9], dtype=torch.float64), 3.0)
    assert mask.tolist() == pytest.approx([1.01, 1 - 0.999 + 0.01, 0.01], rel=1e-9)


def test_teacher_is_the_divergence_of_categoricals() -> None:
    before, now = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5).double()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values = kl_divergence(Categorical(logits=before), Categorical(logits=now))
    assert close(oracle.teacher_kl(before, now), values.mean())
    assert close(oracle.teacher_kl(before, now, mask), values[mask].mean())


def test_teacher_of_distributions_is_that_of_torch() -> None:
    a, b = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    pairs = [
        (Normal(a, a.exp()), Normal(b, b.exp())),
        (Bernoulli(logits=a), Bernoulli(logits=b)),
        (Categorical(logits=a), Categorical(logits=b)),
    ]
    for before, now in pairs:
        expected = kl_divergence(before, now).mean()
        assert close(oracle.distribution_kl(before, now), expected)
