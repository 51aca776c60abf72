"""`plan_memory` says, tensor by tensor, what `protect` and AdamW then take."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import memory
import pytest
import torch
from checkout import ROOT
from helpers import TensorsSince
from protect_cases import CASES, Case
from torch import Tensor, nn

from syngap.optim import knowledge
from syngap.optim.moments import Rank, affordable_rank, basis_dtype
from syngap.protection import Protection, memory_plan, plan_memory, protect, recomputed, teacher
from syngap.protection.memory_plan import Form, MemoryPlan

ROUTED = "experts_routed"
PLANNED = [case for case in CASES if ROUTED not in case.name]
KINDS: list[tuple[Rank | None, torch.dtype]] = [
    *((rank, torch.float32) for rank in ("full", 0.5, 0.1, 3, None)),
    ("full", torch.float64),
    ("full", torch.bfloat16),
    (0.5, torch.bfloat16),
]


def form_of(tensor: Tensor | None) -> Form | None:
    return None if tensor is None else Form(tuple(tensor.shape), tensor.dtype)


def made(case: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model, known = case.make()
    is_float = isinstance(known, Tensor) and known.is_floating_point()
    return model.to(dtype), known.to(dtype) if is_float else known


def trained(model: nn.Module, known: Any, **options: Any) -> tuple[Protection, Any]:
    """Return a protection and its optimizer after a step, when both have all of their state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # known inputs are few
        protection = protect(model, known, **options)
    optimizer: Any = protection.optimizer(torch.optim.AdamW(model.parameters()))
    protection.loss().backward()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return protection, optimizer


@pytest.mark.parametrize(("rank", "dtype"), KINDS)
@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.name)
def test_the_plan_has_each_tensor_of_a_protected_model(
    case: Case, rank: Rank | None, dtype: torch.dtype
) -> None:
    model, known = made(case, dtype)
    plan = plan_memory(model, known, rank=rank, batch_size=case.batch_size)
    protection, optimizer = trained(model, known, rank=rank, batch_size=case.batch_size)
    states = {name: optimizer.state[param] for name, param in model.named_parameters()}
    masks: dict[Tensor, Form | None] = {}
    for work in optimizer.gate._works:
        for stack in work.stacks:
            (place,) = stack.places  # one of a kind, on a CPU
            masks[work.whole[place]] = form_of(stack.mask)
        entries = [param for param, basis in zip(work.whole, work.bases, strict=True) if not basis]
        masks |= zip(entries, map(form_of, work.small or []), strict=True)
    params = dict(model.named_parameters())
    assert [one.name for one in plan.parameters] == list(params)
    for one in plan.parameters:
        state, param = states[one.name], params[one.name]
        assert one.weight == form_of(param)
        assert one.is_frozen == (not param.requires_grad)
        importance = state.get("importance") if param.requires_grad else None
        assert one.importance == form_of(importance), one.name
        assert one.sides == tuple(form_of(state.get(side)) for side in ("left", "right"))
        assert one.mask == masks.get(param), one.name
        if not one.is_frozen:
            moments = optimizer.base.state[param]
            assert one.weight == form_of(moments["exp_avg"]) == form_of(moments["exp_avg_sq"])
    stored = protection._teacher._stored
    assert plan.stored == "answers"
    assert stored is not None
    assert plan.answers == sum(each.bytes for each in stored)


class Chain(nn.Module):
    """Layers that have inputs of their own, so that none share directions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        output: Tensor = self.head(self.norm(x.mT).mT)
        return output


def memory_since(made: TensorsSince, *, least: int) -> int:
    """Return the bytes of new storages that Python has tensors of, small ones left out."""

    def storages(tensors: list[Tensor]) -> dict[int, int]:
        found = [each.untyped_storage() for each in tensors if type(each) in (Tensor, nn.Parameter)]
        return {storage.data_ptr(): storage.nbytes() for storage in found}

    new, old = storages(made()), storages(made.before)
    return sum(size for place, size in new.items() if size >= least and place not in old)


@pytest.mark.parametrize("rank", ["full", 0.25])
def test_nothing_else_takes_memory(rank: Rank) -> None:
    """All tensors that are there after a step and were not before, together."""
    torch.manual_seed(0)
    known = torch.randint(50, (128, 6))
    smallest = 24 * 4  # bytes of a bias
    made = TensorsSince()
    model = Chain()
    plan = plan_memory(model, known, rank=rank)
    gc.collect()
    kept = trained(model, known, rank=rank)
    there = memory_since(made, least=smallest)
    whole, cpu = plan.on_device(), plan.on_cpu()
    # The teacher's gradient is there from loss() to backward(); known inputs are in no plan.
    whole["teacher"] = plan.answers + known.nbytes
    assert there == sum(whole.values()) + sum(cpu.values())
    assert kept


def test_the_teachers_gradient_is_there_until_the_backward_pass() -> None:
    torch.manual_seed(0)
    model, known = Chain(), torch.randint(50, (64, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        protection = protect(model, known, gate=False)
    made = TensorsSince()
    loss = protection.loss()
    plan = plan_memory(model, known, gate=False)
    own = plan.on_device()["teacher"] - plan.answers
    assert own == sum(param.nbytes for param in model.parameters())
    assert memory_since(made, least=96) == own
    assert loss.requires_grad


def test_the_teacher_of_a_large_model_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed, "LARGE", 0)
    model, known = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 50)), torch.randn(64, 8)
    plan = plan_memory(model, known)
    assert plan.on_device()["teacher"] == plan.answers == 64 * 50 * 4


@pytest.mark.parametrize(
    ("least", "room", "stored"),
    [
        (1 << 28, 0, "answers"),
        (0, 0, "features"),
        (0, 1 << 28, "features"),  # which take less, where answers would fit too
        (0, 0, "start"),
    ],
)
def test_what_the_teacher_stores(
    monkeypatch: pytest.MonkeyPatch, least: int, room: int, stored: str
) -> None:
    monkeypatch.setattr(teacher, "SMALL", least)
    for module in (teacher, memory_plan) if room else ():
        monkeypatch.setattr(module, "byte_limit", lambda model: room)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 500))
    known = torch.randint(500, (64 if stored != "start" else 640, 6))
    plan = plan_memory(model, known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = protect(model, known)._teacher
    assert plan.stored == stored
    assert (found._stored is not None) == (stored == "answers")
    assert (found._features is not None) == (stored == "features")
    if found._features is not None:
        assert found._head is not None
        assert plan.answers == sum(each.nbytes for each in found._features) + found._head.nbytes


def test_features_that_take_more_than_answers_are_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teacher, "SMALL", 0)
    for module in (teacher, memory_plan):
        monkeypatch.setattr(module, "byte_limit", lambda model: 1 << 28)
    model, known = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 5)), torch.randn(64, 8)
    assert plan_memory(model, known).stored == "answers"
    assert protect(model, known)._teacher.stores


@pytest.mark.parametrize("rank", ["full", 0.25])
def test_second_moments_are_those_of_the_first_pass(
    monkeypatch: pytest.MonkeyPatch, rank: Rank
) -> None:
    seen: list[int] = []
    find = knowledge.find_bases

    def note(sides: Any, *args: Any) -> Any:
        uses = [use for side in sides.values() for use in side.uses]
        seen.append(sum(each.nbytes for use in uses for each in use.moments if each is not None))
        return find(sides, *args)

    monkeypatch.setattr(knowledge, "find_bases", note)
    model, known = Chain(), torch.randint(50, (128, 6))
    plan = plan_memory(model, known, rank=rank)
    trained(model, known, rank=rank)
    assert seen == [plan.moments]


def masks_of(plan: MemoryPlan) -> tuple[int, int]:
    """Return the bytes of masks along directions, and along entries."""
    along = sum(one.mask.nbytes for one in plan.parameters if one.mask and any(one.sides))
    return along, plan.on_device()["masks"] - along


def test_on_a_gpu_what_is_known_takes_half_precision() -> None:
    model, known = Chain(), torch.randint(50, (64, 6))
    here, there = plan_memory(model, known), plan_memory(model, known, device="cuda")
    for name in ("importance", "directions"):
        assert here.on_device()[name] == 2 * there.on_device()[name] > 0
    along, entries = masks_of(here)
    assert masks_of(there) == (along // 2, entries)  # few are kept as they are calculated
    assert here.on_device()["weights"] == there.on_device()["weights"]
    with torch.device("meta"):
        meta = Chain()
    assert plan_memory(meta, known) == there
    assert basis_dtype([], "cuda") is None
    large = [torch.empty(8000, 8000, device="meta")]
    assert affordable_rank(large, "cpu") == 0.25
    assert affordable_rank(large, "cuda") == "full"


def test_fsdp_shards_all_but_what_lies_along_directions() -> None:
    model, known = Chain(), torch.randint(50, (64, 6))
    one, four = (plan_memory(model, known, processes=count) for count in (1, 4))
    alone, each = one.on_device(), four.on_device()
    assert masks_of(four)[0] == masks_of(one)[0]
    assert each["directions"] == alone["directions"]
    rows = sum(-(-len(param) // 4) * param[0].nbytes for param in model.parameters())
    assert each["gradients"] == rows < alone["gradients"]
    assert each["AdamW's moments"] == 2 * rows
    assert each["teacher"] == four.answers
    learned = [(one.importance, any(one.sides)) for one in four.parameters if one.importance]
    entries = [form for form, has_directions in learned if not has_directions]
    assert masks_of(four)[1] == sum(form.shard(4) for form in entries) > 0
    along = sum(form.nbytes for form, has_directions in learned if has_directions)
    assert each["importance"] == along + sum(form.shard(4) for form in entries)


def test_a_plan_reads_and_changes_nothing() -> None:
    model, known = Chain().train(), torch.randint(50, (64, 6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    plan = plan_memory(model, known)
    assert all(bool(param.isnan().all()) for param in model.parameters())
    assert model.training
    model.load_state_dict(before)
    assert plan == plan_memory(model, known)
    torch.testing.assert_close(dict(model.state_dict()), before)


def test_a_plan_is_a_table_of_bytes_a_parameter() -> None:
    with torch.device("meta"):
        model = nn.Linear(1000, 1000, bias=False)
    plan: MemoryPlan = plan_memory(model, torch.zeros(16, 1000), rank=0.25)
    lines = [line.split() for line in str(plan).splitlines()]
    assert ["weights", "0.00", "4.00"] in lines
    assert ["importance", "0.00", "0.50"] in lines  # 1000 × 250 numbers of two bytes
    assert ["masks", "0.00", "0.50"] in lines
    assert ["directions", "0.00", "0.50"] in lines
    assert ["AdamW's", "moments", "0.01", "8.00"] in lines
    assert "1,000,000 parameters, rank 0.25, on cuda" in str(plan)


def test_a_forward_pass_that_looks_at_numbers_is_refused() -> None:
    (case,) = (case for case in CASES if case.name == ROUTED)
    model, known = case.make()
    with pytest.raises(ValueError, match="its forward pass looks at numbers"):
        plan_memory(model, known)
    with pytest.raises(ValueError, match="rank must be"):
        plan_memory(Chain(), torch.randint(50, (4, 6)), rank=1.5)
    with pytest.raises(TypeError, match=r"got dict; pass predict="):
        plan_memory(Chain(), torch.randint(50, (4, 6)), predict=lambda batch: {})  # type: ignore[arg-type]


# The tables of docs/large.md


def cells(title: str, row: str) -> list[str]:
    """Return the numbers of a row of what `benchmarks/memory.py` printed."""
    text = (ROOT / "results" / "speed" / "cpu" / "memory.md").read_text(encoding="utf-8")
    lines = text.partition(title)[2].splitlines()
    (found,) = (line for line in lines if line.startswith(f"| {row} "))
    return [cell.strip() for cell in found.split("|")[2:-1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", ["SmolLM2-135M, rank 0.25 (default)", "Llama 7 B, rank 0.25 (default)"]
)
def test_the_table_has_what_the_plan_says(row: str) -> None:
    name = row.partition(",")[0]
    plan = memory.planned(name, 0.25 if "0.25" in row else "full")
    parts = plan.on_device().values()
    sizes = [*parts, sum(parts), plan.moments]
    said = [*(f"{size / plan.numel:.2f}" for size in sizes), f"{sum(parts) / 1e9:.1f}"]
    assert cells("bytes a parameter", row) == said
    with torch.device("meta"):
        params = list(memory.Decoder(memory.MODELS[name]).parameters())
    assert affordable_rank(params, "cuda") == plan.rank


@pytest.mark.slow
def test_the_plan_of_several_cards_has_what_the_plan_says() -> None:
    plan = memory.planned(memory.LARGEST, 0.25, memory.CARDS)
    parts = plan.on_device().values()
    sizes = [*parts, sum(parts), sum(plan.on_cpu().values()), plan.moments]
    said = [f"{size / 1e9:.1f}" for size in sizes]
    assert cells("GB in each process", "rank 0.25") == said
