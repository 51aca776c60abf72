"""The learner: the network, its input pipeline and its random generators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from syngap.bench import seeds
from syngap.bench.methods.average import Average
from syngap.bench.methods.compiler import Compiler
from syngap.bench.methods.guard import Guard
from syngap.optim import NonFinite

__all__ = ["Learner", "NonFinite", "Precision"]

Precision: TypeAlias = Literal["fp32", "bf16"]
Prepare: TypeAlias = Callable[[Tensor, torch.Generator | None], Tensor]
Classifier: TypeAlias = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


class Learner:
    """A network with its input pipeline: takes stored samples, returns logits.

    Args:
        model: the network.
        prepare: stored samples → network inputs; with a generator, augmented.
        seed: of every random number drawn while training.
        device: where to work.
        precision: "bf16" runs the network under autocast; parameters and loss stay float32.
        captured: whether steps are captured in CUDA graphs, in which values cannot be read.
        channels_last: lay images and weights out with channels last; a GPU always does.
        compiled: let torch.compile compile the forward passes of learning, unless the network has
            hooks; evaluation is never compiled.
        non_finite: "raise" an error when the loss is NaN or infinite, or "skip" the step. Skipping
            checks every gradient, so steps are not captured.

    Attributes:
        guard: checks losses and gradients.
        average: the network's averaged weights, where a method keeps them.
        classifier: makes logits for evaluation of the network's outputs, where a method sets it; it
            also gets a function from stored samples to outputs.
        report: called at every part of an evaluation.

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
        channels_last: bool = False,
        compiled: bool = False,
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
        # goes into transposing tensors. A CPU gains less, and a small network loses.
        wanted = channels_last or self.device.type == "cuda"
        self._last = wanted and all(p.dim() < 5 for p in model.parameters())
        if self._last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average: Average | None = None
        self.classifier: Classifier | None = None
        self.report: Callable[[], None] = _ignore
        self._compiler = Compiler() if compiled else None
        self._never_finite = _nonfinite_buffers(self.model)
        self._prepare, self._seed = prepare, seed
        self._sources: list[torch.Generator] = []
        self._augmentation = self.generator("augmentation", self.device)

    def predict(self, x: Tensor) -> Tensor:
        """Return float32 logits for learning: augmented, in training mode."""
        return self.forward(self.augment(x))

    def augment(self, x: Tensor) -> Tensor:
        """Return stored samples as the network sees them for learning; every call draws anew."""
        return self._prepare(x.to(self.device), self._augmentation)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return float32 logits of samples that `augment` returned, in training mode."""
        return self._forward(inputs, self._fast(self.model))

    def forward_average(self, inputs: Tensor) -> Tensor:
        """Return the averaged network's logits of such samples: evaluation mode, no gradient."""
        assert self.average is not None
        return self.forward_without_gradient(inputs, self.average.model)

    @torch.no_grad()
    def forward_without_gradient(self, inputs: Tensor, model: nn.Module) -> Tensor:
        """Return another network's logits of such samples, in the mode that it is in."""
        return self._forward(inputs, self._fast(model))

    @property
    def compiling(self) -> float:
        """The seconds that torch.compile took so far."""
        return 0.0 if self._compiler is None else self._compiler.seconds

    @property
    def preparations(self) -> int:
        """How many forward passes ran eagerly or compiled first: no more once all is compiled."""
        return 0 if self._compiler is None else self._compiler.preparations

    @property
    def evaluated_model(self) -> nn.Module:
        """The network that is evaluated and saved: the averaged one if there is one."""
        return self.model if self.average is None else self.average.model

    @torch.no_grad()
    def evaluate(self, x: Tensor, *, newest: bool = False) -> Tensor:
        """Return float32 logits for evaluation: no augmentation, evaluation mode.

        Args:
            x: stored samples.
            newest: use the newest weights even if there is an average.
        """
        model = self.model if newest else self.evaluated_model
        training = model.training
        model.eval()

        def outputs(stored: Tensor) -> Tensor:
            self.report()
            return self._forward(self._prepare(stored.to(self.device), None), model)

        try:
            return outputs(x) if self.classifier is None else self.classifier(outputs(x), outputs)
        finally:
            model.train(training)

    def follow(self, labels: Tensor | None = None) -> None:
        """Update the average of the weights, if there is one, after a step on these labels."""
        if self.average is not None:
            self.average.follow(labels)

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a new random generator, seeded from the run's seed and `purpose`."""
        source = seeds.generator(self._seed, purpose, device)
        self._sources.append(source)
        return source

    def finite_tensors(self) -> Iterator[Tensor]:
        """Yield the network's tensors that must stay finite; a mask of -inf is left out."""
        for model in dict.fromkeys((self.model, self.evaluated_model)):
            for name, value in model.state_dict().items():
                if isinstance(value, Tensor) and name not in self._never_finite:
                    yield value

    def snapshot(self) -> Callable[[], None]:
        """Take a snapshot of buffers and random generators; return a function that restores it."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        states = [(source, source.get_state()) for source in self._sources]
        passes = None if self._compiler is None else self._compiler.state_dict()

        @torch.no_grad()
        def restore() -> None:
            for buffer, value in buffers:
                buffer.copy_(value)
            for source, state in states:
                source.set_state(state)
            if self._compiler is not None and passes is not None:
                self._compiler.load_state_dict(passes)

        return restore

    def state_dict(self) -> dict[str, Any]:
        """Return the state that training changes."""
        state = {
            "model": self.model.state_dict(),
            "augmentation": self._augmentation.get_state(),
        }
        if self.average is not None:
            state["average"] = self.average.state_dict()
        if self._compiler is not None:
            state["compiler"] = self._compiler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.model.load_state_dict(state["model"])
        self._augmentation.set_state(state["augmentation"].cpu())
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self._compiler is not None:
            self._compiler.load_state_dict(state["compiler"])

    def _fast(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        return model if self._compiler is None else partial(self._compiler, model)

    def _forward(self, x: Tensor, model: Callable[[Tensor], Tensor]) -> Tensor:
        if self._last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        low = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if low else nullcontext():
            logits = model(x)
        return logits.float()


def _ignore() -> None:
    """Do nothing."""


def _nonfinite_buffers(model: nn.Module) -> set[str]:
    return {name for name, buffer in model.named_buffers() if not buffer.isfinite().all()}
