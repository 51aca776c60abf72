"""What every optimizer with a gate has: the calls of a loop, and torch's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.optimizer import Optimizer, ParamsT

from syngap.optim import gate_changes
from syngap.optim.checks import check_counts, check_options, check_params
from syngap.optim.direction_checks import check_directions, check_kind, check_protection
from syngap.optim.directions import require_whole
from syngap.optim.gate import Gate, States
from syngap.optim.parameter_state import (
    IMPORTANCE,
    VERSION,
    basis_in,
    grown,
    require_growth,
    unshared,
    without_directions,
)
from syngap.optim.predictions import Predict, Progress
from syngap.optim.state_checks import (
    check_groups,
    check_states,
    forms_of,
    match,
    unchanged_on_error,
)
from syngap.optim.summary import summarize
from syngap.optim.tensors import wide
from syngap.optim.update import Work

__all__ = ["GatedOptimizer", "add_counts"]


def add_counts(options: dict[str, Any], behind: str | None) -> dict[str, Any]:
    """Return the options of a group with what it says of its state.

    Args:
        options: the options.
        behind: the kind of optimizer that is behind the gate, None for SynGAP itself.
    """
    return options | {"behind": behind, "version": VERSION, "steps": 0, "skipped": 0}


class GatedOptimizer(Optimizer):
    """An optimizer whose update goes through a gate: `SynGAP`, and what `SynGAP.wrap` returns.

    Args:
        gate: what holds the update back.
        params: parameters or groups of them.
        defaults: options that a group may set.
    """

    _gate: Gate

    def __init__(self, gate: Gate, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._gate = gate
        super().__init__(params, defaults)

    @property
    def gate(self) -> Gate:
        """The gate, with the parameter groups and states that this optimizer has now."""
        self._gate.bind(self.param_groups, self._states())
        return self._gate

    def _states(self) -> Sequence[States]:
        return (self.state,)

    # The loop's calls.

    def observe(
        self,
        prediction: Tensor | Distribution,
        *,
        targets: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """Take importance from a forward pass, before its loss's `backward()`.

        It is folded in by the next `step()`, and discarded by `zero_grad()` as gradients are.
        Several calls before a step average by prediction. `.grad` is never touched.

        Args:
            prediction: logits (N, C) or (N, ..., C), each (..., C) row one prediction; or a
                distribution, each element of its batch one prediction. The batch comes first.
            targets: true labels, used by estimator "empirical" alone; -100 leaves a position out.
            mask: boolean, one entry a prediction; False (padding) leaves it out.
        """
        self._refuse_stand_ins()
        self.gate.observe(prediction, targets, mask)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # imports dynamo at the first call, not here
    @torch.no_grad()
    def _begin_step(self) -> list[Work] | None:
        """Return the work of a step, None for one that is left out."""
        return self.gate.begin_step()

    def _refuse_stand_ins(self) -> None:
        """Raise where `self` is Lightning's copy of an optimizer: what it notes would be lost."""
        if any(kind.__name__ == "LightningOptimizer" for kind in type(self).__mro__):
            raise RuntimeError(
                "self.optimizers() of Lightning is a stand-in, and what it observes does not reach "
                "SynGAP: add SynGAPCallback() of syngap.integrations.lightning to the trainer's "
                "callbacks"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and what was observed since the last step."""
        self.gate.warn_of_discard()
        super().zero_grad(set_to_none)
        self.discard()

    def discard(self) -> None:
        """Forget what was observed since the last step, and leave gradients and importance alone.

        For a loop that clears gradients without `zero_grad()`, after a step that was skipped.
        """
        self.gate.discard()

    def is_due(self) -> bool:
        """Return whether the next step refreshes importance."""
        return self.gate.is_due()

    def elapsed(self) -> int:
        """Return how many steps importance moves on by in the next step that refreshes it."""
        return self._gate.schedule.elapsed(self.gate.steps)

    def count(self) -> None:
        """Count a step that a CUDA graph replayed: it runs no Python, so `step()` did not."""
        self.gate.count_replay()

    def refreshes_directions(self) -> bool:
        """Return whether the next step refreshes directions, which no CUDA graph can do."""
        return self.gate.refreshes_directions()

    # To look at.

    @torch.no_grad()
    def importance(self) -> dict[str, Tensor] | list[Tensor]:
        """Return F of each parameter: by name where `model` was given, else in parameter order.

        The tensors are the optimizer's own, in bfloat16 if it is `compact`: copy them before
        changing anything.
        """
        gate = self.gate
        return self._by_name([gate.importance_of(param) for param in gate.params()])

    @property
    def has_importance(self) -> bool:
        """Whether anything was observed yet, or consolidated, or loaded: else the gate is even."""
        return self._gate.has_importance

    @property
    def skipped(self) -> int:
        """How many steps were left out, as their gradients were not finite."""
        return int(self.param_groups[0]["skipped"])

    @property
    def generator(self) -> torch.Generator | None:
        """What labels are drawn from; None is torch's own."""
        return self._gate.estimator.generator

    @torch.no_grad()
    def plasticity(self) -> dict[str, Tensor] | list[Tensor]:
        """Return the mask Ω of each parameter, in the form that `importance()` has."""
        gate = self.gate
        network = gate.network_mean()
        return self._by_name(
            [
                gate.mask(group, param, wide(gate.importance_of(param)), network)
                for group in gate.groups
                for param in group["params"]
            ]
        )

    def _by_name(self, tensors: list[Tensor]) -> dict[str, Tensor] | list[Tensor]:
        gate = self.gate
        names = gate.model_names()
        if names is None:
            return tensors
        return {names[p]: tensor for p, tensor in zip(gate.params(), tensors, strict=True)}

    @torch.no_grad()
    def summary(self) -> dict[str, float]:
        """Return numbers to log: means and quantiles of the mask, overall and by tensor, and μ/λ.

        With `non_finite="skip"` also how many steps were left out.

        Means of the mask and quantiles are taken over at most 1024 values of each tensor.

        Examples:
            >>> from syngap import SynGAP
            >>> model = nn.Linear(2, 2)
            >>> summary = SynGAP(model.parameters(), lr=0.1, model=model).summary()
            >>> sorted(key for key in summary if "weight" in key)[:3]
            ['importance/weight/mean', 'plasticity/weight/mean', 'plasticity/weight/q05']
        """
        summary = summarize(self.gate)
        return summary | ({"skipped": self.skipped} if self._gate.non_finite == "skip" else {})

    # Before and between.

    def consolidate(
        self,
        model: nn.Module,
        inputs: Tensor | Iterable[Any],
        *,
        batch_size: int = 32,
        predict: Predict | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Set importance from unlabelled inputs, so that what the model knows is protected at once.

        The Fisher information needs no labels. Typical inputs are a sample of what a pre-trained
        model was trained on, or its own samples. Their mean importance replaces what was there;
        later observations fade it at the rate of `retention`, and a loop that never observes keeps
        it. The model runs in eval mode; its modes, buffers and gradients and the states of torch's
        random generators are afterwards what they were.

        Args:
            model: the model whose parameters this optimizer holds.
            inputs: batches for the model (a tensor, a tuple of arguments or a dict of keyword
                arguments each), or one tensor to be cut into batches. For pairs of inputs and
                labels pass `predict=lambda batch: model(batch[0])`.
            batch_size: length of the batches cut from a tensor. Smaller ones cost more time and
                give the "sampled" estimator less noise.
            predict: computes logits or a distribution from a batch in place of `model(batch)`.
            progress: called after each batch with the number done and, where known, of all.

        Examples:
            >>> from syngap import SynGAP
            >>> model = nn.Linear(4, 3)
            >>> optimizer = SynGAP(model.parameters(), lr=0.1)
            >>> optimizer.consolidate(model, torch.randn(256, 4))
            >>> optimizer.summary()["importance/mean"] > 0
            True
        """
        self._refuse_stand_ins()
        gate_changes.consolidate(
            self.gate, model, inputs, batch_size=batch_size, predict=predict, progress=progress
        )

    @torch.no_grad()
    def grow(self, old: Tensor, new: Tensor) -> None:
        """Let `new` take the place of `old`, a smaller parameter whose entries it begins with.

        For a head that gains rows: importance and momentum of the old entries stay, those of the
        new ones start at zero, so they are free to learn.

        Args:
            old: a parameter of this optimizer.
            new: the parameter that replaced it in the model, at least as large in every dimension.

        Examples:
            >>> from syngap import SynGAP
            >>> small, large = nn.Linear(4, 2), nn.Linear(4, 3)
            >>> optimizer = SynGAP(small.parameters(), lr=0.1)
            >>> optimizer.grow(small.weight, large.weight)
            >>> optimizer.grow(small.bias, large.bias)
            >>> [tuple(value.shape) for value in optimizer.importance()]
            [(3, 4), (3,)]
        """
        gate_changes.grow(self.gate, old, new)

    def snapshot(self) -> list[States]:
        """Return what is known of each parameter now, for a framework that may lose it.

        The first is importance, with momentum of SynGAP itself; a second one is the state of a
        wrapped optimizer. Tensors are not copied.
        """
        return [dict(states) for states in self._states()]

    @torch.no_grad()
    def inherit(
        self,
        snapshot: Sequence[States],
        replaced: Iterable[tuple[Tensor, Tensor]],
        *,
        momentum: bool = True,
    ) -> None:
        """Give parameters what a snapshot knows of those that they replaced.

        The optimizer has its new parameters already. One that is larger keeps what was known of the
        old entries, as with `grow`; one of another shape starts afresh.

        Args:
            snapshot: what `snapshot()` returned.
            replaced: pairs of an old parameter and the one that is there now, or twice the same.
            momentum: whether all is kept, or importance alone.
        """
        rotated = {
            param
            for group in self.param_groups
            if group.get("rotated")
            for param in group["params"]
        }
        for old, new in replaced:
            basis = basis_in(snapshot[0].get(old, {})) if new in rotated else None
            for states, known in zip(self._states(), snapshot, strict=True):
                states.pop(old, None)
                kept = known.get(old, {})
                if not momentum:
                    kept = {key: kept[key] for key in IMPORTANCE if key in kept}
                if new is not old:
                    try:
                        require_growth(old, new, [known])
                    except ValueError:
                        continue
                    kept = grown(kept, old, new, basis)
                if kept:
                    states[new] = kept
        self._gate.estimator.attach()

    # torch.optim's own.

    def _check_last_group(self) -> None:
        try:
            check_params(self.param_groups[-1]["params"])
            require_whole(self.param_groups[-1]["params"], self._gate.directions)
            self.gate.model_names()
        except ValueError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, but no two entries in the same memory.

        Layers with the same inputs share directions, which some file formats refuse to save.
        """
        gate_changes.take_known(self.gate)
        return unshared(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` gave; importance keeps its precision whatever θ's is.

        Everything is checked first. A state with numbers, shapes or options that this optimizer
        cannot have is refused by a ValueError that names the entry, and nothing has changed then.
        """
        with unchanged_on_error(self.param_groups, self, self._gate):
            self._load(state_dict)
        self._gate.estimator.record(self.is_due())

    def _load(self, state_dict: dict[str, Any]) -> None:
        gate_changes.take_known(self.gate)
        saved: dict[Tensor, dict[str, Any]] = {}
        own = dict(self.state)

        def check(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            saved.update(self._checked(final))
            # torch would bring directions into the parameters' type, which may be twice as large.
            states = final["state"].items()
            return final | {"state": {index: without_directions(state) for index, state in states}}

        # As the last hook, because a hook may replace what is loaded.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)  # an option that the saving version did not have
            group["version"] = VERSION
        gate_changes.restore(self.gate, saved, own)

    def _checked(self, state_dict: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """Return a state by parameter, after a look at all of it."""
        saved, groups = match(state_dict, self.param_groups), state_dict["param_groups"]
        check_kind(groups, self.param_groups)
        check_protection(groups, self.param_groups)
        check_groups(groups, self.param_groups, self._check_options)
        names = self.gate.names()
        check_directions(saved, self.state, self.param_groups, names, self._gate.directions)
        check_states(saved, self.state, forms_of(self), names)
        return saved

    def _check_options(self, options: dict[str, Any]) -> None:
        """Check the options of a group."""
        check_options(options)
        check_counts(options)

    def __getstate__(self) -> dict[str, Any]:
        """Give copy and pickle the gate, which torch's Optimizer would leave out."""
        return super().__getstate__() | {"_gate": self._gate}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` gave, or the part of it that torch loads."""
        super().__setstate__(state)
        if "_gate" in state:  # torch comes by here also to load a state
            self._gate = copy(self._gate)  # a shallow copy of the optimizer has its own
        self.gate.reset_caches()
