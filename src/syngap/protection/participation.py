"""Whether gate and teacher take part in training: what they return may not be used."""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from syngap.optim.errors import Notices
from syngap.optim.wrapped import WrappedSynGAP, inner_optimizer
from syngap.protection.pending import Pending
from syngap.protection.resuming import Optimizers
from syngap.protection.start import Start

__all__ = ["Participation"]

_STEPS = 16  # without a part, before a warning
_OTHER_START = (
    "the weights changed between protect() and the first step, and what is kept is what the model "
    "knew at protect(): load weights first, then call protect()"
)


class Participation:
    """Counts losses of the teacher that no gradient was taken of."""

    def __init__(self) -> None:
        self._made = self._used = self._with_gradient = 0
        self._notices = Notices()

    @property
    def unused(self) -> int:
        """How many of the losses that were returned took no part in a backward pass."""
        return max(0, self._made - self._used)

    def watch(self, loss: Tensor) -> Tensor:
        """Return a loss, and note when its gradient is taken."""
        self._made += 1
        value = loss._value if isinstance(loss, Pending) else loss  # which nobody has to wait for
        is_noted = False

        def note(grad: Tensor) -> None:
            nonlocal is_noted
            self._used += not is_noted
            is_noted = True

        if value.requires_grad:
            value.register_hook(note)  # type: ignore[no-untyped-call]
            self._with_gradient += 1
        if self._with_gradient - self._used > _STEPS:
            self._notices.warn(
                "unused",
                f"no gradient was taken of {_STEPS} results of protection.loss(), so the teacher "
                "took no part there: add the result, not its item(), to the loss before backward()",
            )
        return loss

    def remind_of_start(
        self, base: Optimizer, optimizers: Optimizers, start: Start, model: nn.Module
    ) -> None:
        """Warn where weights changed between protect() and the first step of all."""
        is_first = True
        made, before, now = weakref.ref(optimizers), weakref.ref(start), weakref.ref(model)

        def look(*_: object) -> None:
            nonlocal is_first
            protection, weights, trained = made(), before(), now()
            if is_first and protection and weights and trained is not None and not base.state:
                is_resumed = protection.steps > 1 if protection.gated() else protection.calls > 1
                if not is_resumed and weights.differs(trained):
                    self._notices.warn("start", _OTHER_START)
            is_first = False

        inner_optimizer(base).register_step_pre_hook(look)

    def remind_of_gate(self, calls: int, optimizers: Optimizers) -> None:
        """Warn once where the teacher is used, and no optimizer was made of the gate."""
        if calls == _STEPS and not optimizers.gated():
            self._notices.warn(
                "gate",
                f"protection.loss() was called {_STEPS} times, and protection.optimizer() never, so"
                " the gate takes no part: train with what it returns, or pass gate=False to "
                "protect()",
            )

    def remind_of_steps(self, base: Optimizer, gated: WrappedSynGAP) -> None:
        """Warn once where the optimizer behind the gate makes some steps by itself."""
        last, steps = gated.gate.steps, 0
        reference = weakref.ref(gated)

        def look(*_: object) -> None:
            nonlocal last, steps
            living = reference()
            now = last if living is None else living.gate.steps
            last, steps = now, steps + 1 if now == last else 0
            if steps == _STEPS:
                self._notices.warn(
                    "steps",
                    f"{type(base).__name__} made {_STEPS} steps by itself, so the gate took no "
                    "part in them: call step() of what protection.optimizer() returned",
                )

        inner_optimizer(base).register_step_post_hook(look)

    def remind(self, optimizer: Optimizer, optimizers: Optimizers) -> None:
        """Warn once where an optimizer makes some steps without a call of the teacher."""
        last, steps = optimizers.calls, 0
        reference = weakref.ref(optimizers)  # which would live as long as the optimizer

        def look(*_: object) -> None:
            nonlocal last, steps
            living = reference()
            now = -1 if living is None else living.calls
            last, steps = now, steps + 1 if now == last else 0
            if steps == _STEPS and living is not None:
                self._notices.warn(
                    "teacher",
                    f"{_STEPS} steps were taken without protection.loss(), so the teacher took no "
                    "part in them: add it to the loss of each step, outside of torch.no_grad(), or "
                    "pass teacher=False to protect()",
                )

        inner_optimizer(optimizer).register_step_post_hook(look)
