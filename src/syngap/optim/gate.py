"""The gate: how important parameters are, and how much of their update it lets through.

    F ← α F + (1 - α) E[(∇ log p(y|x))²],  y drawn from the model's own prediction
    Ω = 1 - tanh(c (F + λ)) + ε,           c = arctanh(τ) / (mean of F + λ)

`SynGAP` sends gradient descent through a gate, `SynGAP.wrap` the update of another optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from syngap.optim import errors
from syngap.optim.basis import Basis, share_stacks, stack_alike
from syngap.optim.checks import NonFinite, check_changed_options, check_compact, check_named
from syngap.optim.compact import first_turn, shared_turn
from syngap.optim.directions import Directions, first_state, follow, second_moments
from syngap.optim.fisher import Estimator, Observation, Schedule, merged
from syngap.optim.knowledge import Knowledge, adopt_knowledge
from syngap.optim.parameter_state import basis_in, names_of
from syngap.optim.plasticity import Means, damping_notice, mask_of_group
from syngap.optim.scores import require_graph
from syngap.optim.tensors import accumulator, alike, gathered, no_importance, require_dense, wide
from syngap.optim.update import Work, nonfinite_gradients

__all__ = ["Gate", "States"]

States = dict[Tensor, dict[str, Any]]  # what an optimizer keeps, by parameter


class Gate:
    """Importance of parameters, and the masks that follow from it.

    A gate belongs to one optimizer, in whose state importance is, and in whose parameter groups the
    gate's options and counts of steps are: there torch saves and loads them.

    Args:
        estimator: estimates the Fisher diagonal from a prediction.
        schedule: at which steps.
        compact: whether importance is kept in bfloat16.
        non_finite: what a step does about gradients that are not finite; see `SynGAP`.
        option_names: the options of groups that are checked where they are used.
        directions: how directions of weights follow the scores; None where they do not.

    Attributes:
        groups: the parameter groups.
        states: what is kept by parameter: importance, and for `grow` what a wrapped optimizer has.
        has_importance: whether anything was observed yet, or consolidated, or loaded.
        observation: what was observed since the last step.
        knowledge: what `syngap.protect` knows, which parameters have from their first step on.
    """

    knowledge = Knowledge()

    def __init__(
        self,
        estimator: Estimator,
        schedule: Schedule,
        *,
        compact: bool,
        non_finite: NonFinite | None,
        option_names: tuple[str, ...],
        directions: Directions | None = None,
    ) -> None:
        check_compact(compact)
        self.estimator, self.schedule, self.directions = estimator, schedule, directions
        self.compact, self.non_finite, self.option_names = compact, non_finite, option_names
        self.has_importance = False
        self.notices = errors.Notices()
        self.observation: Observation | None = None
        self.bind([], ())
        self.reset_caches()

    def reset_caches(self) -> None:
        """Forget what is derived from states and gradients."""
        self._means: Means | None = None
        self._works: list[Work] = []  # of a step along directions, while importance stays
        self._checked_options: dict[int, tuple[Any, ...]] = {}  # by number of the group
        self._grads_then: list[tuple[int, int] | None] = []  # when it was observed

    def bind(self, groups: list[dict[str, Any]], states: Sequence[States]) -> None:
        """Work on an optimizer's groups and states, which torch replaces where it loads one."""
        self.groups, self.states = groups, states

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what copies do not share, and what the optimizer's own state has."""
        own = {"groups", "states", "_means", "_works", "_checked_options", "_grads_then"}
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.bind([], ())
        self.reset_caches()

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return int(self.groups[0]["steps"])

    @property
    def is_capturable(self) -> bool:
        """Whether nothing may wait for the device."""
        return any(group.get("capturable", False) for group in self.groups)

    def params(self) -> list[Tensor]:
        """Return all parameters."""
        return [param for group in self.groups for param in group["params"]]

    def trainable(self) -> list[Tensor]:
        """Return those that are not frozen."""
        return [param for param in self.params() if param.requires_grad]

    def model_names(self) -> dict[Tensor, str] | None:
        """Return the parameters' names in the model, None without a model."""
        names = self.estimator.names()
        if names is not None:
            check_named(self.params(), names)
        return names

    def names(self) -> dict[Tensor, str]:
        """Return their names in the model, else those of named parameters, else their numbers."""
        return names_of(self.groups) | (self.estimator.names() or {})

    def check_options(self) -> None:
        """Check options of groups that somebody changed, where they are used.

        A value that is the same object as at the last check has passed it, so that a step costs a
        few comparisons of addresses.
        """
        for number, group in enumerate(self.groups):
            now = tuple(map(group.get, self.option_names))
            passed = self._checked_options.get(number, ())
            are_same = len(now) == len(passed) and all(map(is_, now, passed))
            counts = group["steps"], group["skipped"]
            are_counts = all(type(count) is int and count >= 0 for count in counts)
            if not (are_same and are_counts) or Tensor in map(type, now):
                if check_changed_options(number, group, self.option_names, passed):
                    self._works = []
                self._checked_options[number] = now

    # What is known.

    def importance_of(self, param: Tensor) -> Tensor:
        """Return F of a parameter."""
        importance: Tensor | None = self._kept(param).get("importance")
        return no_importance(param, self.compact) if importance is None else importance

    def _kept(self, param: Tensor) -> dict[str, Any]:
        is_known = param in self.knowledge.by_param
        return self.state_of(param) if is_known else self.states[0].get(param, {})

    def basis_of(self, param: Tensor) -> Basis | None:
        """Return the coordinates of a parameter, None where they are its entries."""
        state = self._kept(param)
        if self.directions is not None and "importance" not in state:
            state = first_state(param, self.directions)
        return basis_in(state) if "left" in state or "right" in state else None

    def rotation_of(self, param: Tensor) -> Basis | None:
        """Return the coordinates that an optimizer behind the gate has its own state in."""
        groups = (group for group in self.groups if any(each is param for each in group["params"]))
        is_rotated = any(group.get("rotated", False) for group in groups)
        return self.basis_of(param) if is_rotated else None

    def mean_of(self, param: Tensor) -> Tensor:
        """Return the mean of F over a parameter."""
        mean: Tensor | None = self._kept(param).get("mean")
        if mean is None:
            return torch.zeros((), dtype=accumulator(param.dtype), device=param.device)
        return mean

    def network_mean(self) -> Tensor:
        """Return μ: the mean of F over all parameters that are not frozen."""
        self.check_options()
        return self.current_means().network()

    def mask(
        self, group: dict[str, Any], param: Tensor, importance: Tensor, network: Tensor
    ) -> Tensor:
        """Return Ω for some importance of a parameter of a group."""
        mean = self.mean_of(param) if group["scope"] == "tensor" else network
        return mask_of_group(importance, mean.to(param.device), group)

    # When importance is refreshed.

    def is_due(self) -> bool:
        """Return whether the next step refreshes importance."""
        return self.schedule.is_due(self.steps)

    def refreshes_directions(self) -> bool:
        """Return whether the next step refreshes directions, which no CUDA graph can do."""
        how = self.directions
        return how is not None and self.is_due() and how.is_refresh(self.groups[0])

    def count(self) -> None:
        """Count a step."""
        for group in self.groups:
            group["steps"] += 1
        self.estimator.record(self.is_due())

    def count_replay(self) -> None:
        """Count a step that a CUDA graph replayed."""
        if self.refreshes_directions():
            raise RuntimeError(errors.REPLAYED_REFRESH)
        if self.directions is not None and self.is_due():
            self.directions.count(self.groups[0])
        self.count()

    # Observing.

    def observe(
        self, prediction: Tensor | Distribution, targets: Tensor | None, mask: Tensor | None
    ) -> None:
        """Take importance from a prediction, if it is due, and keep it for the next step."""
        self.check_options()
        if not self.is_due():
            if isinstance(prediction, Tensor):
                require_graph(prediction)  # a mistake shows at once, not at the next refresh
            return
        self.model_names()  # or a head that was replaced without grow() would never learn
        try:
            observation = self.estimator.estimate(
                prediction,
                self.trainable(),
                targets=targets,
                mask=mask,
                check=not self.is_capturable,
                leave_out=self.non_finite == "skip",
            )
        except errors.NotFiniteError as error:
            message = f"{error}, in step {self.steps + 1}"
            raise errors.nonfinite_error(message, self.groups) from None
        self.observation = merged(self.observation, self.in_coordinates(observation))
        self._grads_then = self._grads_now()

    @torch.no_grad()
    def in_coordinates(self, seen: Observation | None) -> Observation | None:
        """Bring scores into the coordinates of importance; their means are of all directions."""
        if seen is None or seen.squared:
            return seen
        for param, score in seen.values.items():
            basis = self.basis_of(param)
            if basis is not None:
                with torch.autocast(score.device.type, enabled=False):
                    whole = wide(gathered(score, param))
                    seen.values[param] = basis.into(whole)
                    if self.directions is not None:
                        seen.moments[param] = second_moments(whole, basis, seen.weight)
        return seen

    def discard(self) -> None:
        """Forget what was observed since the last step."""
        self.observation = None

    def warn_of_discard(self) -> None:
        """Warn where what was observed is discarded before any backward pass."""
        # After a step that GradScaler skipped there are new gradients: discarding both is right.
        if self.observation is not None and self._grads_then == self._grads_now():
            self.notices.warn("discarded", errors.DISCARDED)

    def _grads_now(self) -> list[tuple[int, int] | None]:
        """Return what tells whether a backward pass has been."""
        grads = [param.grad for param in self.params()]
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    # The step.

    def begin_step(self) -> list[Work] | None:
        """Check gradients, advance means and clock, and lay out a step; None is one left out."""
        self.check_options()
        require_dense(self.params())
        if self._is_left_out():
            return None
        seen, self.observation = self.observation, None
        means = self.current_means()
        if seen is not None:
            self.has_importance = True
            means.follow(self.groups, seen.means, self._keep)
        elif not self.has_importance and self._moves():
            self.notices.warn("never observed", errors.NEVER_OBSERVED)
        network = means.network()
        works = self.lay_out(seen, network)
        if seen is not None:
            group, how = self.groups[0], self.directions
            if how is not None and follow(how, group, works, seen.moments, self.state_of):
                works = self.lay_out(None, network)
            self._warn_if_damped(network)
        self.count()
        return works

    def _is_left_out(self) -> bool:
        """Return whether gradients that are not finite leave a step out, or raise an error."""
        if self.non_finite is None or self.is_capturable:
            return False
        bad = nonfinite_gradients(self.trainable())
        if not bad:
            return False
        self.observation = None  # which goes the way of the gradients
        if self.non_finite == "skip":
            for group in self.groups:
                group["skipped"] += 1
            return True
        names = self.names()
        raise errors.nonfinite_gradients_error(self.steps + 1, [names[p] for p in bad], self.groups)

    def _moves(self) -> bool:
        # torch.distributed.checkpoint makes states exist by a step at rate zero.
        rates = [group.get("lr", 1.0) for group in self.groups]
        return any(isinstance(rate, Tensor) or rate > 0.0 for rate in rates)

    def _keep(self, group: dict[str, Any]) -> float:
        return float(group["retention"] ** self.schedule.elapsed(self.steps))

    def current_means(self) -> Means:
        """Return the means of importance, kept for the parameters that are trainable now."""
        params = self.trainable()
        states = [self.state_of(param) for param in params]
        if self._means is None or not self._means.fits(states):
            self._means = self.knowledge.means(params, states)
            self._works = []
            if any(param in self.knowledge.frozen_before for param in params):
                self.notices.warn("frozen before", errors.FROZEN_BEFORE)
        return self._means

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """Return what is kept of a parameter, zero where nothing was."""
        state = self.states[0].setdefault(param, {})
        if "importance" not in state:
            if (known := self.knowledge.by_param.get(param)) is not None:
                adopt_knowledge(param, state, known, self.compact)
            elif self.directions is not None:
                state |= first_state(param, self.directions)
            state.setdefault("importance", no_importance(param, self.compact))
            state.setdefault(
                "mean", torch.zeros((), dtype=accumulator(param.dtype), device=param.device)
            )
            if self.compact:
                state["turn"] = first_turn(param.device)
        return state

    def lay_out(
        self, seen: Observation | None, network: Tensor, keep: float | None = None
    ) -> list[Work]:
        """Return the work of a step, or with `keep` that of replacing importance."""
        if seen is None and keep is None and self._works:
            for work in self._works:
                work.renew_gradients()
            return self._works
        works = []
        for group in self.groups:
            trained = [param for param in group["params"] if param.requires_grad]
            works += [self._work(group, some, seen, network, keep) for some in alike(trained)]
        self._works = works if seen is None and any(work.stacks for work in works) else []
        return works

    def _work(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        seen: Observation | None,
        network: Tensor,
        keep: float | None,
    ) -> Work:
        states = [self.state_of(param) for param in params]
        bases = [self.basis_of(param) for param in params]
        work = Work.of(group, params, states, network, bases if any(bases) else [])
        if work.bases and keep is None and self.directions is None:
            work.stacks = stack_alike(work.bases, work.whole)
            share_stacks(work.stacks, states)
            work.bases = [self.basis_of(param) for param in params]  # in the memory of the stacks
        if self.compact:
            turn = shared_turn(states, moves=seen is not None and keep is None)
            # What is not an average is rounded to nearest, whatever was before.
            work.turn = turn if keep is None else torch.zeros_like(turn)
        if seen is not None:
            work.values = [seen.values.get(param) for param in params]
            work.squared, work.weight = seen.squared, seen.weight
            work.keep = self._keep(group) if keep is None else keep
        return work

    def _warn_if_damped(self, network: Tensor) -> None:
        refreshes = self.schedule.refreshes(self.steps)
        # Reading numbers waits for the device: at refreshes 1, 2, 4, 8, ... only.
        if not refreshes & (refreshes - 1) and not self.is_capturable:
            message = damping_notice(self.groups, network.item(), self.mean_of)
            if message is not None:
                self.notices.warn("damped", message)
