"""The network, how it sees samples, and where its random numbers come from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from syngap.bench import seeds
from syngap.bench.methods.average import Average
from syngap.bench.methods.guard import Guard
from syngap.optim import NonFinite

__all__ = ["Learner", "NonFinite", "Precision"]

Precision: TypeAlias = Literal["fp32", "bf16"]
Prepare: TypeAlias = Callable[[Tensor, torch.Generator | None], Tensor]


class Learner:
    """What every method is given: a network that takes stored samples and returns logits.

    Args:
        model: the network.
        prepare: stored samples → what the network sees; with a generator, augmented.
        seed: of every random number drawn while training.
        device: where to work.
        precision: "bf16" runs the network under autocast; parameters and loss stay float32.
        captured: whether steps are to be captured in CUDA graphs, in which no one can look at
            values.
        non_finite: what is done with a loss that is NaN or infinite: "raise", or "skip" the step,
            which needs a look at every gradient, and so steps that are not captured.

    Attributes:
        guard: looks.
        average: the network's averaged weights, where a method keeps them.

    Examples:
        >>> learner = Learner(nn.Linear(2, 3), lambda x, generator: x / 255)
        >>> learner.predict(torch.tensor([[0, 255]], dtype=torch.uint8)).shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        prepare: Prepare,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        precision: Precision = "fp32",
        captured: bool = False,
        non_finite: NonFinite = "raise",
    ) -> None:
        self.device, self.precision = torch.device(device), precision
        self.guard = Guard(self.device, non_finite)
        self.captured = captured and non_finite != "skip"
        if captured and not self.captured:
            warnings.warn(
                "steps are not captured: non_finite: skip looks at the gradients of each",
                stacklevel=2,
            )
        self.model = model.to(self.device).train()
        # Tensor cores read channels last: in the usual order two fifths of a ResNet's time on a GPU
        # goes into turning tensors around.
        self._last = self.device.type == "cuda" and all(p.dim() < 5 for p in model.parameters())
        if self._last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average: Average | None = None
        self._never_finite = _not_finite(self.model)
        self._prepare, self._seed = prepare, seed
        self._sources: list[torch.Generator] = []
        self._augmentation = self.generator("augmentation", self.device)

    def predict(self, x: Tensor) -> Tensor:
        """Return float32 logits for learning: augmented, in training mode."""
        return self.forward(self.augment(x))

    def augment(self, x: Tensor) -> Tensor:
        """Return stored samples as the network sees them for learning; every call draws anew."""
        return self._prepare(x.to(self.device), self._augmentation)

    def forward(self, seen: Tensor) -> Tensor:
        """Return float32 logits of samples that `augment` returned, in training mode."""
        return self._forward(seen, self.model)

    @torch.no_grad()
    def forward_average(self, seen: Tensor) -> Tensor:
        """Return the averaged network's logits of such samples: evaluation mode, no gradient."""
        assert self.average is not None
        return self._forward(seen, self.average.model)

    @property
    def judged(self) -> nn.Module:
        """The network as it is judged and kept: the averaged one where there is one."""
        return self.model if self.average is None else self.average.model

    @torch.no_grad()
    def evaluate(self, x: Tensor, *, newest: bool = False) -> Tensor:
        """Return float32 logits for judging: as stored, in evaluation mode.

        Args:
            x: stored samples.
            newest: of the network that learns, whatever is judged.
        """
        judged = self.model if newest else self.judged
        training = judged.training
        judged.eval()
        try:
            return self._forward(self._prepare(x.to(self.device), None), judged)
        finally:
            judged.train(training)

    def follow(self) -> None:
        """Let averaged weights, if there are any, take in the newest."""
        if self.average is not None:
            self.average.follow()

    def parameters(self) -> list[nn.Parameter]:
        """Return what can be learned."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a new source of random numbers, its seed drawn from the run's."""
        source = seeds.generator(self._seed, purpose, device)
        self._sources.append(source)
        return source

    def lasting(self) -> Iterator[Tensor]:
        """Return what of the network must stay finite: not a mask of -inf, which never was."""
        for model in dict.fromkeys((self.model, self.judged)):
            for name, value in model.state_dict().items():
                if isinstance(value, Tensor) and name not in self._never_finite:
                    yield value

    def held(self) -> Callable[[], None]:
        """Return what brings buffers and random numbers back to where they are now."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        drawn = [(source, source.get_state()) for source in self._sources]

        @torch.no_grad()
        def bring_back() -> None:
            for buffer, value in buffers:
                buffer.copy_(value)
            for source, state in drawn:
                source.set_state(state)

        return bring_back

    def state_dict(self) -> dict[str, Any]:
        """Return all that training changes here."""
        state = {
            "model": self.model.state_dict(),
            "augmentation": self._augmentation.get_state(),
        }
        if self.average is not None:
            state["average"] = self.average.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.model.load_state_dict(state["model"])
        self._augmentation.set_state(state["augmentation"].cpu())
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    def _forward(self, x: Tensor, model: nn.Module) -> Tensor:
        if self._last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        low = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if low else nullcontext():
            logits: Tensor = model(x)
        return logits.float()


def _not_finite(model: nn.Module) -> set[str]:
    return {name for name, buffer in model.named_buffers() if not buffer.isfinite().all()}
