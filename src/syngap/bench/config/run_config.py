"""The configuration of one run: complete, checked, and the same in every process that reads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Le

from syngap.bench.config.component import Component, Value
from syngap.bench.config.reading import FORMAT
from syngap.bench.methods.learner import NonFinite, Precision
from syngap.bench.options import Natural, NonNegative, Says, checked, signature

__all__ = ["RunConfig", "Training"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The options of `training`.

    Args:
        device: "auto" is the GPU where there is one.
        precision: "fp32", or "bf16" for the network's forward pass.
        captured: on a GPU, replay training steps as CUDA graphs.
        channels_last: on a CPU, lay images and weights out with channels last, in which a ResNet is
            faster and the last bits differ; a GPU always does.
        compiled: let torch.compile compile the network's forward and backward pass while it learns.
        threads: CPU threads of a run. A sum depends in its last bits on how many there are, so it
            is part of the experiment and does not follow the number of workers.
        deterministic: on a GPU, take kernels that add in the same order each time, so that a run
            repeats bit for bit, more slowly; on a CPU it does anyway.
        non_finite: where a loss or its gradients are NaN or infinite, "raise" ends the run and says
            at which step; "skip" leaves such steps out and counts them, uncaptured on a GPU.
        evaluate_every: steps between evaluations within a task; 0 evaluates at task ends alone.
        checkpoint_seconds: at least so long between checkpoints within a task.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision = "fp32"
    captured: bool = True
    channels_last: bool = False
    compiled: bool = False
    threads: Annotated[int, Ge(1), Le(1024), Says("a whole number from 1 to 1024")] = 1
    deterministic: bool = False
    non_finite: NonFinite = "raise"
    evaluate_every: Natural = 0
    checkpoint_seconds: NonNegative = 60.0

    def __post_init__(self) -> None:
        checked(vars(self), signature(type(self)), "training")

    def as_mapping(self) -> dict[str, Value]:
        """Return the options as files hold them."""
        return asdict(self)

    def on_device(self, device: str) -> Training:
        """Return the same options with another device."""
        return Training(**{**asdict(self), "device": device})


@dataclass(frozen=True)
class RunConfig:
    """One row of an experiment with one seed.

    Args:
        experiment: its name.
        row: of the table; usually the method's name.
        seed: of everything that is random.
        stream: what is learned.
        model: the network.
        training: how it is trained.
        method: by which it learns.
    """

    experiment: str
    row: str
    seed: int
    stream: Component
    model: Component
    training: Training
    method: Component

    @property
    def name(self) -> str:
        """ROW-SEED, the name of the run's folder."""
        return f"{self.row}-{self.seed}"

    def on_device(self, device: str) -> RunConfig:
        """Return the same run on another device."""
        return replace(self, training=self.training.on_device(device))

    def as_mapping(self) -> dict[str, Value]:
        """Return what config.yaml holds."""
        return {
            "format": FORMAT,
            "experiment": self.experiment,
            "row": self.row,
            "seed": self.seed,
            "stream": self.stream.as_mapping(),
            "model": self.model.as_mapping(),
            "training": self.training.as_mapping(),
            "method": self.method.as_mapping(),
        }
