"""`syngap.protect` and SynGAP in the Trainer of Hugging Face transformers.

`SynGAPTrainer(protect=...)` passes the optimizer that the Trainer makes through the protection, and
adds the teacher's loss.

Without `protect` the optimizer observes each forward pass: `compute_loss` is where forward pass and
graph are both at hand. Importance is in the optimizer's state and labels are drawn from torch's
own generators: both are in the Trainer's checkpoints, so a resumed run takes the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Normal
from transformers import Trainer

from syngap.optim import GatedOptimizer, SynGAP
from syngap.protection import Protection
from syngap.protection import protect as protect_model
from syngap.protection.hints import AS_TOKENS

__all__ = ["SynGAPTrainer"]

_IGNORED = -100  # the label that the losses of transformers leave out


class SynGAPTrainer(Trainer):
    """A Trainer that protects what its model knows, or whose optimizer observes each forward pass.

    The optimizer is what `TrainingArguments` ask for, or what `optimizers` gives, behind a gate.
    Accumulation, clipping, bf16, schedulers, evaluation and checkpoints are the Trainer's own.
    Another trainer that derives from Trainer gets the same by inheritance:

        class GatedSFTTrainer(SynGAPTrainer, SFTTrainer): ...

    With `protect` the model's knowledge is taken when the trainer is made, and the logged loss of
    training has the teacher's part in it. To resume a run, make the trainer with the model that the
    run began with: `resume_from_checkpoint` brings the weights of the checkpoint.

    Args:
        *args: what Trainer takes.
        gate: options of `SynGAP.wrap`, such as `{"consolidation": 0.999}`; not with `protect`.
        observe: False keeps the importance that `consolidate` took as it is: a backward pass less
            each step, and nothing of it fades.
        protect: inputs like those that the model knows, to keep its answers: tokens (N, T) such as
            `syngap.own_samples` returns, a dict of tensors as a tokenizer returns, or a dataset as
            `predict` takes, whose labels are left out. Or options of `syngap.protect` with these
            inputs as "known", or what `syngap.protect` returned for this model.
        **kwargs: what Trainer takes.

    Attributes:
        protection: what `syngap.protect` returned, for `report()` and `interpolate()`; None without
            `protect`.

    Examples:
        >>> texts = syngap.own_samples(model, tokenizer=tokenizer)  # doctest: +SKIP
        >>> trainer = SynGAPTrainer(model, args, train_dataset=new, protect=texts)
        ... # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> print(trainer.protection.report())  # doctest: +SKIP

        Or with importance that is observed all the time:

        >>> trainer = SynGAPTrainer(model, args, train_dataset=new, gate={"consolidation": 0.999})
        ... # doctest: +SKIP
        >>> trainer.consolidate(old_texts)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    protection: Protection | None = None

    def __init__(
        self,
        *args: Any,
        gate: Mapping[str, Any] | None = None,
        observe: bool = True,
        protect: Any = None,
        **kwargs: Any,
    ) -> None:
        if protect is not None and gate:
            raise ValueError(
                "protect= makes a gate of its own: give its options there, as in "
                'protect={"known": inputs, "consolidation": 0.999}, and leave out gate='
            )
        self._gate_options = dict(gate or {})
        self._observes = observe
        self._observed_at = -1  # the step that the last observation was for
        super().__init__(*args, **kwargs)
        if self._gate_options and isinstance(self.optimizer, GatedOptimizer):
            raise ValueError(
                "the optimizer in optimizers= is a SynGAP already: give it the options of gate= "
                "where it is made"
            )
        if protect is not None:
            self.protection = self._protected(protect)

    @property
    def gate(self) -> GatedOptimizer:
        """The SynGAP optimizer: for `summary()`, `plasticity()`, `importance()`."""
        gate = _gate_of(self.optimizer)
        if gate is None:
            raise RuntimeError(
                f"there is no SynGAP optimizer here, but {type(self.optimizer).__name__}: the "
                "Trainer makes it in create_optimizer(), consolidate() or train(), and DeepSpeed "
                "replaces it"
            )
        return gate

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the optimizer as the Trainer does, and put it behind the gate."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.protection is not None:
            if _gate_of(optimizer) is None:
                self.optimizer = self.protection.optimizer(optimizer)
            return self.optimizer
        if _gate_of(optimizer) is None:
            self.optimizer = SynGAP.wrap(optimizer, **{"model": self.model} | self._gate_options)
        if self.gate.generator is not None:
            raise ValueError(
                "the Trainer's checkpoints hold the states of torch's own generators alone, so a "
                "SynGAP with generator= would draw other labels after a resume: leave it out"
            )
        return self.optimizer

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss as the Trainer does; in training, add the teacher's or observe."""
        batch = dict(inputs)  # from which the Trainer takes labels that it smooths
        learns = model.training and torch.is_grad_enabled()
        teacher: Tensor | None = None
        if learns and self.protection is not None:  # first, when it takes the least memory
            teacher = self._teacher_loss(self.protection, num_items_in_batch)
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if self.protection is not None:
            loss = loss if teacher is None else teacher + loss
            return (loss, outputs) if return_outputs else loss
        if learns and not self._observes and not self.gate.has_importance:
            raise RuntimeError(
                "with observe=False nothing is known to protect: call trainer.consolidate(dataset) "
                "before train()"
            )
        if learns and self._observes and self.gate.is_due():
            if self._observed_at != self.state.global_step:
                self.gate.discard()  # what a skipped step left: the Trainer clears gradients alone
                self._observed_at = self.state.global_step
            prediction, mask = self.predictions(batch, outputs)
            # Where all is padding, other processes may have more: then all have to take part.
            if mask is None or self.accelerator.num_processes > 1 or mask.any():
                self.gate.observe(prediction, mask=mask)
        return (loss, outputs) if return_outputs else loss

    def predictions(
        self, inputs: Mapping[str, Any], outputs: Any
    ) -> tuple[Tensor | Distribution, Tensor | None]:
        """Return what a forward pass predicted, and a mask of what counts; None is all.

        A prediction counts where the loss does: labels of -100 are left out, and in a decoder a
        position predicts the label after it. Without labels all counts but padding. Override it
        for a model with another output than `logits`, or a loss that is another likelihood.
        """
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if logits is None:
            raise TypeError(
                f"{type(self.model).__name__} returned no logits to observe (a fused loss may "
                "skip them): switch that off, or override SynGAPTrainer.predictions"
            )
        labels, attended = inputs.get("labels"), inputs.get("attention_mask")
        config = getattr(self.model, "config", None)
        problem = getattr(config, "problem_type", None)
        if problem == "regression" or (logits.dim() == 2 and logits.shape[-1] == 1):
            return Normal(logits, 1.0), None
        if problem == "multi_label_classification":
            return Bernoulli(logits=logits), None
        if problem is None and labels is None and logits.dim() == 2 and config is not None:
            raise ValueError(
                "without labels it is not known what these logits predict: set "
                'model.config.problem_type to "single_label_classification" or '
                '"multi_label_classification"'
            )
        if labels is not None:
            counts = labels != _IGNORED
            return logits, _one_earlier(counts) if self._is_decoder() else counts
        if attended is not None and attended.shape == logits.shape[:-1]:
            return logits, attended.bool()
        return logits, None

    def consolidate(self, dataset: Any) -> None:
        """Protect what the model knows: take importance from `dataset` before `train()`.

        Labels are not needed. What the model was trained on serves, and so does what it generates
        itself. It is collated as other data is and cut into `per_device_eval_batch_size`: small
        batches give less noise. A run that is resumed has the importance of its checkpoint.

        Args:
            dataset: what `predict` takes, such as a list of `{"input_ids": tokens}`.
        """
        if self.protection is not None:
            raise ValueError("protect= has taken importance already: leave out consolidate()")
        if self.model_init is not None:
            raise ValueError(
                "model_init= makes a new model and optimizer in train(), which would lose what "
                "consolidate() took: give the Trainer a model"
            )
        self.create_optimizer()

        def predict(batch: Any) -> Tensor | Distribution:
            inputs = self._prepare_inputs(batch)
            prediction, mask = self.predictions(inputs, self.model(**inputs))
            if mask is None or isinstance(prediction, Distribution) or mask.all():
                return prediction
            return prediction[mask]

        self.gate.consolidate(self.model, self.get_test_dataloader(dataset), predict=predict)

    # Protection.

    def _protected(self, setting: Any) -> Protection:
        """Return the protection that `protect=` describes."""
        if self.model_init is not None:
            raise ValueError(
                "model_init= makes a new model in train(), and protect= is for the model of now: "
                "give the Trainer a model"
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "protect= takes importance before FSDP or DeepSpeed divide the weights, which then "
                "are others: use DDP, or for FSDP2 call syngap.protect in a loop of your own"
            )
        if isinstance(setting, Protection):
            if setting.model is not self.model:
                raise ValueError(
                    "protect= was made for another model: call syngap.protect(model, known) with "
                    "the model that the Trainer gets"
                )
            return setting
        if isinstance(self.optimizer, GatedOptimizer):
            raise ValueError(
                "the optimizer in optimizers= has a gate already: give protect= what "
                "syngap.protect returned, or an optimizer without a gate"
            )
        is_options = isinstance(setting, Mapping) and "known" in setting
        options: dict[str, Any] = dict(setting) if is_options else {"known": setting}
        known = self.known_batches(options.pop("known"))
        return protect_model(self.model, known, **{"predict": self.known_prediction} | options)

    def known_batches(self, known: Any) -> Any:
        """Return known inputs as `syngap.protect` takes them: a dataset is collated.

        Every process gets all of them, so that all have the same importance.
        """
        if isinstance(known, (Tensor, Mapping)):
            return known
        if isinstance(known, (bool, str, bytes)) or not (
            isinstance(known, Iterable) or hasattr(known, "__getitem__")
        ):
            raise TypeError(
                "protect= takes tokens, a dict as a tokenizer returns, a dataset, or options with "
                f'these as "known", got {type(known).__name__}'
            )
        if hasattr(known, "__len__") and hasattr(known, "__getitem__"):
            rows = [known[index] for index in range(len(known))]
        else:
            rows = list(known)
        if any(isinstance(row, (str, bytes)) for row in rows):
            raise TypeError(f"protect= has texts: pass their tokens, {AS_TOKENS}")
        size = self.args.per_device_eval_batch_size
        collate = self._get_collator_with_removed_columns(self.data_collator, "known inputs")
        labels = {"labels", *(self.label_names or ())}
        batches = []
        # A collator that masks at random does the same after a resume.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.args.seed)
            for first in range(0, len(rows), size):
                batch = collate(rows[first : first + size])
                batches.append({name: batch[name] for name in batch if name not in labels})
        if rows and not any(batches):
            names = ", ".join(rows[0]) if isinstance(rows[0], Mapping) else type(rows[0]).__name__
            raise TypeError(
                f"rows of protect= have nothing that the model takes; they have {names}: tokenize "
                "texts first"
            )
        return batches

    def known_prediction(self, batch: Any) -> Tensor | Distribution:
        """Return what the model predicts for a batch of known inputs."""
        inputs = batch if isinstance(batch, Mapping) else {}
        outputs = self.model(**batch) if inputs else self.model(batch)
        return self.predictions(inputs, outputs)[0]

    def _teacher_loss(self, protection: Protection, num_items_in_batch: Any) -> Tensor:
        """Return the teacher's loss, as a part of the mean over accumulated batches.

        The Trainer divides a loss by their number, but for one that the model divided by the number
        of all their tokens: the teacher's loss is not a part of that.
        """
        is_divided = getattr(self, "loss_is_scaled_for_ga", None)
        if is_divided is None:
            by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_divided = by_model or self.compute_loss_func is not None
        loss = protection.loss()
        return loss / self.current_gradient_accumulation_steps if is_divided else loss

    def _is_decoder(self) -> bool:
        generates = getattr(self.model, "can_generate", None)
        return bool(generates and generates() and not self.model.config.is_encoder_decoder)


def _gate_of(optimizer: Any) -> GatedOptimizer | None:
    """Return the SynGAP optimizer that accelerate may have wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, GatedOptimizer) else None


def _one_earlier(counts: Tensor) -> Tensor:
    """Shift a mask (N, T) of tokens to the positions that predict them."""
    return torch.nn.functional.pad(counts[:, 1:], (0, 1))
