"""`syngap.protect` and SynGAP in Lightning 2: a callback.

`SynGAPCallback(protect=protection)` adds the teacher's loss to what `training_step` returns, where
`configure_optimizers` returns `protection.optimizer(...)`. Without `protect`, `training_step` calls
`self.optimizers().observe(logits)`.

With automatic optimization a batch is `training_step`, `zero_grad` and `backward`, in this order,
all of it in the closure that `optimizer.step` calls. `zero_grad` would discard what `training_step`
observed, so the callback holds it back until `backward` is about to run. Loss scaling and clipping
act on the loss and on gradients, neither of which importance is taken from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from syngap.optim import GatedOptimizer
from syngap.protection import Protection

__all__ = ["SynGAPCallback"]

_KEY = "syngap"  # of what this callback adds to a checkpoint
_trained: WeakSet[LightningModule] = WeakSet()  # modules that a SynGAP optimizer knows already


class SynGAPCallback(Callback):
    """Lets SynGAP optimizers observe at the right moment, and says when they never do.

    Importance is in the optimizer's state, so checkpoints have it anyway. What is added to them is
    the state of the random generators that labels are drawn from, so that a resumed run draws what
    it would have drawn: that of the optimizer's own `generator`, and in a single process torch's.

    Args:
        output_of: name of a submodule that returns the logits, such as "net": what it returns in
            `training_step` is observed, without a line there.
        summaries: write `optimizer.summary()` to the trainer's loggers, as often as its
            `log_every_n_steps` says.
        protect: what `syngap.protect` returned for the module, or for a part of it, on the device
            that it is trained on. Make it again from the same weights before a run is resumed.

    Examples:
        >>> protection = syngap.protect(module.net, known)  # doctest: +SKIP
        >>> module.protection = protection  # doctest: +SKIP
        >>> class Protected(LightningModule):
        ...     def configure_optimizers(self):
        ...         return self.protection.optimizer(torch.optim.AdamW(self.parameters(), lr=1e-3))
        >>> trainer = Trainer(callbacks=[SynGAPCallback(protect=protection)])  # doctest: +SKIP
        >>> trainer.fit(module, batches)  # doctest: +SKIP

        Or with importance that is observed all the time:

        >>> from syngap import SynGAP
        >>> class Classifier(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Linear(4, 3)
        ...
        ...     def training_step(self, batch):
        ...         inputs, labels = batch
        ...         logits = self.net(inputs)
        ...         self.optimizers().observe(logits)
        ...         return nn.functional.cross_entropy(logits, labels)
        ...
        ...     def configure_optimizers(self):
        ...         return SynGAP(self.parameters(), lr=0.3)
        >>> trainer = Trainer(callbacks=[SynGAPCallback()])  # doctest: +SKIP
        >>> trainer.fit(Classifier(), batches)  # doctest: +SKIP
    """

    def __init__(
        self,
        output_of: str | None = None,
        *,
        summaries: bool = True,
        protect: Protection | None = None,
    ) -> None:
        if protect is not None and not isinstance(protect, Protection):
            raise TypeError(
                "protect= takes what syngap.protect(module, known) returned, got "
                f"{type(protect).__name__}"
            )
        if protect is not None and output_of is not None:
            raise ValueError("protect= observes nothing: leave out output_of=")
        self.protection = protect
        self.output_of = output_of
        self.summaries = summaries
        self._optimizers: list[GatedOptimizer] = []
        self._silent: set[GatedOptimizer] = set()  # the ones of which no observation is known
        # Observations, until the backward pass, and whose they are.
        self._waiting: list[tuple[GatedOptimizer, Callable[[], None]]] = []
        self._drawn: dict[int, Tensor] = {}  # states of generators, from a checkpoint
        self._step = 0  # as the trainer counts: by optimizer
        self._batches = 0  # that ended in a step, by which Lightning logs
        self._afterwards = ExitStack()

    # Observing.

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the SynGAP optimizers, and be there when they observe."""
        if sum(isinstance(one, SynGAPCallback) for one in trainer.callbacks) > 1:
            raise MisconfigurationException("there are two SynGAPCallback: one does for all")
        optimizers = pl_module.optimizers()
        stand_ins = {
            one.optimizer: one
            for one in (optimizers if isinstance(optimizers, list) else [optimizers])
            if isinstance(one.optimizer, GatedOptimizer)
        }
        self._check_protection(pl_module)
        needs_gate = self.protection is None or bool(self.protection.known)
        if not stand_ins and needs_gate:
            names = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise MisconfigurationException(
                f"SynGAPCallback found no SynGAP optimizer, configure_optimizers gave {names}: "
                "return SynGAP(self.parameters(), lr=...), SynGAP.wrap(...) or "
                "protection.optimizer(...)"
            )
        self._optimizers = list(stand_ins)
        self._silent = set(stand_ins)
        for optimizer, stand_in in stand_ins.items():
            self._connect(optimizer, stand_in, pl_module)
        if self.output_of is not None:
            self._watch(self.output_of, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Forget what a `training_step` left that returned no loss."""
        self._waiting.clear()

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Observe what waits: old gradients are cleared, and the graph is still there."""
        for optimizer, observe in self._waiting:
            observe()
            self._silent.discard(optimizer)
        self._waiting.clear()
        if self.protection is not None:
            self._add_teacher_loss(self.protection, trainer, loss)

    def _check_protection(self, module: LightningModule) -> None:
        """Refuse a protection of another model, and a module that calls backward by itself."""
        if self.protection is None:
            return
        if not module.automatic_optimization:
            raise MisconfigurationException(
                "with manual optimization add protection.loss() to the loss in training_step, and "
                "leave out protect="
            )
        own = set(module.parameters())
        if not own.issuperset(self.protection.model.parameters()):
            raise MisconfigurationException(
                f"protect= was made for another model than this {type(module).__name__}"
            )

    @staticmethod
    def _add_teacher_loss(protection: Protection, trainer: Any, loss: Tensor) -> None:
        """Add the teacher's loss in place: Lightning made this loss by dividing that of the step.

        It was divided by the number of batches that accumulate, and scaled for half precision.
        """
        plugin = trainer.precision_plugin
        with plugin.train_step_context():
            teacher = protection.loss() / trainer.accumulate_grad_batches
        scaler = getattr(plugin, "scaler", None)
        loss.add_((teacher if scaler is None else scaler.scale(teacher)).to(loss.dtype))

    def _connect(
        self, optimizer: GatedOptimizer, stand_in: LightningOptimizer, module: LightningModule
    ) -> None:
        """Lead what `self.optimizers()` returns to the optimizer itself.

        Lightning's stand-in inherits the optimizer's methods: what they set would stay in it.
        """
        own = {name: getattr(optimizer, name) for name in ("consolidate", "zero_grad")}
        own["observe"] = partial(self._observe, optimizer, module)
        for name, method in own.items():
            setattr(stand_in, name, method)
            self._afterwards.callback(delattr, stand_in, name)

    def _observe(
        self, optimizer: GatedOptimizer, module: LightningModule, *args: Any, **options: Any
    ) -> None:
        if self.output_of is not None:
            raise MisconfigurationException(
                f"SynGAPCallback(output_of={self.output_of!r}) observes already: leave out either "
                "that or observe(logits) in training_step"
            )
        observe = partial(optimizer.observe, *args, **options)
        if module.automatic_optimization and module.trainer.training:
            self._waiting.append((optimizer, observe))
        else:
            observe()
            self._silent.discard(optimizer)

    def _watch(self, name: str, module: LightningModule) -> None:
        """Let what a submodule returns in `training_step` wait to be observed."""
        if len(self._optimizers) > 1:
            raise MisconfigurationException(
                f"SynGAPCallback(output_of={name!r}) is for one SynGAP optimizer, got "
                f"{len(self._optimizers)}: call observe(logits) on each in training_step"
            )
        submodules = {path: one for path, one in module.named_modules() if path}
        if name not in submodules:
            known = ", ".join(child for child, _ in module.named_children())
            raise MisconfigurationException(
                f"SynGAPCallback(output_of={name!r}) names no submodule of "
                f"{type(module).__name__}, which has {known}"
            )
        (optimizer,) = self._optimizers

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if module.trainer.training and torch.is_grad_enabled():
                self._waiting.append((optimizer, partial(optimizer.observe, output)))

        self._afterwards.callback(submodules[name].register_forward_hook(hook).remove)

    # Looking.

    def on_train_batch_end(
        self,
        trainer: Any,  # a Trainer, whose log_every_n_steps is not declared
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """After a step, log; after the first one, ask whether anything was observed."""
        if trainer.global_step == self._step:
            return  # between the batches of one accumulation
        self._step = trainer.global_step
        self._batches += 1
        for optimizer in self._silent:
            if _steps(optimizer) and not optimizer.has_importance:
                before = "" if pl_module.automatic_optimization else " before manual_backward"
                raise MisconfigurationException(
                    "SynGAP took a step and has observed nothing yet: call "
                    f"self.optimizers().observe(logits) in training_step{before}, or name the "
                    "submodule that returns logits by SynGAPCallback(output_of=...)"
                )
        every = trainer.log_every_n_steps
        if self.summaries and trainer.loggers and every and self._batches % every == 0:
            summary = self._summary()
            for logger in trainer.loggers:
                logger.log_metrics(summary, step=self._batches - 1)  # as Lightning numbers them

    def _summary(self) -> dict[str, float]:
        summaries = [optimizer.summary() for optimizer in self._optimizers]
        if len(summaries) == 1:
            return summaries[0]
        return {
            f"{key}/optimizer-{index}": value
            for index, summary in enumerate(summaries)
            for key, value in summary.items()
        }

    # From one fit to the next.

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add where the random generators are, and how often the teacher was asked."""
        device = trainer.strategy.root_device.type
        torchs = {"cpu": torch.get_rng_state()}
        if device != "cpu":
            torchs[device] = torch.get_device_module(device).get_rng_state()
        own = {index: one.get_state() for index, one in self._own_generators().items()}
        checkpoint[_KEY] = {"torch": torchs, "own": own}
        if self.protection is not None:
            checkpoint[_KEY]["drawn"] = self.protection.calls

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put torch's generators back, before any batch is drawn; the others when they are made."""
        if not trainer.training or _KEY not in checkpoint:
            return
        self._drawn = checkpoint[_KEY]["own"]
        if self.protection is not None:
            self.protection.calls = checkpoint[_KEY].get("drawn", 0)
        if trainer.world_size > 1:
            return  # there are the states of one process alone
        device = trainer.strategy.root_device.type
        for kind, state in checkpoint[_KEY]["torch"].items():
            if kind == "cpu":
                torch.set_rng_state(state)
            elif kind == device:
                torch.get_device_module(kind).set_rng_state(state)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the optimizers' generators back, and see whether earlier importance is lost."""
        self._step = trainer.global_step
        self._batches = self._step // len(trainer.optimizers)
        for index, generator in self._own_generators().items():
            if index in self._drawn:
                generator.set_state(self._drawn[index])
        self._drawn = {}
        if pl_module in _trained and not any(one.has_importance for one in self._optimizers):
            rank_zero_warn(
                f"this {type(pl_module).__name__} was trained before, and its SynGAP optimizer is "
                "a new one that knows nothing of it: make the optimizer once, in __init__, and "
                "return it from configure_optimizers"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember which modules have learned something that an optimizer protects."""
        _trained.add(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module and the optimizers as they were."""
        self._waiting.clear()
        self._afterwards.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the module and the optimizers as they were."""
        self.teardown(trainer, pl_module, "fit")

    def _own_generators(self) -> dict[int, torch.Generator]:
        generators = enumerate(optimizer.generator for optimizer in self._optimizers)
        return {index: one for index, one in generators if one is not None}


def _steps(optimizer: GatedOptimizer) -> int:
    return int(optimizer.param_groups[0]["steps"])
