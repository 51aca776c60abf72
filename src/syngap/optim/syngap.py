"""SynGAP: gradient descent in which what mattered before moves less.

Aguilar, Zainal, Kavehei, "Metaplasticity as adaptive gradient preconditioning for incremental
learning". With θ the parameters and F their importance, each step does

    F ← α F + (1 - α) E[(∇ log p(y|x))²],  y drawn from the model's own prediction
    Ω = 1 - tanh(c (F + λ)) + ε,           c = arctanh(τ) / (mean of F + λ)
    θ ← θ - η Ω ⊙ ∇L(θ)

| symbol | argument      | meaning                                    |
|--------|---------------|--------------------------------------------|
| η      | lr            | step size                                  |
| α      | retention     | how slowly importance fades                |
| τ      | consolidation | how closed the gate is at mean importance  |
| λ      | damping       | keeps the quotient F/μ defined where F → 0 |
| ε      | ambient       | plasticity that always remains             |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.optimizer import Optimizer, ParamsT

from syngap.optim import distributed, sharded
from syngap.optim.compact import first_turn, next_turn
from syngap.optim.consolidation import Predict, Progress, predictions
from syngap.optim.coordinates import Coordinates
from syngap.optim.errors import NotFiniteError
from syngap.optim.estimator import Estimator, EstimatorName
from syngap.optim.finite import NonFinite, check_policy, spoilt
from syngap.optim.importance import require_graph
from syngap.optim.loading import (
    check_groups,
    check_kind,
    check_states,
    forms_of,
    match,
    names_of,
    unchanged_on_error,
)
from syngap.optim.means import Means
from syngap.optim.notices import Notices
from syngap.optim.observation import Observation, merged
from syngap.optim.options import (
    GATE_OPTIONS,
    OWN_OPTIONS,
    GroupCheck,
    check_compact,
    check_counts,
    check_named,
    check_options,
    check_own_options,
    check_params,
)
from syngap.optim.plasticity import damping_and_slope, linear_plasticity, plasticity
from syngap.optim.precision import accumulator, kept_in, wide
from syngap.optim.schedule import Schedule
from syngap.optim.states import VERSION, grown, laid_out, require_growth, restored
from syngap.optim.summary import describe, thinned
from syngap.optim.update import Work, fold, update

if TYPE_CHECKING:
    from syngap.optim.wrapped import WrappedSynGAP

__all__ = ["SynGAP"]

Scope: TypeAlias = Literal["network", "tensor"]

_MUCH_LARGER = 10.0
_NAMED = 3  # parameters in a message


class SynGAP(Optimizer):
    """Stochastic gradient descent behind a gate that closes with importance.

    The defaults suit a user who sets only `lr`. They are the best of what was tried on Split
    CIFAR-100 before this package began (ResNet-18, three seeds): consolidation 0.1 beat 0.5 and 0.9
    by 3 to 9 points, and retention 0.999 beat 0.99 and 0.9999; a learning rate two to three times
    that of plain SGD suits them, as the gate takes a part of every step. Damping is the square of
    Adam's 1e-8, because F is a squared gradient: far below the mean importance of networks in use.
    Ambient 0.01 leaves every weight a hundredth of its step, so that nothing freezes for good.

    Momentum and weight decay are outside the paper. Both come before the mask, which acts on the
    finished update: m ← momentum · m + (∇L + weight_decay · θ), θ ← θ - η Ω ⊙ m. Important
    weights therefore also decay less, and opening the gate releases the momentum gathered so far.
    `SynGAP.wrap(torch.optim.SGD(...))` with the same values takes the same steps.

    Args:
        params: parameters, named parameters or groups of them. A group may have its own `lr`,
            `retention`, `consolidation`, `damping`, `ambient`, `momentum`, `weight_decay`, `scope`
            and `bounded`.
        lr: η ≥ 0.
        retention: α in [0, 1).
        consolidation: τ in (0, 1).
        damping: λ ≥ 0.
        ambient: ε ≥ 0.
        momentum: in [0, 1), 0 for none.
        weight_decay: ≥ 0, added to the gradient as in `torch.optim.SGD`.
        scope: what the mean importance is taken over: all trainable parameters of the "network"
            (the paper), or each "tensor" by itself, which keeps layers from competing.
        estimator: "sampled" takes the square of the summed scores: one more backward pass,
            unbiased, noisy. "exact" squares sample by sample, for `model`'s Linear, Conv1d/2d,
            BatchNorm, LayerNorm, GroupNorm and Embedding (others take the square of their summed
            score, and a warning names them). Train-mode BatchNorm counts with its batch statistics
            held constant; nothing else may mix samples (attention across the batch, mixup of
            activations). Every module's input must have the batch first: another order goes
            unnoticed where it has the same length. "empirical" is "sampled" with the true labels
            given to `observe`: neither unbiased nor independent of the batch size, for comparison
            only.
        every: refresh importance at each k-th step, with retention**k; `observe` costs nothing at
            the others.
        warmup: before that, all of so many steps refresh it: weights that the gate does not hold
            back from the beginning grow, and stay grown.
        bounded: False replaces tanh by its argument (the paper's "unbounded linear" ablation).
        compact: keep importance in bfloat16, two bytes a parameter. It does not drift; rounding
            adds a noise of 3 % at retention 0.999, where estimates have as much or more.
        non_finite: what `step` does about gradients that are NaN or infinite, before anything has
            moved: "raise" an error that names the step, or "skip" the step and count it in
            `skipped`. None does not look, for a loop that does. Importance that is not finite is
            left out in any case.
        maximize: climb instead of descending.
        foreach: work on lists of tensors at a time; None decides by device.
        fused: large tensors by one kernel each, which reads every number once; None does so on a
            GPU that has Triton.
        capturable: never wait for the device, so that observe and step can be captured in a CUDA
            graph. Checks of values are left out; a score that overflows counts as zero.
        differentiable: let autograd follow the step, with the mask as a constant.
        generator: source of the sampled labels; None is torch's global one.
        model: gives parameters their names, and is what "exact" hooks.
        process_group: the processes that share a batch; "auto" is the model's group under DDP, else
            all processes once torch.distributed is initialised; None never communicates.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(4, 3)
        >>> optimizer = SynGAP(model.parameters(), lr=0.3)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> for _ in range(20):
        ...     logits = model(x)
        ...     loss = nn.functional.cross_entropy(logits, y)
        ...     optimizer.zero_grad()
        ...     optimizer.observe(logits)
        ...     loss.backward()
        ...     optimizer.step()
        >>> weight, bias = optimizer.plasticity()
        >>> weight.shape == model.weight.shape and bool((weight <= 1.01).all())
        True
    """

    _observation: Observation | None
    # Copies and pickles leave these out: they follow objects of this optimizer alone.
    _grads_then: list[tuple[int, int] | None]  # when it was observed
    _means: Means | None
    _group_check: GroupCheck

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        retention: float = 0.999,
        consolidation: float = 0.1,
        damping: float = 1e-16,
        ambient: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        scope: Scope = "network",
        estimator: EstimatorName = "sampled",
        every: int = 16,
        warmup: int = 200,
        bounded: bool = True,
        compact: bool = False,
        non_finite: NonFinite | None = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
        model: nn.Module | None = None,
        process_group: distributed.Group = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "retention": retention,
            "consolidation": consolidation,
            "damping": damping,
            "ambient": ambient,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "scope": scope,
            "bounded": bounded,
            "behind": None,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
            "version": VERSION,
            "steps": 0,
            "skipped": 0,
        }
        if fused and compact:
            raise ValueError("fused=True excludes compact=True")
        check_policy(non_finite, capturable)
        chosen = Estimator(estimator, generator, model, process_group)
        self._configure(chosen, Schedule(every, warmup), compact, non_finite)
        super().__init__(params, defaults)

    @classmethod
    def wrap(
        cls,
        optimizer: Optimizer,
        *,
        retention: float = 0.999,
        consolidation: float = 0.1,
        damping: float = 1e-16,
        ambient: float = 0.01,
        scope: Scope = "network",
        estimator: EstimatorName = "sampled",
        every: int = 16,
        warmup: int = 200,
        bounded: bool = True,
        compact: bool = False,
        non_finite: NonFinite | None = "raise",
        generator: torch.Generator | None = None,
        model: nn.Module | None = None,
        process_group: distributed.Group = "auto",
    ) -> WrappedSynGAP:
        """Return `optimizer` behind the gate: θ ← θ + Ω ⊙ (the update it would have made).

        Plain SGD behind the gate is SynGAP itself, in float32 and float64 bit for bit unless a
        GPU's fused kernel takes the step. Learning rates, momentum, decay and state stay those of
        `optimizer`, whose parameter groups are shared. It must take the parameters as it finds
        them: one that keeps a copy of them (master weights, schedule-free averaging, Lookahead)
        would write that copy over what the gate held back.

        Examples:
            >>> model = nn.Linear(4, 3)
            >>> optimizer = SynGAP.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
            >>> logits = model(torch.randn(8, 4))
            >>> optimizer.observe(logits)
            >>> logits.logsumexp(1).mean().backward()
            >>> optimizer.step()
        """
        from syngap.optim.wrapped import WrappedSynGAP

        defaults = {
            "retention": retention,
            "consolidation": consolidation,
            "damping": damping,
            "ambient": ambient,
            "scope": scope,
            "bounded": bounded,
            "behind": type(optimizer).__name__,
            "version": VERSION,
            "steps": 0,
            "skipped": 0,
        }
        chosen = Estimator(estimator, generator, model, process_group)
        schedule = Schedule(every, warmup)
        return WrappedSynGAP(optimizer, defaults, chosen, schedule, compact, non_finite)

    # The loop's two calls.

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
        self._group_check(self.param_groups)
        if not self.is_due():
            if isinstance(prediction, Tensor):
                require_graph(prediction)  # a mistake shows at once, not at the next refresh
            return
        self._names()  # or a head that was replaced without grow() would never learn
        try:
            observation = self._estimator.estimate(
                prediction,
                self._trainable(),
                targets=targets,
                mask=mask,
                check=not self._is_capturable(),
                leave_out=self._non_finite == "skip",
            )
        except NotFiniteError as error:
            raise NotFiniteError(
                f"{error}, in step {self._steps() + 1}. {self._advice()}"
            ) from None
        self._observation = merged(self._observation, observation)
        self._grads_then = self._grads_now()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Fold what was observed into the importance, then move the parameters.

        Args:
            closure: evaluates the loss again (and may observe) and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for work in self._begin_step() or ():
            with torch.set_grad_enabled(work.options["differentiable"]):
                update(work)
        return loss

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
        # After a step that GradScaler skipped there are new gradients: discarding both is right.
        if self._observation is not None and self._grads_then == self._grads_now():
            self._notices.warn(
                "discarded",
                "zero_grad() discarded what observe() took before any backward(): call observe() "
                "after zero_grad() and before loss.backward()",
            )
        super().zero_grad(set_to_none)
        self.discard()

    def discard(self) -> None:
        """Forget what was observed since the last step, and leave gradients and importance alone.

        For a loop that clears gradients without `zero_grad()`, after a step that was skipped.
        """
        self._observation = None

    def is_due(self) -> bool:
        """Return whether the next step refreshes importance."""
        return self._schedule.is_due(self._steps())

    def elapsed(self) -> int:
        """Return how many steps importance moves on by in the next step that refreshes it."""
        return self._schedule.elapsed(self._steps())

    def count(self) -> None:
        """Count a step. `step()` does; a replayed CUDA graph, which runs no Python, does not."""
        for group in self.param_groups:
            group["steps"] += 1
        self._estimator.record(self.is_due())

    # To look at.

    @torch.no_grad()
    def importance(self) -> dict[str, Tensor] | list[Tensor]:
        """Return F of each parameter: by name where `model` was given, else in parameter order.

        The tensors are the optimizer's own, in bfloat16 if it is `compact`: copy them before
        changing anything.
        """
        return self._by_name([self._importance_of(param) for param in self._params()])

    @property
    def has_importance(self) -> bool:
        """Whether anything was observed yet, or consolidated, or loaded: else the gate is even."""
        return self._has_observed

    @property
    def skipped(self) -> int:
        """How many steps were left out, as their gradients were not finite."""
        return int(self.param_groups[0]["skipped"])

    @property
    def generator(self) -> torch.Generator | None:
        """What labels are drawn from; None is torch's own."""
        return self._estimator.generator

    @torch.no_grad()
    def plasticity(self) -> dict[str, Tensor] | list[Tensor]:
        """Return the mask Ω of each parameter, in the form that `importance()` has."""
        network = self._network_mean()
        return self._by_name(
            [
                _mask(
                    wide(self._importance_of(param)), self._mean_for(group, param, network), group
                )
                for group in self.param_groups
                for param in group["params"]
            ]
        )

    @torch.no_grad()
    def summary(self) -> dict[str, float]:
        """Return numbers to log: means and quantiles of the mask, overall and by tensor, and μ/λ.

        With `non_finite="skip"` also how many steps were left out.

        Means of the mask and quantiles are taken over at most 1024 values of each tensor.

        Examples:
            >>> model = nn.Linear(2, 2)
            >>> summary = SynGAP(model.parameters(), lr=0.1, model=model).summary()
            >>> sorted(key for key in summary if "weight" in key)[:3]
            ['importance/weight/mean', 'plasticity/weight/mean', 'plasticity/weight/q05']
        """
        network = self._network_mean()
        names = self._names() or names_of(self.param_groups)
        values: dict[str, Tensor] = {"importance/mean": network}
        parts = []
        for group in self.param_groups:
            for param in group["params"]:
                some = wide(thinned(sharded.local(self._importance_of(param))))
                mask = _mask(some, self._mean_for(group, param, network), group).to(network)
                values[f"importance/{names[param]}/mean"] = self._mean_of(param)
                values |= describe(f"plasticity/{names[param]}", [(mask, param.numel())])
                if param.requires_grad:
                    parts.append((mask, param.numel()))
        values |= describe("plasticity", parts)
        numbers = torch.stack([value.to(network) for value in values.values()]).tolist()
        summary: dict[str, float] = dict(zip(values, numbers, strict=True))
        damping = max(group["damping"] for group in self.param_groups)
        ratio = summary["importance/mean"] / damping if damping else math.inf
        summary["importance/mean_over_damping"] = ratio
        return summary | ({"skipped": self.skipped} if self._non_finite == "skip" else {})

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
            >>> model = nn.Linear(4, 3)
            >>> optimizer = SynGAP(model.parameters(), lr=0.1)
            >>> optimizer.consolidate(model, torch.randn(256, 4))
            >>> optimizer.summary()["importance/mean"] > 0
            True
        """
        self._refuse_stand_ins()
        self._group_check(self.param_groups)
        self._refuse_stale(importance=False)  # which is replaced
        seen: Observation | None = None
        self._estimator.record(True)
        try:
            for prediction in predictions(
                model,
                inputs,
                batch_size=batch_size,
                predict=predict,
                progress=progress,
                generator=self._estimator.generator,
            ):
                params = self._trainable()
                seen = merged(seen, self._estimator.estimate(prediction, params, labelled=False))
        finally:
            self._estimator.record(self.is_due())
        if seen is None:
            raise ValueError("no batch gave consolidate a finite importance")
        with torch.no_grad():
            means = self._current_means()
            self._advance(means, seen, keep=0.0)
            for work in self._lay_out(seen, means.network(), keep=0.0):
                fold(work)
        self._has_observed = True
        self._coordinates.learn(self._params())

    @torch.no_grad()
    def grow(self, old: Tensor, new: Tensor) -> None:
        """Let `new` take the place of `old`, a smaller parameter whose entries it begins with.

        For a head that gains rows: importance and momentum of the old entries stay, those of the
        new ones start at zero, so they are free to learn.

        Args:
            old: a parameter of this optimizer.
            new: the parameter that replaced it in the model, at least as large in every dimension.

        Examples:
            >>> small, large = nn.Linear(4, 2), nn.Linear(4, 3)
            >>> optimizer = SynGAP(small.parameters(), lr=0.1)
            >>> optimizer.grow(small.weight, large.weight)
            >>> optimizer.grow(small.bias, large.bias)
            >>> [tuple(value.shape) for value in optimizer.importance()]
            [(3, 4), (3,)]
        """
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            raise TypeError(
                "grow takes two parameters, such as old.weight and new.weight, got "
                f"{type(old).__name__} and {type(new).__name__}"
            )
        self._refuse_stale()
        place = next(
            (
                (group["params"], index)
                for group in self.param_groups
                for index, param in enumerate(group["params"])
                if param is old
            ),
            None,
        )
        if place is None:
            raise ValueError(
                f"old {tuple(old.shape)} is not a parameter of this optimizer; the weight of a "
                "layer that is rotated is computed from one: grow before rotate() or after "
                "unrotate(), with a new optimizer"
            )
        require_growth(old, new, self._states())
        if any(param is new for param in self._params()):
            raise ValueError(f"new {tuple(new.shape)} is already a parameter of this optimizer")
        names = self._estimator.names()
        if names is not None and new not in names:
            raise ValueError(
                f"new {tuple(new.shape)} is not a parameter of model; put it there before grow()"
            )
        params, index = place
        params[index] = new
        self._observation = None
        for states in self._states():
            if old in states:
                states[new] = grown(states.pop(old), old, new)
        self._coordinates.look_again()
        self._estimator.attach()

    # torch.optim's own.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its own options where given; its importance starts at zero."""
        for count in ("steps", "skipped") if self.param_groups else ():
            param_group.setdefault(count, self.param_groups[0][count])
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._check_last_group()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` gave; importance keeps its precision whatever θ's is.

        Everything is checked first. A state with numbers, shapes or options that SynGAP cannot
        have is refused by a ValueError that names the entry, and nothing has changed then.
        """
        with unchanged_on_error(self):
            self._load(state_dict)
        self._estimator.record(self.is_due())

    def _load(self, state_dict: dict[str, Any]) -> None:
        saved: dict[Tensor, dict[str, Any]] = {}
        was_stale = self._is_stale()  # and stays so: frameworks load what they have just saved
        # As the last hook, because a hook may replace what is loaded.
        handle = self.register_load_state_dict_pre_hook(
            lambda _, final: saved.update(self._checked(final))
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for param, state in saved.items():
            if state:
                self.state[param].pop("turn", None)  # of one that is compact, if this is not
                self.state[param] |= restored(param, state, self._compact)
                laid_out(param, self.state[param])
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)  # an option that the saving version did not have
            group["version"] = VERSION
        self._observation = None
        if not was_stale:
            self._coordinates.learn(self._params())
        self._has_observed = any(bool(self._mean_of(param) > 0) for param in saved)

    def _checked(self, state_dict: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """Return a state by parameter, after a look at all of it."""
        saved, groups = match(state_dict, self.param_groups), state_dict["param_groups"]
        check_kind(groups, self.param_groups)
        check_groups(groups, self.param_groups, self._check_options)
        check_states(saved, self.state, forms_of(self), self._known_names())
        return saved

    def _check_options(self, options: dict[str, Any]) -> None:
        check_options(options)
        check_counts(options)
        check_own_options(options)

    def __getstate__(self) -> dict[str, Any]:
        """Give copy and pickle the attributes that torch's Optimizer would leave out."""
        own = ["_estimator", "_schedule", "_compact", "_non_finite"]
        own += ["_observation", "_has_observed", "_notices"]
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` gave, or that of a version which knew less."""
        if "_every" in state:
            state = {**state, "_schedule": Schedule(state["_every"], 0), "_compact": False}
        super().__setstate__({"_non_finite": None, **state})
        for group in self.param_groups:
            group.setdefault("skipped", 0)
            group.setdefault("version", VERSION)
        self._means = None
        self._grads_then = []
        self._group_check = self._new_group_check()
        if not hasattr(self, "_coordinates"):  # torch comes by here also to load a state
            self._coordinates = Coordinates()
            self._coordinates.learn(self._params())

    # Inside.

    def _configure(
        self,
        estimator: Estimator,
        schedule: Schedule,
        compact: bool,
        non_finite: NonFinite | None,
    ) -> None:
        check_compact(compact)
        self._estimator = estimator
        self._schedule = schedule
        self._compact = compact
        self._non_finite = non_finite
        self._observation = None
        self._grads_then = []
        self._means = None
        self._group_check = self._new_group_check()
        self._has_observed = False
        self._notices = Notices()
        self._coordinates = Coordinates()

    def _check_last_group(self) -> None:
        try:
            check_params(self.param_groups[-1]["params"])
            self._names()
            self._coordinates.look_again()
        except ValueError:
            self.param_groups.pop()
            raise

    def _names(self) -> dict[Tensor, str] | None:
        """Return the parameters' names, None without a model."""
        names = self._estimator.names()
        check_named(self._params(), names)
        return names

    def _known_names(self) -> dict[Tensor, str]:
        """Return the names by the model, else those that came with parameters, else numbers."""
        return names_of(self.param_groups) | (self._estimator.names() or {})

    def _new_group_check(self) -> GroupCheck:
        return GroupCheck(("lr", *GATE_OPTIONS, *OWN_OPTIONS))

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _trainable(self) -> list[Tensor]:
        return [param for param in self._params() if param.requires_grad]

    def _by_name(self, tensors: list[Tensor]) -> dict[str, Tensor] | list[Tensor]:
        names = self._names()
        if names is None:
            return tensors
        return {names[p]: tensor for p, tensor in zip(self._params(), tensors, strict=True)}

    def _states(self) -> Sequence[dict[Tensor, dict[str, Any]]]:
        return [self.state]

    def _grads_now(self) -> list[tuple[int, int] | None]:
        """What tells whether a backward pass has been."""
        grads = [param.grad for param in self._params()]
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def _steps(self) -> int:
        return int(self.param_groups[0]["steps"])

    def _is_capturable(self) -> bool:
        return any(group.get("capturable", False) for group in self.param_groups)

    # The step.

    def _is_stale(self, importance: bool = True) -> bool:
        """Return whether what is known of any parameter is of other coordinates than it has.

        Args:
            importance: whether that counts, or momentum alone.
        """
        if self._coordinates.are_current():
            return False
        others = set() if importance else {"importance", "mean", "turn"}
        return any(
            set(states.get(param, {})) - others
            for param in self._coordinates.changed(self._params())
            for states in self._states()
        )

    def _refuse_stale(self, importance: bool = True) -> None:
        if self._is_stale(importance):
            raise RuntimeError(
                "the model was rotated, or unrotated, after this optimizer had learned of its "
                "weights, so its importance or momentum is of other coordinates: call rotate() "
                "before consolidate(), and make a new optimizer after steps or unrotate()"
            )

    def _is_spoilt(self) -> bool:
        """Return whether the step is to be left out; raise, if that was asked for.

        Nothing has moved yet, and what was observed goes the way of the gradients.
        """
        if self._non_finite is None or self._is_capturable():
            return False
        bad = spoilt(self._trainable())
        if not bad:
            return False
        self._observation = None
        if self._non_finite == "skip":
            for group in self.param_groups:
                group["skipped"] += 1
            return True
        names = self._known_names()
        listed = ", ".join(names[param] for param in bad[:_NAMED])
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise NotFiniteError(
            f"the gradients of step {self._steps() + 1} are not finite (of {listed}{more}): "
            f"nothing has moved. {self._advice()}"
        )

    def _advice(self) -> str:
        rate = max((float(group["lr"]) for group in self.param_groups if "lr" in group), default=0)
        numbers = f" (it is {rate:g}, try {rate / _MUCH_LARGER:g})" if rate else ""
        return (
            f"A smaller lr may help{numbers}, or non_finite='skip', which leaves such steps out "
            "and counts them"
        )

    @torch._disable_dynamo  # type: ignore[attr-defined]  # imports dynamo at the first call, not here
    @torch.no_grad()
    def _begin_step(self) -> list[Work] | None:
        """Check the gradients, advance means and clock, and lay out the work of a step.

        None is a step that is left out.
        """
        self._group_check(self.param_groups)
        if not self._coordinates.are_current():
            self._refuse_stale()
            self._coordinates.learn(self._params())
        for param in self._params():
            grad = param.grad
            if grad is not None and (grad.layout != torch.strided or grad.is_complex()):
                raise RuntimeError(
                    f"SynGAP takes dense real gradients, got {grad.layout} {grad.dtype} for a "
                    f"parameter of shape {tuple(param.shape)}"
                )
        if self._is_spoilt():
            return None
        seen, self._observation = self._observation, None
        means = self._current_means()
        if seen is not None:
            self._has_observed = True
            self._advance(means, seen)
        elif not self._has_observed and self._moves():
            self._notices.warn(
                "never observed",
                "SynGAP.step() has no importance yet, so every parameter gets the same plasticity: "
                "call observe(logits) after zero_grad() and before loss.backward(), or "
                "consolidate() once before training; in a framework that owns the loop, use "
                "SynGAPCallback (Lightning), SynGAPTrainer (Transformers) or SynGAPPlugin "
                "(Avalanche) of syngap.integrations",
            )
        network = means.network()
        works = self._lay_out(seen, network)
        if seen is not None:
            self._warn_if_damped(network)
        self.count()
        return works

    def _moves(self) -> bool:
        # torch.distributed.checkpoint makes states exist by a step at rate zero.
        rates = [group.get("lr", 1.0) for group in self.param_groups]
        return any(isinstance(rate, Tensor) or rate > 0.0 for rate in rates)

    def _advance(self, means: Means, seen: Observation, keep: float | None = None) -> None:
        """Let each tensor's mean importance follow the average that its importance follows."""
        first = 0
        for group in self.param_groups:
            observed = [seen.means.get(p) for p in group["params"] if p.requires_grad]
            if observed:
                means.advance(first, observed, self._keep(group) if keep is None else keep)
            first += len(observed)

    def _current_means(self) -> Means:
        params = self._trainable()
        states = [self._state_of(param) for param in params]
        if self._means is None or not self._means.fits(states):
            self._means = Means(params, states)
        return self._means

    def _keep(self, group: dict[str, Any]) -> float:
        return float(group["retention"] ** self.elapsed())

    def _lay_out(
        self, seen: Observation | None, network: Tensor, keep: float | None = None
    ) -> list[Work]:
        works = []
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for param in group["params"]:
                if param.requires_grad:
                    alike.setdefault((param.device, param.dtype), []).append(param)
            for (device, _), params in alike.items():
                states = [self._state_of(param) for param in params]
                mean = network.to(device)
                if group["scope"] == "tensor":
                    mean = torch.stack([state["mean"] for state in states]).to(device)
                damping, slope = damping_and_slope(
                    mean, group["consolidation"], group["damping"], group["bounded"]
                )
                work = Work(group, cast(Tensor, slope), damping)
                work.params = [sharded.local(param) for param in params]
                work.grads = [sharded.local_gradient(param) for param in params]
                work.importances = [sharded.local(state["importance"]) for state in states]
                if self._compact:
                    turn = _shared_turn(states, moves=seen is not None and keep is None)
                    # What is not an average is rounded to nearest, whatever was before.
                    work.turn = turn if keep is None else torch.zeros_like(turn)
                if self._keeps_momentum(group):
                    work.buffers = [sharded.local(self._buffer_of(param)) for param in params]
                if seen is not None:
                    work.values = [seen.values.get(param) for param in params]
                    work.squared, work.weight = seen.squared, seen.weight
                    work.keep = self._keep(group) if keep is None else keep
                works.append(work)
        return works

    def _keeps_momentum(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"])

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if "importance" not in state:
            dtype = accumulator(param.dtype)
            state["importance"] = torch.zeros_like(
                param,
                dtype=kept_in(param.dtype, self._compact),
                memory_format=torch.preserve_format,
            )
            state["mean"] = torch.zeros((), dtype=dtype, device=param.device)
            if self._compact:
                state["turn"] = first_turn(param.device)
        return state

    def _buffer_of(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _importance_of(self, param: Tensor) -> Tensor:
        importance: Tensor | None = self.state.get(param, {}).get("importance")
        if importance is None:
            return torch.zeros_like(param, dtype=kept_in(param.dtype, self._compact))
        return importance

    def _mean_of(self, param: Tensor) -> Tensor:
        mean: Tensor | None = self.state.get(param, {}).get("mean")
        if mean is None:
            return torch.zeros((), dtype=accumulator(param.dtype), device=param.device)
        return mean

    def _network_mean(self) -> Tensor:
        self._group_check(self.param_groups)
        return self._current_means().network()

    def _mean_for(self, group: dict[str, Any], param: Tensor, network: Tensor) -> Tensor:
        mean = self._mean_of(param) if group["scope"] == "tensor" else network
        return mean.to(param.device)

    def _warn_if_damped(self, network: Tensor) -> None:
        if "damped" in self._notices or self._is_capturable():
            return
        refreshes = self._schedule.refreshes(self._steps())
        if refreshes & (refreshes - 1):
            return  # reading numbers waits for the device: at refreshes 1, 2, 4, 8, ... only
        for group in self.param_groups:
            least = network.item()
            if group["scope"] == "tensor":
                own = [self._mean_of(param).item() for param in group["params"]]
                least = min((mean for mean in own if mean > 0.0), default=0.0)
            if 0.0 < least < group["damping"] / _MUCH_LARGER:  # at zero no damping would help
                self._notices.warn(
                    "damped",
                    f"damping {group['damping']:g} is far above the mean importance {least:g}, so "
                    "parameters get nearly the same plasticity and SynGAP is plain descent with a "
                    f"smaller step: set damping below {least / _MUCH_LARGER:g}",
                )


def _shared_turn(states: Sequence[dict[str, Any]], moves: bool) -> Tensor:
    """Let all take the turns of the first, so that one number moves all."""
    turn: Tensor = states[0]["turn"]
    for state in states:
        state["turn"] = turn
    if moves:
        next_turn(turn)
    return turn.int()


def _mask(importance: Tensor, mean: Tensor, group: dict[str, Any]) -> Tensor:
    function = plasticity if group["bounded"] else linear_plasticity
    options = {name: group[name] for name in ("consolidation", "damping", "ambient")}
    return function(importance, mean, **options)
