"""`syngap.protect` computes what its oracle computes: 1e-10 in float64.

Labels are drawn as specified: one call of `sample_labels` a batch from a generator of its own with
`seed`, first over all batches for the moments and then over all batches for the importance.
"""

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import protect_oracle as oracle
import pytest
import torch
from helpers import assert_identical
from protect_cases import BASES, CASES, Case, SeededNormal, random_gradients, traced
from protect_oracle import Gate, Rank, build_gate, protected_steps
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal, kl_divergence

import syngap
from syngap.optim import basis, gate, knowledge
from syngap.optim.basis import Basis, Stack
from syngap.protection import Protection, answers
from syngap.protection.anchors import mask_of
from syngap.protection.answers import divergence, take_answers

pytestmark = pytest.mark.xdist_group("oracle")  # whose gates are built once
TOLERANCE = 1e-10

# Rotated form: complete bases only.
FORMS: list[tuple[Rank, bool]] = [
    ("full", False),
    ("full", True),
    (1.0, True),
    (2, False),
    (0.5, False),
]

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
# Every form with AdamW, and every other base optimizer with complete bases and with few directions.
OTHERS: list[tuple[Rank, bool]] = [("full", False), ("full", True), (2, False)]
STEPS = [("adamw", rank, rotate) for rank, rotate in FORMS] + [
    (base, rank, rotate) for base in BASES if base != "adamw" for rank, rotate in OTHERS
]
every_step = pytest.mark.parametrize(
    ("base", "rank", "rotate"),
    STEPS,
    ids=[f"{base}-{rank}-{'rotated' if rotate else 'filtered'}" for base, rank, rotate in STEPS],
)
MLP = CASES[0]
PADDED = next(case for case in CASES if case.name == "gpt_padded")


@cache
def gate_of(case: Case, rank: Rank, seed: int = 0) -> Gate:
    return build_gate(*traced(case, seed), rank=rank)


def protect(case: Case, **options: Any) -> tuple[nn.Module, Any]:
    """Return a new model of the case and its protection."""
    model, known = case.make()
    SeededNormal.restart()
    options = {"batch_size": case.batch_size, "teacher": False, **options}
    return model, syngap.protect(model, known, **options)


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[dict[str, Tensor]]
) -> None:
    for step in gradients:
        for name, param in model.named_parameters():
            param.grad = step[name].clone() if param.requires_grad else None
        optimizer.step()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Compare, with an absolute tolerance relative to the largest entry."""
    scale = max(1e-12, float(expected.abs().max()))
    error = float((found - expected).abs().max()) / scale
    assert error <= TOLERANCE, f"{what}: relative error {error:.1e}"


def importance_by_name(found: Any, model: nn.Module) -> dict[str, list[Tensor]]:
    """Return lists of F by names, from a mapping by names or parameters or a list in their order.

    The specification does not say what `optimizer.importance()` returns: change only this.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    if not isinstance(found, Mapping):
        trained = [name for name, param in model.named_parameters() if param.requires_grad]
        found = dict(zip(trained, found, strict=True))
    by_name = {}
    for key, value in found.items():
        name = key if isinstance(key, str) else names[id(key)]
        if model.get_parameter(name).requires_grad:
            by_name[name] = list(value) if isinstance(value, list | tuple) else [value]
    return by_name


@every_step
@every_case
def test_weights_after_three_steps(case: Case, base: str, rank: Rank, rotate: bool) -> None:
    model, protection = protect(case, rank=rank, rotate=rotate)
    start, gradients = snapshot(model), random_gradients(model)
    formula = BASES[base]
    optimizer = protection.optimizer(formula.kind(model.parameters(), **formula.options))
    take_steps(model, optimizer, gradients)
    expected = protected_steps(gate_of(case, rank), start, gradients, formula.rule, rotate=rotate)
    for name, weight in snapshot(model).items():
        # The updates, which are small against the weights, are what can be wrong.
        assert_close(weight - start[name], expected[name] - start[name], name)


def most_alike(case: Case) -> tuple[torch.Size, int]:
    """Return the shape that most weights of a case have, and how many have it."""
    weights = (param for param in case.make()[0].parameters() if param.dim() > 1)
    return Counter(weight.shape for weight in weights).most_common(1)[0]


EQUAL = [case for case in CASES if most_alike(case)[1] > 1]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("rank", "rotate"), [("full", False), ("full", True), (2, False)])
@pytest.mark.parametrize("case", EQUAL, ids=[case.name for case in EQUAL])
def test_weights_of_equal_shape_together_as_on_a_gpu(
    case: Case, rank: Rank, rotate: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, alike = most_alike(case)
    together = -(-alike // parts)
    sizes: set[int] = set()

    def note(bases: list[Basis | None], weights: list[Tensor]) -> list[Stack]:
        stacks = basis.stack_alike(bases, weights)
        sides = Counter(
            (one.left is None, one.right is None)
            for one, weight in zip(bases, weights, strict=True)
            if one is not None and weight.shape == shape
        )
        found = [len(one.places) for one in stacks if weights[one.places[0]].shape == shape]
        assert max(found) == min(together, max(sides.values()))
        sizes.update(found)
        return stacks

    monkeypatch.setattr(basis, "is_stacked", lambda weight: True)
    monkeypatch.setattr(basis, "TOGETHER", shape.numel() * together)
    monkeypatch.setattr(gate, "stack_alike", note)
    test_weights_after_three_steps(case, "adamw", rank, rotate)
    assert sizes


@pytest.mark.parametrize("rank", ["full", 1.0, 2, 0.5])
@every_case
def test_importance(case: Case, rank: Rank) -> None:
    """Squares do not depend on the signs of eigenvectors."""
    model, protection = protect(case, rank=rank, rotate=False)
    optimizer = protection.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = importance_by_name(optimizer.importance(), model)
    expected = gate_of(case, rank).importance
    assert set(found) == set(expected)
    for name, values in expected.items():
        flat = torch.cat([each.reshape(-1) for each in found[name]])
        assert_close(flat, torch.cat([each.reshape(-1) for each in values]), name)


def test_importance_depends_on_the_seed_as_specified() -> None:
    model, protection = protect(MLP, rank="full", rotate=False, seed=7)
    start, gradients = snapshot(model), random_gradients(model)
    take_steps(model, protection.optimizer(torch.optim.SGD(model.parameters(), 0.1)), gradients)
    gate = gate_of(MLP, "full", 7)
    expected = protected_steps(gate, start, gradients, oracle.sgd(0.1), rotate=False)
    for name, weight in snapshot(model).items():
        assert_close(weight - start[name], expected[name] - start[name], name)


def test_consolidation_and_ambient() -> None:
    options = {"consolidation": 0.9, "ambient": 0.1}
    model, protection = protect(MLP, rank="full", rotate=False, **options)
    start, gradients = snapshot(model), random_gradients(model)
    take_steps(model, protection.optimizer(torch.optim.SGD(model.parameters(), 0.1)), gradients)
    gate = build_gate(*traced(MLP), rank="full", **options)
    expected = protected_steps(gate, start, gradients, oracle.sgd(0.1), rotate=False)
    for name, weight in snapshot(model).items():
        assert_close(weight - start[name], expected[name] - start[name], name)


def test_batches_given_are_batches_cut() -> None:
    """An iterable of tensors, or of tuples of arguments, gives what the tensor gives."""
    reference, protection = protect(MLP, rank="full", rotate=False)
    gradients = random_gradients(reference)
    optimizer = protection.optimizer(torch.optim.SGD(reference.parameters(), 0.1))
    take_steps(reference, optimizer, gradients)
    for wrap in (lambda batch: batch, lambda batch: (batch,)):
        model, known = MLP.make()
        batches = [wrap(batch) for batch in oracle.cut(known, MLP.batch_size)]
        protection = syngap.protect(model, batches, teacher=False, rank="full", rotate=False)
        optimizer = protection.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        take_steps(model, optimizer, gradients)
        for name, weight in snapshot(model).items():
            assert_close(weight, snapshot(reference)[name], name)


@every_case
def test_model_is_untouched_by_protect(case: Case) -> None:
    model, _ = protect(case)
    fresh, _ = case.make()
    assert list(model.state_dict()) == list(fresh.state_dict())
    for name, value in fresh.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert all(param.grad is None for param in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_no_gate_is_the_base_optimizer() -> None:
    model, protection = protect(MLP, gate=False)
    base = torch.optim.SGD(model.parameters(), 0.1)
    assert protection.optimizer(base) is base


def test_interpolate() -> None:
    model, protection = protect(MLP)
    start = snapshot(model)
    shift(model)
    now = snapshot(model)
    protection.interpolate(0.3)
    for name, weight in snapshot(model).items():
        assert_close(weight, start[name] + 0.3 * (now[name] - start[name]), name)


@pytest.mark.parametrize("fails", [False, True])
def test_interpolated_weights_are_there_inside_the_block_alone(fails: bool) -> None:
    model, protection = protect(MLP)
    start = snapshot(model)
    shift(model)
    now, report = snapshot(model), str(protection.report())
    with pytest.raises(KeyError) if fails else nullcontext(), protection.interpolated(0.3):
        for name, weight in snapshot(model).items():
            assert_close(weight, start[name] + 0.3 * (now[name] - start[name]), name)
        assert "interpolation (30% of the way kept)" in str(protection.report())
        if fails:
            raise KeyError
    assert_identical(snapshot(model), now)
    assert str(protection.report()) == report
    with pytest.raises(ValueError, match="share"), protection.interpolated(30):
        raise AssertionError
    assert_identical(snapshot(model), now)


# --- Teacher ----------------------------------------------------------------------------------


def shift(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=generator, dtype=param.dtype))


def compare_teacher(
    model: nn.Module, batch: Any, predict: Any = None, strength: float = 0.7
) -> None:
    """Compare loss and gradients where the only known batch is the anchor of every call."""

    def answer() -> Tensor | Distribution:
        output: Tensor | Distribution = (
            oracle.run_model(model, batch) if predict is None else predict(batch)
        )
        return output

    with torch.no_grad():
        before = answer()
    protection = syngap.protect(
        model, [batch], gate=False, strength=strength, predict=predict, anchors=1000, every=1
    )
    assert float(protection.loss().detach()) == pytest.approx(0.0, abs=1e-12)
    shift(model)
    now = answer()
    if isinstance(before, Distribution):
        assert isinstance(now, Distribution)
        expected = strength * oracle.distribution_kl(before, now)
    else:
        assert isinstance(now, Tensor)
        counted = oracle.counted_positions(batch, now.shape[:-1])
        expected = strength * oracle.teacher_kl(before, now, counted)
    found = protection.loss()
    assert float(expected.detach()) > 1e-3
    assert_close(found.detach(), expected.detach(), "loss")
    params = oracle.trainable(model)
    for name, mine, theirs in zip(
        params,
        torch.autograd.grad(found, list(params.values())),
        torch.autograd.grad(expected, list(params.values())),
        strict=True,
    ):
        assert_close(mine, theirs, f"gradient for {name}")


def test_teacher_for_classes() -> None:
    model, known = MLP.make()
    compare_teacher(model, known)


def test_teacher_leaves_padding_out() -> None:
    model, known = PADDED.make()
    compare_teacher(model, known[0])


@pytest.mark.parametrize("length", [6, 4], ids=["other length", "same length"])
def test_padding_is_that_of_what_predictions_are_for(length: int) -> None:
    """Of an encoder-decoder those are the decoder's tokens, and not the encoder's."""
    tokens, decoded = torch.ones(2, length).long(), torch.ones(2, 4).long()
    mask, own = torch.arange(length) < 2, torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    batch = {"input_ids": tokens, "attention_mask": mask.expand(2, -1).long()}
    logits = torch.randn(2, 4, 3)
    found = mask_of(batch, logits)
    assert (found is None) == (length != 4)
    batch |= {"decoder_input_ids": decoded}
    assert mask_of(batch, logits) is None
    batch |= {"decoder_attention_mask": own}
    for prediction in (logits, Categorical(logits=logits)):
        assert torch.equal(mask_of(batch, prediction), own.bool())


@pytest.mark.parametrize("where", ["attention_mask", "decoder_attention_mask"])
def test_padding_that_cannot_be_left_out_is_warned_of_once(where: str) -> None:
    class Next(nn.Linear):
        def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
            return super().forward(x)[:, :-1]

    model, x = Next(6, 3), torch.randn(32, 5, 6)
    known = {"x": x, where: torch.ones(32, 5)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        syngap.protect(model, known)  # no padding
        syngap.protect(model, known, predict=lambda batch: model(batch["x"])[:, -1])
    known[where][:, 3:] = 0
    message = rf"\(8, 4\) without classes, and their {where} has \(8, 5\).*for each token"
    with pytest.warns(UserWarning, match=message) as caught:
        syngap.protect(model, known, anchors=8)
    assert len(caught) == 1


def test_impossible_classes_count_nothing() -> None:
    before = torch.full((2, 30), -torch.inf)
    before[:, :20] = torch.randn(2, 20)
    now = before.clone()
    now[:, :10] += 1.0
    expected = kl_divergence(Categorical(logits=before[:, :20]), Categorical(logits=now[:, :20]))
    found = divergence(take_answers(before, None), now.requires_grad_())
    assert found.item() == pytest.approx(expected.mean().item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(found, now)
    assert bool(gradient.isfinite().all())
    assert not gradient[:, 20:].any()


def test_many_predictions_are_compared_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, known = PADDED.make()
    monkeypatch.setattr(answers, "AT_A_TIME", 7)
    compare_teacher(model, known[0])
    protection = syngap.protect(model, known, gate=False)
    shift(model)
    in_parts = protection.report()
    monkeypatch.undo()
    whole = protection.report()
    for name in ("kl", "loss_before", "agreement"):
        assert getattr(in_parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)


@pytest.mark.parametrize("kind", ["normal", "bernoulli", "categorical"])
def test_teacher_for_distributions(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()

    def predict(batch: Tensor) -> Distribution:
        output = model(batch)
        if kind == "normal":
            return Normal(output[:, :2], output[:, 2:].exp())
        return Bernoulli(logits=output) if kind == "bernoulli" else Categorical(logits=output)

    compare_teacher(model, torch.randn(5, 6, dtype=torch.float64), predict)


def test_every_kth_call_counts_k_times_and_the_others_nothing() -> None:
    model, known = MLP.make()
    each, third = (syngap.protect(model, [known], gate=False, every=k) for k in (1, 3))
    shift(model)
    first, second = (float(each.loss().detach()) for _ in range(2))
    assert min(first, second) > 0
    found = [float(third.loss().detach()) for _ in range(6)]
    assert found == pytest.approx([0.0, 0.0, 3 * first, 0.0, 0.0, 3 * second])


class Sequences:
    """Known inputs in twelve batches of four, and a model that notes which it sees."""

    def __init__(self, length: int) -> None:
        order = torch.Generator().manual_seed(0)
        self.batches = torch.randn(12, 4, length, 5, generator=order, dtype=torch.float64)
        self.model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.seen: list[int] = []
        self.progress: list[tuple[int, int | None]] = []

    def predict(self, batch: Tensor) -> Tensor:
        self.seen += [n for n, other in enumerate(self.batches) if torch.equal(batch, other)]
        logits: Tensor = self.model(batch)
        return logits

    def protect(self) -> Tensor:
        """Return the directions of the first layer's inputs."""
        protection = syngap.protect(
            self.model,
            list(self.batches),
            predict=self.predict,
            rank="full",
            progress=lambda done, total: self.progress.append((done, total)),
        )
        basis = protection.known[self.model[0].weight].basis
        assert basis is not None
        assert basis.right is not None
        return basis.right


@pytest.mark.parametrize(("length", "step"), [(10, 2), (1, 1)])
def test_of_many_rows_every_second_batch_gives_directions(length: int, step: int) -> None:
    """From the first input to the last: old inputs may come in an order."""
    known = Sequences(length)
    right = known.protect()
    first, second = list(range(0, 12, step)), list(range(12))
    assert known.seen[: len(first) + 12] == first + second
    rows = known.batches[::step].reshape(-1, 5)
    moment = right.mT @ (rows.mT @ rows) @ right
    torch.testing.assert_close(moment, moment.diagonal().diag(), rtol=0, atol=TOLERANCE * len(rows))
    assert known.progress == [
        *((n + 1, 24) for n in first),
        *((n + 13, 24) for n in second),
    ]


def batches_of_kinds(count: int, size: int, length: int = 1) -> list[Tensor]:
    """Two kinds in turn: what varies in one is zero in the other."""
    order = torch.Generator().manual_seed(0)
    found = torch.randn(count, size, length, 6, generator=order, dtype=torch.float64)
    found[::2, ..., :3], found[1::2, ..., 3:] = 0.0, 0.0
    return list(found)


def knowledge_of(model: nn.Module, batches: list[Tensor], **options: Any) -> Protection:
    return syngap.protect(model, batches, rank="full", anchors=4, **options)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_of_many_predictions_some_batches_are_enough(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Knowledge is that of the batches that remain, one of each few, and the teacher uses all."""
    model, batches = nn.Linear(6, 3).double(), batches_of_kinds(160, 8)
    monkeypatch.setattr(knowledge, "_ENOUGH", 160 * 8 // step)
    monkeypatch.setattr(knowledge, "_SAMPLES", 64)
    spread, chosen = knowledge._spread, list[list[int]]()
    monkeypatch.setattr(
        knowledge, "_spread", lambda *args: chosen.append(spread(*args)) or chosen[-1]
    )
    progress: list[tuple[int, int | None]] = []
    found = knowledge_of(model, batches, progress=lambda *done: progress.append(done))
    (places,) = chosen
    assert [place // step for place in places] == list(range(-(-len(batches) // step)))
    assert progress[-1] == (320, 320)
    expected = knowledge_of(model, [batches[place] for place in places])
    for param, one in found.known.items():
        assert torch.equal(one.importance, expected.known[param].importance)
        assert one.rows == expected.known[param].rows
    assert len(found._teacher.batches) == 2 * len(batches)


@pytest.mark.parametrize("step", [2, 4, 8])
def test_no_kind_of_input_is_left_out_because_of_its_place(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = nn.Linear(6, 3, bias=False).double(), batches_of_kinds(160, 8)
    monkeypatch.setattr(knowledge, "_ENOUGH", 160 * 8 // step)
    monkeypatch.setattr(knowledge, "_SAMPLES", 64)
    known = knowledge_of(model, batches).known[model.weight]
    assert known.basis is not None
    directions, importance = known.basis.right, known.importance.sum(0)
    assert directions is not None
    by_input = directions.square() @ importance
    assert by_input[:3].sum() > 0.2 * by_input.sum()
    assert by_input[3:].sum() > 0.2 * by_input.sum()


def test_few_inputs_or_rows_or_batches_of_several_sizes_are_all_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long, short = batches_of_kinds(16, 8, length=64), batches_of_kinds(160, 8)
    wide = nn.Sequential(nn.Linear(6, 90), nn.Linear(90, 3)).double()
    narrow = nn.Linear(6, 3).double()
    monkeypatch.setattr(knowledge, "_ENOUGH", 64)
    several = [torch.cat(short[:40]), *short[40:]]
    spread, taken = knowledge._spread, list[list[int]]()
    monkeypatch.setattr(
        knowledge, "_spread", lambda *args: taken.append(spread(*args)) or taken[-1]
    )
    for model, batches in ((narrow, long), (wide, short), (narrow, several)):
        knowledge_of(model, batches)
        assert taken.pop() == list(range(len(batches)))


@pytest.mark.parametrize("gathered", [False, True])
def test_inputs_that_a_stack_shares_are_taken_as_if_each_had_its_own(gathered: bool) -> None:
    """As in h[None] @ experts.mT, where torch repeats h for each."""
    inputs = torch.randn(32, 6, 5, generator=torch.Generator().manual_seed(0)).double()
    importance = []
    for shared in (True, False):
        torch.manual_seed(0)
        model = nn.Module()
        model.experts = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.float64))

        def predict(batch: Tensor, model: Any = model, shared: bool = shared) -> Tensor:
            experts = model.experts[torch.tensor([0, 1, 2])] if gathered else model.experts
            rows = batch.flatten(0, 1)[None]
            outputs = (rows if shared else rows.repeat(3, 1, 1)) @ experts.mT
            return outputs.mean(0).view(*batch.shape[:-1], 4)

        protection = syngap.protect(model, inputs, predict=predict, teacher=False)
        importance.append(protection.known[model.experts].importance)
    assert torch.allclose(importance[0], importance[1])


def test_matrices_of_a_stack_get_directions_from_all_batches() -> None:
    known = Sequences(20)
    stack = nn.Parameter(torch.randn(4, 5, 5, dtype=torch.float64))
    known.model = nn.Sequential(known.model)
    known.model.register_parameter("stack", stack)
    syngap.protect(
        known.model,
        list(known.batches),
        predict=lambda batch: torch.bmm(batch, stack).flatten(1) + 0 * known.predict(batch).sum(),
    )
    assert known.seen[:24] == list(range(12)) * 2


@pytest.mark.parametrize(("teacher", "expected"), [(True, 0.9), (False, 0.999)])
def test_beside_a_teacher_the_gate_is_weaker(teacher: bool, expected: float) -> None:
    model = nn.Linear(5, 3)
    protection = syngap.protect(model, torch.randn(40, 5), teacher=teacher)
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters()))
    assert optimizer.param_groups[0]["consolidation"] == expected


# Other ways to write a product --------------------------------------------------------------------


class Written(nn.Module):
    """Two products with square matrices of a stack, and one with a matrix, written in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stack = nn.Parameter(torch.randn(3, 4, 4, dtype=torch.float64))
        self.matrix = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)) % 3
        if self.way == "names":
            chosen = torch.index_select(index=places, dim=0, input=self.stack)
            other = torch.index_select(dim=0, input=self.stack, index=(places + 1) % 3)
            hidden = torch.bmm(input=x.unsqueeze(1), mat2=chosen).tanh()
            hidden = torch.bmm(hidden, mat2=other.mT).squeeze(1)
            hidden = torch.index_select(input=hidden, dim=1, index=torch.arange(4))
            first = torch.mm(hidden, mat2=self.matrix)
            return first + torch.addmm(self.bias, mat2=self.matrix, mat1=hidden.tanh())
        if self.way == "negative":
            chosen, other = self.stack[places - 3], self.stack[(places + 1) % 3 - 3]
        else:
            chosen, other = self.stack[places], self.stack[(places + 1) % 3]
        hidden = (x.unsqueeze(1) @ chosen).tanh()
        hidden = (hidden @ other.mT).squeeze(1)
        return hidden @ self.matrix + (hidden.tanh() @ self.matrix + self.bias)


@pytest.mark.parametrize("way", ["names", "negative"])
def test_a_product_is_found_however_it_is_written(way: str) -> None:
    knowns = []
    for each in ("plain", way):
        torch.manual_seed(0)
        model = Written(each)
        known = torch.randn(64, 4, dtype=torch.float64)
        protection = syngap.protect(model, known, teacher=False, rank="full")
        knowns.append([protection.known[param] for param in (model.stack, model.matrix)])
    for plain, other in zip(*knowns, strict=True):
        assert plain.basis is not None
        assert other.basis is not None
        assert_close(other.importance, plain.importance, way)


def test_square_matrices_are_not_taken_for_transposed_ones() -> None:
    """The directions of their inputs are those of x, on whichever side they are multiplied."""
    torch.manual_seed(0)
    x = torch.randn(96, 4, dtype=torch.float64) * torch.tensor([8.0, 4.0, 2.0, 1.0])

    class Square(nn.Module):
        def __init__(self, transposed: bool) -> None:
            super().__init__()
            self.transposed = transposed
            weights = torch.linspace(-1, 1, 48, dtype=torch.float64).view(3, 4, 4).sin()
            self.stack = nn.Parameter(weights.mT.contiguous() if transposed else weights)

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.stack[torch.arange(len(x)) % 3]
            return (x.unsqueeze(1) @ (chosen.mT if self.transposed else chosen)).squeeze(1)

    plain, transposed = (Square(each) for each in (False, True))
    found = [
        syngap.protect(model, x, teacher=False, rank="full").known[model.stack]
        for model in (plain, transposed)
    ]
    assert_close(found[1].importance, found[0].importance.mT, "transposed")
