"""Every fine-tuning method is what its formula says, in plain loops, and goes on bit for bit."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from finetuned import setting
from torch import Tensor, nn

from syngap.bench import seeds
from syngap.bench.errors import UserError
from syngap.bench.finetuning import methods
from syngap.bench.finetuning.methods import Method
from syngap.bench.finetuning.methods.controls import (
    LargerBatch,
    NoiseAnchors,
    RandomDirections,
    ShuffledImportance,
)
from syngap.bench.finetuning.methods.crispedit import CrispEdit, free_directions
from syngap.bench.finetuning.methods.ewc import EWC
from syngap.bench.finetuning.methods.freeze import Freeze
from syngap.bench.finetuning.methods.gate import Gate
from syngap.bench.finetuning.methods.kl import KL
from syngap.bench.finetuning.methods.kronecker_ewc import KroneckerEWC
from syngap.bench.finetuning.methods.l2_sp import L2SP
from syngap.bench.finetuning.methods.mofo import MomentumFiltered
from syngap.bench.finetuning.methods.own_samples import OwnSamples
from syngap.bench.finetuning.methods.protect import Protect
from syngap.bench.finetuning.methods.replay import Replay
from syngap.bench.finetuning.methods.sgd import SGD
from syngap.bench.finetuning.methods.teacher import Teacher
from syngap.bench.finetuning.setting import Batch
from syngap.bench.training.checkpoint import pack, unpack
from syngap.optim.scores import sample_labels

NEED_PEFT = ("lora", "osf", "corda")
FEW = {  # rows a step, so that it matters which they are
    **{name: {"anchors": 1} for name in ("kl", "teacher", "protect")},
    "own_samples": {"samples": 1},
}
HERE = [name for name in methods.registry.names() if name not in NEED_PEFT]


def windows(step: int = 0) -> Batch:
    return setting().batch(2, f"batch {step}")


def moved(method: Method) -> Method:
    """Move the weights away from the start, so that a distance to it is not zero."""
    order = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in method.model.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=order))
    return method


def added(method: Method) -> float:
    """What a method adds to the loss of the new text."""
    method.model.eval()
    plain = method.setting.loss(method.model, windows())
    return float((method.loss(windows()) - plain).detach())


def values(method: Method) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in method.model.named_parameters()}


def logs(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens).double().log_softmax(-1)


# All ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HERE)
def test_every_method_learns_and_goes_on_bit_for_bit(name: str) -> None:
    kind = partial(methods.registry.get(name), **FEW.get(name, {}))
    whole, half = kind(setting()), kind(setting())
    start = values(whole)
    for step in range(2):
        whole.step(windows(step), 0.5)
        half.step(windows(step), 0.5)
    state = unpack(pack(half.state_dict()))
    resumed = kind(setting())
    resumed.load_state_dict(state)
    for step in range(2, 4):
        whole.step(windows(step))
        resumed.step(windows(step))
    ended = values(whole)
    assert any(not torch.equal(ended[name], start[name]) for name in start)
    for key, value in values(resumed).items():
        assert torch.equal(value, ended[key]), key
    assert list(whole.weights()) == [name for name, _ in setting().start.named_parameters()]


@pytest.mark.parametrize("name", HERE)
def test_no_method_changes_the_start(name: str) -> None:
    before = copy.deepcopy(setting().start.state_dict())
    method = methods.registry.get(name)(setting())
    method.step(windows())
    for key, value in setting().start.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("name", NEED_PEFT)
def test_a_method_of_peft_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="pip install peft"):
        methods.registry.get(name).check()


def test_rows_of_a_step_go_through_all_before_one_comes_again() -> None:
    method = methods.registry.get("adamw")(setting())
    rows = torch.arange(6)
    seen = []
    for method.steps in range(3):
        seen += method.next_rows(rows, 2).tolist()
    assert sorted(seen) == list(range(6))


# Optimizers ---------------------------------------------------------------------------------------


def momentum_filtered(
    values: list[float], gradients: list[list[float]], lr: float, count: int
) -> list[float]:
    """Adam of one tensor, entry by entry; only the `count` entries with the largest m move."""
    m, v = [0.0] * len(values), [0.0] * len(values)
    for step, gradient in enumerate(gradients, start=1):
        for place, g in enumerate(gradient):
            m[place] = 0.9 * m[place] + 0.1 * g
            v[place] = 0.999 * v[place] + 0.001 * g * g
        largest = sorted(range(len(m)), key=lambda place: -abs(m[place]))[:count]
        for place in largest:
            corrected = m[place] / (1 - 0.9**step)
            root = math.sqrt(v[place] / (1 - 0.999**step))
            values[place] -= lr * corrected / (root + 1e-8)
    return values


@pytest.mark.parametrize(("share", "count"), [(0.4, 2), (1.0, 5), (0.01, 1)])
def test_mofo_moves_the_entries_with_the_largest_momentum(share: float, count: int) -> None:
    order = torch.Generator().manual_seed(0)
    start = torch.randn(5, generator=order, dtype=torch.float64)
    gradients = [torch.randn(5, generator=order, dtype=torch.float64) for _ in range(4)]
    param = nn.Parameter(start.clone())
    optimizer = MomentumFiltered([param], 0.1, share)
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    told = momentum_filtered(start.tolist(), [each.tolist() for each in gradients], 0.1, count)
    assert param.tolist() == pytest.approx(told, rel=1e-12)


def test_sgd_adds_up_gradients_with_momentum() -> None:
    method = SGD(setting(), lr=0.1, momentum=0.5)
    name, param = next(iter(method.model.named_parameters()))
    told, speed = param.detach().clone(), torch.zeros_like(param)
    for step in range(2):
        grad = torch.autograd.grad(method.loss(windows(step)), param)[0]
        speed = 0.5 * speed + grad
        told = told - 0.1 * speed
        method.step(windows(step))
    torch.testing.assert_close(values(method)[name], told)


def test_freeze_trains_the_last_blocks_and_nothing_else() -> None:
    method = Freeze(setting(), blocks=1)
    start = values(method)
    method.step(windows())
    changed = {
        name for name, value in values(method).items() if not torch.equal(value, start[name])
    }
    assert changed == {name for name in start if name.startswith("blocks.1.")}


# Penalties ----------------------------------------------------------------------------------------


def test_l2_sp_adds_half_the_squared_distance() -> None:
    method = moved(L2SP(setting(), strength=3.0))
    told = 0.0
    for param, start in zip(method.model.parameters(), setting().start.parameters(), strict=True):
        for now, then in zip(param.flatten().tolist(), start.flatten().tolist(), strict=True):
            told += 3.0 / 2 * (now - then) ** 2
    assert added(method) == pytest.approx(told, rel=1e-4)


def fisher_oracle(of: Any) -> list[Tensor]:
    """Squares of the gradient of each sample's log p, token by token, over all predictions."""
    model = copy.deepcopy(of.start).eval()
    params = list(model.parameters())
    total = [torch.zeros_like(param) for param in params]
    order = seeds.generator(of.seed, "labels")
    for tokens in of.anchors:
        found = model(tokens[None]).log_softmax(-1)
        labels = sample_labels(found.detach(), order)
        sums = [torch.zeros_like(param) for param in params]
        for place, label in enumerate(labels[0].tolist()):
            grads = torch.autograd.grad(found[0, place, label], params, retain_graph=True)
            for each, grad in zip(sums, grads, strict=True):
                each += grad
        for each, one in zip(total, sums, strict=True):
            each += one * one
    return [each / of.anchors.numel() for each in total]


def test_ewc_weighs_the_squared_distance_by_the_fisher_information() -> None:
    of = setting()
    method = moved(EWC(of, strength=50.0))
    told = 0.0
    fishers = fisher_oracle(of)
    for param, start, fisher, own in zip(
        method.model.parameters(), of.start.parameters(), fishers, method.fisher, strict=True
    ):
        torch.testing.assert_close(own, fisher, rtol=1e-3, atol=1e-8)
        told += float(50.0 / 2 * (fisher * (param - start).detach() ** 2).sum())
    assert added(method) == pytest.approx(told, rel=1e-3)


def test_kronecker_ewc_weighs_the_squared_distance_along_directions() -> None:
    method = moved(KroneckerEWC(setting(), strength=50.0))
    told, with_basis = 0.0, 0
    starts = dict(setting().start.named_parameters())
    for name, param in method.model.named_parameters():
        known, distance = method.known[param], (param - starts[name]).detach()
        if known.basis is None:
            told += float((known.importance * distance**2).sum())
            continue
        with_basis += 1
        left, right = known.basis.left, known.basis.right
        left = torch.eye(len(distance)) if left is None else left
        right = torch.eye(distance.shape[1]) if right is None else right
        for i in range(left.shape[1]):
            for j in range(right.shape[1]):
                along = float(left[:, i] @ distance @ right[:, j])
                told += float(known.importance[i, j]) * along**2
    assert with_basis > 8
    assert added(method) == pytest.approx(50.0 / 2 * told, rel=1e-3)


def test_crispedit_leaves_the_gradient_no_part_along_masked_directions() -> None:
    method = CrispEdit(setting(), energy=0.5)
    method.loss(windows()).backward()  # type: ignore[no-untyped-call]
    param = method.model.get_parameter("blocks.0.up.weight")
    basis, free = method.directions[param]
    assert param.grad is not None
    assert basis.left is not None
    assert basis.right is not None
    before, told = param.grad.clone(), torch.zeros_like(param)
    for i in range(basis.left.shape[1]):
        for j in range(basis.right.shape[1]):
            if free[i, j]:
                part = basis.left[:, i] @ before @ basis.right[:, j]
                told += part * torch.outer(basis.left[:, i], basis.right[:, j])
    method.change_gradients()
    torch.testing.assert_close(param.grad, told, rtol=1e-4, atol=1e-6)
    assert 0 < int((free == 0).sum()) < free.numel() // 2
    assert method.model.get_parameter("norm.weight").grad is None  # matrices alone learn


@pytest.mark.parametrize(
    ("energy", "masked"), [(0.0, set()), (0.5, {1}), (0.6, {1}), (0.61, {1, 2}), (1.0, {0, 1, 2})]
)
def test_crispedit_masks_the_fewest_directions_with_the_energy(
    energy: float, masked: set[int]
) -> None:
    free = free_directions(torch.tensor([1.0, 6.0, 3.0]), energy)
    assert {place for place, value in enumerate(free.tolist()) if value == 0} == masked


# Anchors, samples, old text -----------------------------------------------------------------------


def kl_oracle(method: Method, tokens: Tensor) -> float:
    before, now = logs(setting().start, tokens), logs(method.model, tokens)
    total = 0.0
    for one, other in zip(before.flatten(0, 1).tolist(), now.flatten(0, 1).tolist(), strict=True):
        total += sum(math.exp(p) * (p - q) for p, q in zip(one, other, strict=True))
    return total / tokens.numel()


@pytest.mark.parametrize("make", [KL, Teacher])
def test_kl_and_teacher_add_the_divergence_from_the_start(make: Callable[..., Method]) -> None:
    method = moved(make(setting(), strength=2.0, anchors=4))  # all of them, so in any order
    told = 2.0 * kl_oracle(method, setting().anchors)
    assert told > 0.01
    assert added(method) == pytest.approx(told, rel=1e-3)


def test_protect_has_the_teacher_and_the_gate() -> None:
    method = moved(Protect(setting(), strength=2.0, anchors=4))
    assert added(method) == pytest.approx(2.0 * kl_oracle(method, setting().anchors), rel=1e-3)
    assert method.protection.known


def test_the_gate_alone_adds_no_loss_and_the_teacher_alone_has_no_gate() -> None:
    gate, teacher = moved(Gate(setting())), Teacher(setting())
    assert added(gate) == 0.0
    assert gate.protection.known
    assert type(gate.optimizer) is not torch.optim.AdamW
    assert type(teacher.optimizer) is torch.optim.AdamW


def test_own_samples_adds_their_loss() -> None:
    of = setting()
    method = moved(OwnSamples(of, strength=0.5, samples=4))
    found = logs(method.model, of.own[:, :-1])
    told = [
        -float(found[row, place, of.own[row, place + 1]])
        for row in range(len(of.own))
        for place in range(of.own.shape[1] - 1)
    ]
    assert added(method) == pytest.approx(0.5 * sum(told) / len(told), rel=1e-3)


def is_part(window: Tensor, text: Tensor) -> bool:
    return bytes(window[1:].tolist()) in bytes(text.tolist())


def test_replay_replaces_windows_by_old_text_with_the_probability() -> None:
    of = setting()
    none, every, half = (Replay(of, share=share) for share in (0.0, 1.0, 0.5))
    (few,) = windows()
    assert torch.equal(none.mixed((few,))[0], few)
    assert all(is_part(window, of.old) for window in every.mixed((few,))[0])
    many = few.repeat(200, 1)
    (mixed,) = half.mixed((many,))
    kept = (mixed == many).all(1)
    assert 150 < int(kept.sum()) < 250
    assert all(is_part(window, of.old) for window in mixed[~kept])
    (whole,) = every.mixed((many,))
    half.steps = every.steps = 1
    assert not torch.equal((half.mixed((many,))[0] == many).all(1), kept)
    assert not torch.equal(every.mixed((many,))[0], whole)


def test_a_control_changes_one_part_of_protect_and_nothing_else() -> None:
    plain = Protect(setting(), rank="full")
    shuffled = ShuffledImportance(setting(), rank="full")
    random = RandomDirections(setting(), rank="full")
    known = (method.protection.known.values() for method in (plain, shuffled, random))
    for own, mixed, other in zip(*known, strict=True):
        assert torch.equal(mixed.importance.flatten().sort()[0], own.importance.flatten().sort()[0])
        assert own.importance.numel() < 9 or not torch.equal(mixed.importance, own.importance)
        assert (mixed.basis is None) == (other.basis is None) == (own.basis is None)
        # The same labels are drawn, and rotations keep the sum of squares.
        torch.testing.assert_close(other.importance.sum(), own.importance.sum())
        if own.basis is None:
            continue
        for ours, theirs in (
            (own.basis.left, other.basis.left),
            (own.basis.right, other.basis.right),
        ):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(theirs.mT @ theirs, torch.eye(len(theirs.mT)))
                assert not torch.allclose(ours, theirs, atol=0.1)


def test_noise_has_the_numbers_of_the_anchors() -> None:
    noise, anchors = NoiseAnchors(setting()).known, setting().anchors
    assert noise.shape == anchors.shape
    assert torch.equal(noise.flatten().sort()[0], anchors.flatten().sort()[0])
    assert not torch.equal(noise, anchors)


def test_a_larger_batch_has_other_new_samples_as_well() -> None:
    of = setting()
    method = LargerBatch(of, extra=5)
    few, more = of.batch(3, "few"), of.batch(5, "extra 0")
    expected = (3 * of.loss(of.start, few) + 5 * of.loss(of.start, more)) / 8
    torch.testing.assert_close(method.loss(few), expected)


def test_some_of_the_anchors_may_be_known() -> None:
    assert torch.equal(Protect(setting(), samples=3).known, setting().anchors[:3])


def test_own_samples_may_begin_with_a_prompt() -> None:
    prompted, plain = setting(source="own", prompt="ab"), setting(source="own")
    assert prompted.own[:, :2].tolist() == [list(b"ab")] * len(prompted.own)
    assert prompted.own.shape == plain.own.shape
    assert not torch.equal(prompted.own, plain.own)


def test_anchors_are_own_samples_or_old_text() -> None:
    own, text = setting(source="own"), setting(source="text")
    assert torch.equal(own.anchors, own.own)
    assert all(is_part(window, text.old) for window in text.anchors)
    assert own.anchors.shape == text.anchors.shape
