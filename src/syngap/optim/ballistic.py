"""Ballistic (Vastola, Gershman, Rajan 2025): every gradient divided by its running magnitude."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from syngap.optim.checks import check_number
from syngap.optim.parameter_state import VERSION, names_of
from syngap.optim.state_checks import check_groups, check_states, forms_of, match
from syngap.optim.tensors import accumulator, wide

__all__ = ["Ballistic"]


class Ballistic(Optimizer):
    """Gradient descent at a speed that does not depend on the gradient's size.

    s ← β s + (1 - β) g²;  θ ← θ (1 - η · weight_decay) - η g / sqrt(s + δ)

    s starts at zero without bias correction, so the first steps are long; there is no momentum
    and weight decay is decoupled from the gradient.

    Args:
        params: parameters or groups of them.
        lr: η ≥ 0.
        beta: β in [0, 1); 0.999 in general, 0.9 in the authors' CIFAR runs.
        eps: δ > 0, inside the root.
        weight_decay: ≥ 0.
        maximize: climb instead of descending.

    Examples:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = Ballistic([weight], lr=0.1, beta=0.0)
        >>> (3.0 * weight).sum().backward()
        >>> optimizer.step()
        >>> round(weight.item(), 4)
        0.9
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        beta: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta": beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "version": VERSION,
        }
        _check_options(defaults)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure`, if given, evaluates the loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [
            (param, group)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if any(param.grad.is_sparse or param.grad.is_complex() for param, _ in moving):
            raise RuntimeError("Ballistic takes dense real gradients, got a sparse or complex one")
        for param, group in moving:
            self._update(param, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` gave; s keeps its precision whatever θ's is."""
        saved = match(state_dict, self.param_groups)
        check_groups(state_dict["param_groups"], self.param_groups, _check_options)
        names = names_of(self.param_groups)
        check_states(saved, self.state, forms_of(self), names)
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["version"] = VERSION
        for param, state in saved.items():
            if "square" in state:
                dtype = accumulator(param.dtype)
                self.state[param]["square"] = state["square"].to(param.device, dtype, copy=True)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        grad = cast(Tensor, param.grad)
        if group["maximize"]:
            grad = -grad
        state = self.state[param]
        if not state:
            state["square"] = torch.zeros_like(
                param, dtype=accumulator(param.dtype), memory_format=torch.preserve_format
            )
        square = state["square"]
        square.mul_(group["beta"]).addcmul_(grad, grad, value=1.0 - group["beta"])
        if group["weight_decay"]:
            param.mul_(1.0 - group["lr"] * group["weight_decay"])
        velocity = wide(grad) / square.add(group["eps"]).sqrt_()
        param.sub_(velocity.mul_(group["lr"]))


def _check_options(options: dict[str, Any]) -> None:
    check_number("lr", options["lr"], "≥ 0", lambda value: bool(value >= 0.0))
    check_number("beta", options["beta"], "in [0, 1)", lambda value: bool(0.0 <= value < 1.0))
    check_number("eps", options["eps"], "> 0", lambda value: bool(value > 0.0))
    check_number("weight_decay", options["weight_decay"], "≥ 0", lambda value: bool(value >= 0.0))
