"""The gate in front of another optimizer: θ ← θ + Ω ⊙ (the update it made)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from syngap.optim.ballistic import Ballistic
from syngap.optim.checks import (
    GATE_OPTIONS,
    NonFinite,
    check_base_options,
    check_named,
    check_nonfinite_policy,
    check_options,
    check_params,
)
from syngap.optim.errors import nonfinite_error
from syngap.optim.fisher import Estimator, Schedule
from syngap.optim.gate import Gate, States
from syngap.optim.gated import GatedOptimizer, add_counts
from syngap.optim.parameter_state import VERSION, sharded_state
from syngap.optim.state_checks import check_states, forms_of, match, unchanged_on_error
from syngap.optim.tensors import local, local_gradient
from syngap.optim.update import fold
from syngap.optim.update_forms import Finish, prepare

__all__ = ["WrappedSynGAP", "inner_optimizer"]

_PREFIX = "base."
_LOADS = "_syngap_loads"  # there while a gated optimizer loads the state of its base
_NOT_GATED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "moves the parameters several times a step",
    torch.optim.SparseAdam: "takes sparse gradients",
    GatedOptimizer: "is gated already",
}


class WrappedSynGAP(GatedOptimizer):
    """What `SynGAP.wrap` returns: another optimizer whose update goes through a gate.

    The parameter groups are the base's own, with the gate's options beside its own ones, so that
    learning-rate schedulers reach both. A mask on the gradient would cancel in the normaliser of an
    adaptive base, so it acts on the update; for SGD without momentum or decay the two are the same
    and the gradient is masked.

    Attributes:
        base: the optimizer behind the gate.
    """

    base: Optimizer
    _is_made = False

    def __init__(
        self,
        base: Optimizer,
        estimator: Estimator,
        schedule: Schedule,
        compact: bool,
        non_finite: NonFinite | None,
        options: dict[str, Any],
    ) -> None:
        if not isinstance(base, Optimizer):
            raise TypeError(
                "SynGAP.wrap takes an optimizer that holds parameters, such as "
                f"torch.optim.AdamW(model.parameters()), got {base!r}"
            )
        reason = next((why for kind, why in _NOT_GATED.items() if isinstance(base, kind)), None)
        if all(callable(getattr(inner_optimizer(base), name, None)) for name in ("train", "eval")):
            reason = "writes weights of its own in train() and eval(), around the gate"
        if reason is not None:
            raise ValueError(f"{type(base).__name__} cannot be behind a gate: it {reason}")
        defaults = add_counts(options, behind=type(base).__name__)
        own = {"version"} if isinstance(base, Ballistic) else set()  # means the same there
        taken = sorted((defaults.keys() & base.defaults.keys()) - own)
        if taken:
            raise ValueError(
                f"{type(base).__name__} has options of its own called {', '.join(taken)}, which "
                "the gate's would replace"
            )
        if any("steps" in group for group in base.param_groups):
            raise ValueError(f"this {type(base).__name__} is behind a gate already: make another")
        for group in base.param_groups:
            check_options(defaults | group)
            check_params(group["params"])
        capturable = any(group.get("capturable", False) for group in base.param_groups)
        check_nonfinite_policy(non_finite, capturable)
        self.base = base
        self._gate_options = defaults
        params = [param for group in base.param_groups for param in group["params"]]
        check_named(params, estimator.names())
        rate = ("lr",) if all("lr" in group for group in base.param_groups) else ()
        gate = Gate(
            estimator,
            schedule,
            compact=compact,
            non_finite=non_finite,
            option_names=(*rate, *GATE_OPTIONS),
        )
        # Takes the base's groups off its list and puts them back one by one.
        super().__init__(gate, base.param_groups, base.defaults | defaults)
        self._is_made = True
        if options.get("rotated"):
            self._guard_moments()

    def _guard_moments(self) -> None:
        """Let the base refuse a state of its own, whose moments are along entries."""
        inner_optimizer(self.base).register_load_state_dict_pre_hook(_refuse_other_moments)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's own groups, also after it loaded a state that knows nothing of the gate."""
        for group in self.base.param_groups:
            for key, value in self._gate_options.items():
                group.setdefault(key, value)
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Fold what was observed into the importance, then let the base move the parameters.

        Whatever is raised meanwhile, parameters and gradients are afterwards what they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works = self._begin_step()
        if works is None:
            return loss
        with torch.no_grad():
            for work in works:
                fold(work)
                work.grads = []  # a hook may put others in their place, or fail
        hooked = inner_optimizer(self.base)
        arguments = _call_pre_hooks(hooked)
        with torch.no_grad():
            for work in works:
                work.grads = [local_gradient(param) for param in work.whole]
            frozen = [(p, p.grad) for p in self._gate.params() if not p.requires_grad]
            undo: list[Finish] = []
            try:
                for param, _ in frozen:
                    param.grad = None  # a gradient from before it was frozen would still move it
                finishers = [prepare(self.base, work, undo) for work in works]
                self._step_base(*arguments)
                for finish in finishers:
                    finish()
                self._require_finite()
            except BaseException:
                for restore in undo:
                    restore()
                raise
            finally:
                for param, grad in frozen:
                    param.grad = grad
                for work in works:
                    work.grads = []  # a work is kept, and would keep them through the next pass
        for hook in hooked._optimizer_step_post_hooks.values():
            hook(hooked, (hooked,), {})
        return loss

    def _step_base(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the base make its step without hooks: parameters may be in other coordinates.

        Hooks of all optimizers run in the step of this one. Where somebody replaced the base's
        method, as a scheduler of the base does, they run there as well.
        """
        step: Callable[..., Any] = self.base.step
        is_of_class = "step" not in vars(self.base)
        if is_of_class and getattr(type(self.base).step, "hooked", False):
            step = partial(type(self.base).step.__wrapped__, self.base)  # type: ignore[attr-defined]
        hooked = inner_optimizer(self.base)
        hooks = hooked._optimizer_step_pre_hooks, hooked._optimizer_step_post_hooks
        hooked._optimizer_step_pre_hooks = OrderedDict()
        hooked._optimizer_step_post_hooks = OrderedDict()
        try:
            step(*args, **kwargs)
        finally:
            hooked._optimizer_step_pre_hooks, hooked._optimizer_step_post_hooks = hooks

    def _require_finite(self) -> None:
        """Refuse a step that spoiled weights in float16, as where an eps of 1e-8 is 0."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        half = [local(param) for param in self._gate.params() if param.dtype == torch.float16]
        finite = [param.isfinite().all() for param in half]
        if finite and not torch.stack([each.to(finite[0].device) for each in finite]).all():
            raise nonfinite_error(
                f"step {self.gate.steps} of {type(self.base).__name__} gave weights that are not "
                "finite, and they are again what they were before it",
                self.param_groups,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base, with the gate's own options where given."""
        if not self._is_made:
            Optimizer.add_param_group(self, param_group)
            return
        check_options({**self.defaults, **param_group})
        counts = {"steps": self.gate.steps, "skipped": self.skipped}
        options = self.defaults | counts | param_group
        self.base.add_param_group(options)
        self._check_last_group()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of gate and base in one, the base's under keys with a prefix."""
        merged = super().state_dict()
        for index, state in self.base.state_dict()["state"].items():
            prefixed = {_PREFIX + str(key): value for key, value in state.items()}
            merged["state"][index] = merged["state"].get(index, {}) | prefixed
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` gave, to the gate and to the base.

        The base's state is checked as the gate's is. Where the base is not one of `torch.optim`,
        its numbers have to be finite, and of the shapes that they have now, if they are there.
        """
        with unchanged_on_error((), self.base):
            super().load_state_dict(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        matched = match(state_dict, self.param_groups)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        own: dict[int, dict[str, Any]] = {}
        base: dict[int, dict[str, Any]] = {}
        for index, (param, state) in zip(indices, matched.items(), strict=True):
            for key, value in sharded_state(state, param).items():
                if str(key).startswith(_PREFIX):
                    base.setdefault(index, {})[key[len(_PREFIX) :]] = value
                else:
                    own.setdefault(index, {})[key] = value
        if not base:
            self._require_base_state(state_dict["param_groups"])
        super()._load(state_dict | {"state": own})
        of_base = state_dict | {"state": base}
        check_states(
            match(of_base, self.param_groups),
            self.base.state,
            forms_of(self.base),
            self.gate.names(),
            _PREFIX,
        )
        vars(inner_optimizer(self.base))[_LOADS] = True
        try:
            self.base.load_state_dict(of_base)
        finally:
            del vars(inner_optimizer(self.base))[_LOADS]
        for group in self.param_groups:
            group["version"] = VERSION

    def _require_base_state(self, saved: list[dict[str, Any]]) -> None:
        """Refuse a protected run without Adam's moments, which would go on with those of zero."""
        is_used = any("protection" in group and group.get("steps") for group in saved)
        if is_used and isinstance(self.base, (torch.optim.Adam, torch.optim.AdamW)):
            raise ValueError(
                f"the state_dict has nothing of {type(self.base).__name__}'s own, which made steps:"
                " torch.distributed.checkpoint.load leaves out what a new optimizer has not made "
                "yet; save what get_optimizer_state_dict returns by torch.save, and give that to "
                "set_optimizer_state_dict"
            )

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_base_options(self.base, options)

    def __getstate__(self) -> dict[str, Any]:
        """Add the base to what copy and pickle take."""
        own = {"base": self.base, "_gate_options": self._gate_options, "_is_made": True}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` gave; the groups are the base's."""
        super().__setstate__({key: state[key] for key in state if key != "param_groups"})
        if any(group.get("rotated") for group in self.param_groups):
            self._guard_moments()

    def _states(self) -> Sequence[States]:
        return (self.state, self.base.state)


def _refuse_other_moments(base: Optimizer, state_dict: dict[str, Any]) -> None:
    if _LOADS not in vars(base):
        raise ValueError(
            f"the moments of this {type(base).__name__} are along directions, and those of a bare "
            "one are along entries: load its state before protection.optimizer(base)"
        )


def _call_pre_hooks(base: Optimizer) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call what runs before a step, as torch does, and return the arguments of the step."""
    args: tuple[Any, ...] = (base,)
    kwargs: dict[str, Any] = {}
    for hook in base._optimizer_step_pre_hooks.values():
        result = hook(base, args, kwargs)
        if result is not None:
            args, kwargs = result
    return args[1:], kwargs


def inner_optimizer(base: Optimizer) -> Optimizer:
    """Return the optimizer that has hooks: what accelerate prepared holds it."""
    while not hasattr(base, "_optimizer_step_post_hooks"):
        base = base.optimizer  # type: ignore[attr-defined]
    return base
