"""The Trainer takes the steps of a loop written by hand, and resumes where it stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import as_list, assert_identical, largest_difference, values_of
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.nn.functional import cross_entropy, pad
from torch.optim import AdamW

from syngap import SynGAP

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate import Accelerator  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from syngap.integrations.transformers import SynGAPTrainer  # noqa: E402

VOCABULARY, LENGTH, BATCH = 11, 7, 4
GATE = {"retention": 0.9, "consolidation": 0.9}
RATE = 1e-2

Batch = dict[str, Tensor]


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def made(kind: Any, config: Any) -> Any:
    """A model that has the same weights always."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config)


def decoder(attention_dropout: float = 0.1) -> Any:
    own = {"attention_dropout": attention_dropout, "max_position_embeddings": LENGTH}
    return made(LlamaForCausalLM, LlamaConfig(**SMALL, **own))


def encoder(**options: Any) -> Any:
    return made(BertForSequenceClassification, BertConfig(**SMALL, **options))


def text(rows: int = 32, padded: int = 0) -> list[Batch]:
    """Random tokens, the last ones of every row padding."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    attended = pad(torch.ones(rows, LENGTH - padded, dtype=torch.long), (0, padded))
    labels = tokens.masked_fill(attended == 0, -100)
    return [
        {"input_ids": row, "attention_mask": mask, "labels": wanted}
        for row, mask, wanted in zip(tokens, attended, labels, strict=True)
    ]


def collated(rows: list[Batch]) -> Batch:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **settings | options)


def trainer(
    folder: Path,
    kind: Callable[..., Any] = SynGAPTrainer,
    *,
    model: Any = None,
    data: Any = None,
    own: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer of `kind` with arguments of its `own`, and `options` of TrainingArguments."""
    own = {"gate": GATE} if own is None and kind is SynGAPTrainer else own or {}
    model = decoder() if model is None else model
    data = text() if data is None else data
    return kind(model, arguments(folder, **options), train_dataset=data, **own)


def losses(done: Any) -> list[float]:
    return [entry["loss"] for entry in done.state.log_history if "loss" in entry]


def importance(of: Any) -> list[Tensor]:
    return as_list(of.gate.importance())


# The steps it takes -------------------------------------------------------------------------------


class InOrder(SynGAPTrainer):
    """Batches in the order of the data, so that a loop can take the same."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def by_hand(model: Any, rows: list[Batch], accumulated: int, autocast: bool) -> SynGAP:
    """What a user without the Trainer would write."""
    steady = [p for name, p in model.named_parameters() if "norm" in name]
    decayed = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": decayed}, {"params": steady}]
    optimizer = SynGAP.wrap(AdamW(groups, lr=RATE, weight_decay=0.0), **GATE)
    model.train()
    batches = [collated(rows[first : first + BATCH]) for first in range(0, len(rows), BATCH)]
    for first in range(0, len(batches), accumulated):
        optimizer.zero_grad()
        parts = batches[first : first + accumulated]
        count = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                inputs = {key: part[key] for key in ("input_ids", "attention_mask")}
                logits = model(**inputs).logits[:, :-1].float()
            wanted = part["labels"][:, 1:]
            optimizer.observe(logits, mask=wanted != -100)
            loss = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / count
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return optimizer


@pytest.fixture
def unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that depend on the logits alone, for two ways that draw in another order."""
    monkeypatch.setattr("syngap.optim.scores.sample_labels", lambda some, _: some.argmin(-1))


@pytest.mark.usefixtures("unlikely")
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
def test_its_steps_are_those_of_a_loop_by_hand(
    tmp_path: Path, accumulated: int, bf16: bool
) -> None:
    """With accumulation, clipping, mixed precision and padding."""
    rows = text(32, padded=2)
    own, model = decoder(attention_dropout=0.0), decoder(attention_dropout=0.0)
    done = trainer(
        tmp_path,
        InOrder,
        model=own,
        data=rows,
        own={"gate": GATE},
        max_steps=-1,
        num_train_epochs=1,
        gradient_accumulation_steps=accumulated,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        bf16=bf16,
    )
    done.train()
    optimizer = by_hand(model, rows, accumulated, bf16)
    assert done.state.global_step == optimizer.param_groups[0]["steps"] == 8 // accumulated
    close = 1e-3 if bf16 else 1e-5
    assert largest_difference(values_of(own).values(), values_of(model).values()) < close
    found, expected = done.gate.importance(), as_list(optimizer.importance())
    names = [name for name, _ in model.named_parameters()]
    order = [n for n in names if "norm" not in n] + [n for n in names if "norm" in n]
    for name, value in zip(order, expected, strict=True):
        assert found[name] == pytest.approx(value, rel=1e-2 if bf16 else 1e-3, abs=1e-9), name


# What is observed ---------------------------------------------------------------------------------


def observed(folder: Path, model: Any, batch: Batch) -> tuple[Any, Tensor | None]:
    one = trainer(folder, model=model)
    return one.predictions(batch, model(**batch))


def test_a_decoder_counts_where_the_next_label_does(tmp_path: Path) -> None:
    batch = collated(text(2, padded=2))
    batch["labels"][0, :3] = -100  # a prompt
    logits, mask = observed(tmp_path, decoder(), batch)
    assert logits.shape == (2, LENGTH, VOCABULARY)
    assert mask is not None
    assert mask.int().tolist() == [[0, 0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]]


def test_an_encoder_decoder_counts_where_its_own_label_does(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    batch = collated(text(2, padded=2))
    _, mask = observed(tmp_path, T5ForConditionalGeneration(config), batch)
    assert mask is not None
    assert mask.int().tolist() == [[1, 1, 1, 1, 1, 0, 0]] * 2


def test_without_labels_padding_is_left_out(tmp_path: Path) -> None:
    batch = collated(text(2, padded=2))
    del batch["labels"]
    _, mask = observed(tmp_path, decoder(), batch)
    assert mask is not None
    assert mask.int().tolist() == [[1, 1, 1, 1, 1, 0, 0]] * 2
    del batch["attention_mask"]
    assert observed(tmp_path, decoder(), batch)[1] is None


@pytest.mark.parametrize(
    ("labels", "options", "expected"),
    [
        (torch.tensor([0, 2]), {"num_labels": 3}, Tensor),
        (torch.tensor([0.5, 2.0]), {"num_labels": 1}, torch.distributions.Normal),
        (torch.ones(2, 3), {"num_labels": 3}, torch.distributions.Bernoulli),
    ],
    ids=["classes", "regression", "multi-label"],
)
def test_classifiers_are_observed_by_the_likelihood_of_their_loss(
    tmp_path: Path, labels: Tensor, options: dict[str, Any], expected: type
) -> None:
    batch = collated(text(2, padded=2)) | {"labels": labels}
    model = encoder(**options)
    one = trainer(tmp_path, model=model)
    prediction, mask = one.predictions(batch, model(**batch))
    assert isinstance(prediction, expected)
    one.create_optimizer()
    one.gate.observe(prediction, mask=mask)
    # Without labels there is the attention of tokens, but one prediction for all of them.
    del batch["labels"]
    assert one.predictions(batch, model(**batch))[1] is None


def test_unlabelled_inputs_of_a_classifier_need_to_know_its_kind(tmp_path: Path) -> None:
    """Transformers finds out by the first labels, and consolidation comes before them."""
    known = text(4)
    for row in known:
        row.pop("labels", None)
    with pytest.raises(ValueError, match=r"set\s+model.config.problem_type"):
        trainer(tmp_path, model=encoder(num_labels=3)).consolidate(known)
    kinds = {"single_label_classification": Tensor, "multi_label_classification": Bernoulli}
    for problem, expected in kinds.items():
        model = encoder(num_labels=3, problem_type=problem)
        one = trainer(tmp_path, model=model)
        one.consolidate(known)
        batch = collated(known)
        assert isinstance(one.predictions(batch, model(**batch))[0], expected)
    one = trainer(tmp_path, model=encoder(num_labels=1))
    one.consolidate(known)
    assert one.gate.summary()["importance/mean"] > 0


def test_what_a_skipped_step_observed_is_discarded(tmp_path: Path) -> None:
    """The Trainer calls model.zero_grad(), which an optimizer does not hear of."""
    found = []
    for batches in ((0, 1), (1,)):
        one = trainer(tmp_path, own={"gate": GATE})
        one.create_optimizer()
        one.model.train()
        for number in batches:
            torch.manual_seed(number)
            batch = collated(text(8)[4 * number : 4 * number + 4])
            one.model.zero_grad()
            one.compute_loss(one.model, batch).backward()
            one.state.global_step += 1  # as the Trainer counts, whether scaling skipped it or not
        one.optimizer.step()
        found.append(one.gate.importance())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


def test_evaluation_is_not_observed(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    one.train()
    before = copy.deepcopy(one.gate.state_dict())
    one.evaluate(text())
    one.gate.step()  # would fold in what was observed
    for state, then in zip(
        one.gate.state_dict()["state"].values(), before["state"].values(), strict=True
    ):
        assert torch.equal(state["importance"], then["importance"])


def test_a_batch_of_nothing_but_padding_is_skipped(tmp_path: Path) -> None:
    rows = text(8)
    for row in rows[:BATCH]:
        row["labels"] = torch.full_like(row["labels"], -100)
    done = trainer(
        tmp_path,
        InOrder,
        data=rows,
        own={"gate": GATE},
        max_steps=-1,
        num_train_epochs=1,
        gradient_accumulation_steps=2,
    )
    done.train()
    assert done.state.global_step == 1
    assert max(value.max() for value in importance(done)) > 0


def test_labels_that_the_trainer_smooths_still_say_what_counts(tmp_path: Path) -> None:
    """It takes them out of the inputs; without them the padding would be observed."""

    class Noting(SynGAPTrainer):
        def predictions(self, inputs: Any, outputs: Any) -> Any:
            assert "labels" in inputs
            return super().predictions(inputs, outputs)

    done = trainer(tmp_path, Noting, own={"gate": GATE}, label_smoothing_factor=0.1)
    done.train()
    assert max(value.max() for value in importance(done)) > 0


# Stopping and going on ----------------------------------------------------------------------------


@pytest.mark.parametrize("observe", [True, False])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}])
def test_a_resumed_run_has_the_losses_and_the_state_of_one_that_was_not_stopped(
    tmp_path: Path, observe: bool, options: dict[str, Any]
) -> None:
    """Dropout and drawn labels come from generators that the Trainer saves."""
    own = {"gate": GATE, "observe": observe}
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 10} | options
    whole = trainer(tmp_path / "whole", own=own, **settings)
    whole.consolidate(text(padded=2))
    whole.train()

    torch.manual_seed(99)  # a new process has another state
    resumed = trainer(tmp_path / "whole", own=own, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == 10
    assert_identical(values_of(resumed.model), values_of(whole.model))
    assert_identical(resumed.gate.state_dict(), whole.gate.state_dict())


def test_a_generator_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    one = trainer(tmp_path, own={"gate": {"generator": torch.Generator()}})
    with pytest.raises(ValueError, match="leave it out"):
        one.train()


def test_a_second_training_goes_on_with_the_same_importance(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    one.train()
    gate, steps = one.gate, one.gate.param_groups[0]["steps"]
    one.train()
    assert one.gate is gate
    assert gate.param_groups[0]["steps"] == 2 * steps


# Consolidating ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unlikely")
def test_consolidated_importance_is_that_of_the_optimizer_itself(tmp_path: Path) -> None:
    """Padding left out, and it passes through accelerate's wrapper untouched."""
    rows = text(16, padded=2)
    unlabelled = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in rows]
    one = trainer(tmp_path, own={"gate": GATE, "observe": False}, per_device_eval_batch_size=BATCH)
    one.consolidate(unlabelled)

    model = decoder()
    expected = SynGAP.wrap(AdamW(model.parameters()), **GATE)
    batches = [collated(rows[first : first + BATCH]) for first in range(0, 16, BATCH)]
    expected.consolidate(
        model,
        batches,
        predict=lambda b: model(b["input_ids"], b["attention_mask"]).logits[:, :-2].flatten(0, 1),
    )
    found = one.gate.importance()
    for (name, _), value in zip(
        model.named_parameters(), as_list(expected.importance()), strict=True
    ):
        assert largest_difference([found[name]], [value]) < 1e-9, name
    before = importance(one)
    one.train()
    assert_identical(importance(one), before)
    assert one.gate.param_groups[0]["steps"] == 6


def test_consolidating_for_a_model_that_train_makes_anew_is_refused(tmp_path: Path) -> None:
    one = SynGAPTrainer(
        args=arguments(tmp_path), train_dataset=text(), model_init=decoder, gate=GATE
    )
    with pytest.raises(ValueError, match="give the Trainer a model"):
        one.consolidate(text())


# Optimizers ---------------------------------------------------------------------------------------


def test_what_the_arguments_ask_for_is_behind_the_gate(tmp_path: Path) -> None:
    one = trainer(tmp_path, optim="sgd", weight_decay=0.1)
    one.train()
    assert type(one.gate.base) is torch.optim.SGD
    assert [group["weight_decay"] for group in one.gate.param_groups] == [0.1, 0.0]
    assert [group["consolidation"] for group in one.gate.param_groups] == [0.9, 0.9]
    assert one.gate.param_groups[0]["lr"] < RATE  # the Trainer's schedule reaches it


@pytest.mark.parametrize("gated", [False, True])
def test_an_optimizer_of_ones_own_is_taken(tmp_path: Path, gated: bool) -> None:
    model = decoder()
    base = AdamW(model.parameters(), lr=RATE)
    given = SynGAP.wrap(base) if gated else base
    one = trainer(tmp_path, model=model, own={"optimizers": (given, None)})
    one.train()
    assert one.gate.base is base
    assert one.gate is given or not gated
    assert max(value.max() for value in importance(one)) > 0


def test_options_for_an_optimizer_that_is_gated_already_are_refused(tmp_path: Path) -> None:
    model = decoder()
    given = SynGAP(model.parameters(), lr=RATE)
    with pytest.raises(ValueError, match="where it is made"):
        trainer(tmp_path, model=model, own={"optimizers": (given, None), "gate": GATE})


def test_observe_goes_past_the_wrapper_of_accelerate() -> None:
    """In a loop of one's own the optimizer that was prepared is the one to observe with."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    gate = SynGAP.wrap(AdamW((net := decoder()).parameters(), lr=RATE), **GATE)
    model, optimizer = accelerator.prepare(net, gate)
    for first in range(0, 16, BATCH):
        batch = collated(text(16)[first : first + BATCH])
        with accelerator.accumulate(model):
            output = model(**batch)
            gate.observe(output.logits)
            accelerator.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
    assert gate.param_groups[0]["steps"] == 2
    assert max(value.max() for value in as_list(gate.importance())) > 0


# Others' trainers, adapters, compilation ----------------------------------------------------------


def test_another_trainer_is_gated_by_inheritance(tmp_path: Path) -> None:
    class Halved(Trainer):
        """Stands for those of trl, which compute the loss with their own arguments."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **o: Any):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **o)
            return (loss / 2, outputs) if return_outputs else loss / 2

    class GatedHalved(SynGAPTrainer, Halved):
        """Both."""

    one = trainer(tmp_path, GatedHalved, own={"gate": GATE})
    one.train()
    whole = trainer(tmp_path)
    whole.train()
    assert losses(one)[0] == pytest.approx(losses(whole)[0] / 2, rel=1e-3)
    assert max(value.max() for value in importance(one)) > 0


def test_adapters_of_peft_are_gated_and_the_rest_stays(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(decoder(), peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    before = {name: value for name, value in values_of(model).items() if "lora" not in name}
    one = trainer(tmp_path, model=model, data=text(padded=2))
    one.train()
    after = {name: value for name, value in values_of(model).items() if "lora" not in name}
    assert_identical(after, before)
    found = one.gate.importance()
    assert found
    assert all("lora" in name for name in found)
    assert all(value.max() > 0 for value in found.values())
    batch = collated(text(2))
    mask = one.predictions(batch, model(**batch))[1]
    assert mask.int().tolist() == [[1] * (LENGTH - 1) + [0]] * 2  # as without the adapters


# Bad use ------------------------------------------------------------------------------------------


def test_syngap_in_a_plain_trainer_says_that_nothing_is_observed(tmp_path: Path) -> None:
    model = decoder()
    given = SynGAP.wrap(AdamW(model.parameters(), lr=RATE))
    one = trainer(tmp_path, Trainer, model=model, own={"optimizers": (given, None)})
    with pytest.warns(UserWarning, match="has no importance yet"):
        one.train()


def test_a_gate_that_nothing_is_known_to_says_so(tmp_path: Path) -> None:
    one = trainer(tmp_path, own={"gate": GATE, "observe": False})
    with pytest.raises(RuntimeError, match="consolidate"):
        one.train()


def test_before_there_is_an_optimizer_the_gate_says_where_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="create_optimizer"):
        _ = trainer(tmp_path).gate


def test_a_model_without_logits_says_what_to_do(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    for output in ({"loss": torch.ones(())}, (torch.ones(()),)):
        with pytest.raises(TypeError, match="or override SynGAPTrainer"):
            one.predictions({}, output)
