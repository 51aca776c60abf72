"""SynGAP in the Trainer of Hugging Face transformers: the gate before the optimizer it makes.

The Trainer's `compute_loss` is where forward pass and graph are both at hand, so that is where
`SynGAPTrainer` observes. Importance is in the optimizer's state and labels are drawn from torch's
own generators: both are in the Trainer's checkpoints, so a resumed run takes the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Normal
from transformers import Trainer

from syngap.optim import GatedOptimizer, SynGAP

__all__ = ["SynGAPTrainer"]

_IGNORED = -100  # the label that the losses of transformers leave out


class SynGAPTrainer(Trainer):
    """A Trainer whose optimizer is behind the gate, and observes each forward pass.

    The optimizer is what `TrainingArguments` ask for, or what `optimizers` gives, behind
    `SynGAP.wrap`. Accumulation, clipping, bf16, schedulers, evaluation and checkpoints are the
    Trainer's own. Another trainer that derives from Trainer gets the same by inheritance:

        class GatedSFTTrainer(SynGAPTrainer, SFTTrainer): ...

    Args:
        *args: what Trainer takes.
        gate: options of `SynGAP.wrap`, such as `{"consolidation": 0.999}`.
        observe: False keeps the importance that `consolidate` took as it is: a backward pass less
            each step, and nothing of it fades.
        **kwargs: what Trainer takes.

    Examples:
        >>> trainer = SynGAPTrainer(model, args, train_dataset=new, gate={"consolidation": 0.999})
        ... # doctest: +SKIP
        >>> trainer.consolidate(old_texts)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        gate: Mapping[str, Any] | None = None,
        observe: bool = True,
        **kwargs: Any,
    ) -> None:
        self._gate_options = dict(gate or {})
        self._observes = observe
        self._observed_at = -1  # the step that the last observation was for
        super().__init__(*args, **kwargs)
        if self._gate_options and isinstance(self.optimizer, GatedOptimizer):
            raise ValueError(
                "the optimizer in optimizers= is a SynGAP already: give it the options of gate= "
                "where it is made"
            )

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
        """Compute the loss as the Trainer does; in training, let the optimizer observe."""
        given = dict(inputs)  # from which the Trainer takes labels that it smooths
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        learns = model.training and torch.is_grad_enabled()
        if learns and not self._observes and not self.gate.has_importance:
            raise RuntimeError(
                "with observe=False nothing is known to protect: call trainer.consolidate(dataset) "
                "before train()"
            )
        if learns and self._observes and self.gate.is_due():
            if self._observed_at != self.state.global_step:
                self.gate.discard()  # what a skipped step left: the Trainer clears gradients alone
                self._observed_at = self.state.global_step
            prediction, mask = self.predictions(given, outputs)
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

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse weights along directions for a model that has none, and the reverse."""
        names = [*load_result.missing_keys, *load_result.unexpected_keys]
        rotated = [name for name in names if ".parametrizations.weight." in name]
        if rotated:
            raise ValueError(
                "of checkpoint and model one is rotated "
                f"({rotated[0]} and {len(rotated) - 1} more): rotate(model, ...) or "
                "unrotate(model) before the trainer gets it"
            )
        super()._issue_warnings_after_load(load_result)

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
