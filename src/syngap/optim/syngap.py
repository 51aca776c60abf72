"""SynGAP: gradient descent in which what mattered before moves less: θ ← θ - η Ω ⊙ ∇L(θ).

Aguilar, Zainal, Kavehei, "Metaplasticity as adaptive gradient preconditioning for incremental
learning". `reference` has the rule in a page, with the paper's symbols; `gate` has Ω.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from syngap.messages import names_arguments
from syngap.optim import distributed
from syngap.optim.checks import (
    GATE_OPTIONS,
    OWN_OPTIONS,
    NonFinite,
    check_nonfinite_policy,
    check_own_options,
)
from syngap.optim.defaults import DEFAULTS, SYMBOLS
from syngap.optim.directions import Directions, check_group, chosen_directions, require_weights
from syngap.optim.fisher import Estimator, EstimatorName, Schedule
from syngap.optim.gate import Gate
from syngap.optim.gated import GatedOptimizer, add_counts
from syngap.optim.tensors import local
from syngap.optim.update import Work, update
from syngap.optim.wrapped import WrappedSynGAP

__all__ = ["SynGAP"]

Scope: TypeAlias = Literal["network", "tensor"]


class SynGAP(GatedOptimizer):
    """Stochastic gradient descent in which important parameters take smaller steps.

    The defaults suit a user who sets only `lr`; `Defaults` says where they come from. A rate two to
    three times that of plain SGD suits them, as the gate takes a part of every step.

    Momentum and weight decay are outside the paper. Both come before the mask, which acts on the
    finished update: m ← momentum · m + (∇L + weight_decay · θ), θ ← θ - η Ω ⊙ m. Important
    weights therefore also decay less, and opening the gate releases the momentum gathered so far.

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
        directions: True takes importance along directions of weights, which follow the stream, in
            place of entries; `Directions` has its options.
        estimator: "sampled" takes the square of the summed scores: one more backward pass,
            unbiased, noisy. "exact" squares sample by sample, for `model`'s Linear, Conv1d/2d,
            BatchNorm, LayerNorm, GroupNorm and Embedding (others take the square of their summed
            score, and a warning names them); its inputs have the batch first, and nothing but
            BatchNorm may mix samples. "empirical" is "sampled" with the true labels given to
            `observe`: neither unbiased nor independent of the batch size, for comparison only.
        every: refresh importance at each k-th step, with retention**k; `observe` costs nothing at
            the others.
        warmup: before that, so many steps all refresh it: weights that grow then stay grown.
        bounded: False replaces tanh by its argument (the paper's "unbounded linear" ablation).
        compact: keep importance in bfloat16, two bytes a parameter. It does not drift; rounding
            adds a noise of 3 % at retention 0.999, where estimates have as much or more.
        non_finite: what `step` does about gradients that are NaN or infinite, before anything has
            moved: "raise" an error that names the step, or "skip" it and count it in `skipped`;
            None does not look. Importance that is not finite is left out in any case.
        maximize: climb instead of descending.
        foreach: work on lists of tensors at a time; None decides by device.
        fused: large tensors by one kernel each; None does so on a GPU that has Triton.
        capturable: never wait for the device, so that a CUDA graph can capture observe and step but
            where `refreshes_directions()`. Values are not checked; scores that overflow are zero.
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

    @names_arguments(SYMBOLS)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        retention: float = DEFAULTS.retention,
        consolidation: float = DEFAULTS.consolidation,
        damping: float = DEFAULTS.damping,
        ambient: float = DEFAULTS.ambient,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        scope: Scope = "network",
        directions: bool | Directions = False,
        estimator: EstimatorName = "sampled",
        every: int = DEFAULTS.every,
        warmup: int = DEFAULTS.warmup,
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
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        if fused and compact:
            raise ValueError("fused=True excludes compact=True")
        check_nonfinite_policy(non_finite, capturable)
        gate = Gate(
            Estimator(estimator, generator, model, process_group),
            Schedule(every, warmup),
            compact=compact,
            non_finite=non_finite,
            option_names=("lr", *GATE_OPTIONS, *OWN_OPTIONS),
            directions=chosen_directions(directions, estimator=estimator, compact=compact),
        )
        super().__init__(gate, params, add_counts(defaults, behind=None))
        require_weights(self._gate.params(), gate.directions)

    @classmethod
    @names_arguments(SYMBOLS)
    def wrap(
        cls,
        optimizer: Optimizer,
        *,
        retention: float = DEFAULTS.retention,
        consolidation: float = DEFAULTS.consolidation,
        damping: float = DEFAULTS.damping,
        ambient: float = DEFAULTS.ambient,
        scope: Scope = "network",
        estimator: EstimatorName = "sampled",
        every: int = DEFAULTS.every,
        warmup: int = DEFAULTS.warmup,
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
        would write that copy over the gated update.

        Examples:
            >>> model = nn.Linear(4, 3)
            >>> optimizer = SynGAP.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
            >>> logits = model(torch.randn(8, 4))
            >>> optimizer.observe(logits)
            >>> logits.logsumexp(1).mean().backward()
            >>> optimizer.step()
        """
        gate = {
            "retention": retention,
            "consolidation": consolidation,
            "damping": damping,
            "ambient": ambient,
            "scope": scope,
            "bounded": bounded,
        }
        chosen = Estimator(estimator, generator, model, process_group)
        return WrappedSynGAP(optimizer, chosen, Schedule(every, warmup), compact, non_finite, gate)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Fold what `closure` or the loop observed into importance, then move the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for work in self._begin_step() or ():
            with torch.set_grad_enabled(work.options["differentiable"]):
                update(work)
        return loss

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _begin_step(self) -> list[Work] | None:
        works = super()._begin_step()
        for work in works or ():
            if work.options["momentum"]:
                work.buffers = [local(self._buffer_of(param)) for param in work.whole]
        return works

    def _buffer_of(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return cast(Tensor, state["momentum_buffer"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its own options where given; its importance starts at zero."""
        for count in ("steps", "skipped") if self.param_groups else ():
            param_group.setdefault(count, self.param_groups[0][count])
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._check_last_group()

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_own_options(options)
        check_group(options, self._gate.directions)
