"""torch.compile for the forward passes of learning; a resumed run ends with the same bits."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from syngap.bench.errors import UserError

__all__ = ["Compiler", "compiler_errors_refused"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_EAGER = 2  # forward passes of a shape before it is compiled
_PACKAGES = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


class Compiler:
    """Runs forward passes of networks, compiled from the third with inputs of a shape on.

    Shapes that come once, while a memory fills, are not worth a compiler's time. Each shape has
    code of its own: code for several would depend on which came first, and a run that was resumed
    would end with other bits. For the same reason a checkpoint has the numbers of passes.

    A function is compiled and not the module, which keeps its names and can be copied. In a process
    that compiles, torch's option `donated_buffer` stays off.

    Attributes:
        backend: of torch.compile.
        seconds: that compiling took.
        preparations: passes before which their code was not there: they ran eagerly or compiled.
    """

    backend: ClassVar[str | Callable[..., Any]] = "inductor"

    def __init__(self) -> None:
        self.seconds, self.preparations = 0.0, 0
        self._has_warned = False
        self._passes: Counter[str] = Counter()
        self._compiled: dict[tuple[nn.Module, str], Callable[[Tensor], Tensor]] = {}

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the network's outputs."""
        case = f"{tuple(x.shape)} {x.stride()} {x.dtype} {model.training} {torch.is_grad_enabled()}"
        if self._passes[case] < _EAGER:
            self._passes[case] += 1
            self.preparations += 1
            eager: Tensor = model(x)
            return eager
        if (model, case) not in self._compiled:
            self.preparations += 1
            self._compiled[model, case] = self._compile(model, x)
        return self._compiled[model, case](x)

    def state_dict(self) -> dict[str, int]:
        """Return the number of passes of each shape and mode, as far as it matters."""
        return dict(self._passes)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore what `state_dict` gave."""
        self._passes = Counter(state)

    def _compile(self, model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the network's compiled forward pass, after a trial that leaves no trace."""
        if any(map(_has_hooks, model.modules())):
            self._warn()
            return model
        start = time.perf_counter()
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        devices = [x.device] if x.device.type == "cuda" else []
        try:
            # Importance needs a second backward pass, and torch looks at this in every one: without
            # it, a backward pass may overwrite what the forward pass saved.
            functorch_config.donated_buffer = False
            with torch.random.fork_rng(devices):
                run = torch.compile(_own_code(model), dynamic=False, backend=self.backend)
                outputs: Tensor = run(x)
                if outputs.requires_grad:
                    parameters = [p for p in model.parameters() if p.requires_grad]
                    torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise _refusal(error) from error
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        self.seconds += time.perf_counter() - start
        return run

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "steps are not compiled: the network has hooks, such as those of estimator: exact, "
                "which compiled code may not call",
                stacklevel=2,
            )


@contextmanager
def compiler_errors_refused() -> Iterator[None]:
    """Raise what goes wrong in torch's compiler as a UserError, which says what to do."""
    try:
        yield
    except Exception as error:
        kinds = type(error).__mro__  # not imported, as that takes long; they differ by version too
        if any(kind.__module__.startswith(_PACKAGES) for kind in kinds):
            raise _refusal(error) from error
        raise


def _refusal(error: Exception) -> UserError:
    text = str(error).partition("Set TORCHDYNAMO")[0]
    if "\nOutput:" in text:  # of a compiler: its command, which comes before, is long
        text = f"{text.partition(chr(10))[0]}: {text.partition('Output:')[2]}"
    return UserError(
        "training.compiled: torch.compile cannot compile the network "
        f"({' '.join(text.split())[:300]}); leave compiled false"
    )


def _own_code(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that calls the network, whose code object no other function has.

    To code objects torch.compile ties what it compiled, at most eight times for each. So it does
    not matter what else the process compiled.
    """

    def forward(x: Tensor) -> Tensor:
        outputs: Tensor = model(x)
        return outputs

    return FunctionType(
        forward.__code__.replace(), forward.__globals__, closure=forward.__closure__
    )


def _has_hooks(module: nn.Module) -> bool:
    return any(vars(module).get(name) for name in _HOOKS)
