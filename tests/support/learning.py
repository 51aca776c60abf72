"""What tests of methods, streams and the loop share: small tasks, a fragile network, every method.

Every sample of `numbered` tasks is its own number, so that whoever gets one knows which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syngap.bench import methods
from syngap.bench.methods import Learner, Method
from syngap.bench.streams import Batch, InMemory, Pixels, Split, Stream, Tasks

CLASSES = 6

# Every method, at least once, with options under which it keeps as much state as it can.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"weight_decay": 0.01}),
    "sgdm": ("sgdm", {"lr": 0.1}),
    "adam": ("adam", {"lr": 0.01}),
    "ballistic": ("ballistic", {"lr": 0.01, "beta": 0.9}),
    "ewcpp": ("ewcpp", {"interval": 3, "momentum": 0.5, "buffer": 9, "replay": 4}),
    "si": ("si", {"interval": 3, "momentum": 0.5, "buffer": 9, "replay": 4}),
    "mas": ("mas", {"interval": 3, "strength": 0.01, "buffer": 9, "replay": 4}),
    "mas-alone": ("mas", {"interval": 4, "strength": 0.01, "retention": 0.5, "average": 0.7}),
    "lwf": ("lwf", {"retention": 0.7, "warmup": 2, "momentum": 0.5}),
    "er": ("er", {"buffer": 9, "replay": 4, "momentum": 0.5}),
    "er-adam-balanced": (
        "er",
        {"buffer": 9, "replay": 4, "optimizer": "adam", "memory": "balanced"},
    ),
    "er_ace": ("er_ace", {"buffer": 9, "replay": 4, "optimizer": "ballistic", "lr": 0.01}),
    "derpp": ("derpp", {"buffer": 9, "replay": 4}),
    "agem": ("agem", {"buffer": 9, "replay": 4, "momentum": 0.5}),
    "agem-teacher": ("agem", {"buffer": 9, "replay": 4, "average": 0.7, "teacher": 0.5}),
    "cls_er": (
        "cls_er",
        {"buffer": 9, "replay": 4, "average": 0.7, "plastic": 0.5, "update": 0.5, "warmup": 2},
    ),
    "scr": ("scr", {"buffer": 9, "replay": 4, "momentum": 0.5, "temperature": 0.5}),
    "syngap": ("syngap", {"buffer": 9, "replay": 4, "momentum": 0.5}),
    "syngap-exact": (
        "syngap",
        {"buffer": 9, "replay": 4, "estimator": "exact", "every": 2, "warmup": 0},
    ),
    "syngap-empirical": ("syngap", {"buffer": 0, "estimator": "empirical", "bounded": False}),
    "syngap-adam": ("syngap", {"buffer": 9, "replay": 4, "optimizer": "adam", "lr": 0.01}),
    "syngap-directions": ("syngap", {"buffer": 9, "replay": 4, "directions": True}),
    "gated_er_ace": ("gated_er_ace", {"buffer": 9, "replay": 4, "momentum": 0.5}),
    "gated_derpp": ("gated_derpp", {"buffer": 9, "replay": 4, "average": 0.7, "teacher": 0.5}),
    "syngap-compact": ("syngap", {"buffer": 9, "replay": 4, "compact": True}),
    "er-average": ("er", {"buffer": 9, "replay": 4, "average": 0.7}),
    "er-auto": ("er", {"buffer": 9, "replay": 4, "average": "auto", "teacher": 0.5}),
    "ewcpp-average": ("ewcpp", {"interval": 3, "average": 0.7}),
    "syngap-average": ("syngap", {"buffer": 9, "replay": 4, "average": 0.7}),
    "er-teacher": ("er", {"buffer": 9, "replay": 4, "average": 0.7, "teacher": 0.5}),
    "er_ace-teacher": (
        "er_ace",
        {"buffer": 9, "replay": 4, "average": 0.7, "teacher": 0.5, "teacher_on": "all"},
    ),
    "derpp-teacher": (
        "derpp",
        {"buffer": 9, "replay": 4, "average": 0.7, "teacher": 0.5, "teacher_loss": "kl"},
    ),
    "syngap-teacher": ("syngap", {"buffer": 9, "replay": 4, "average": 0.7, "teacher": 0.5}),
    "joint": ("joint", {"momentum": 0.9}),
    "joint-retrained": ("joint", {"retrained": True, "optimizer": "adam", "lr": 0.01}),
}


def network(seed: int = 0) -> nn.Sequential:
    """A network with everything that makes it hard to go on: running averages, global chance."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, stride=2),
            nn.BatchNorm2d(3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(27, CLASSES),
        )


def picture_tasks(
    per_class: int = 4, tasks: Sequence[int] = (0, 0, 1, 1, 2, 2), augments: bool = True
) -> Tasks:
    """Noisy pictures of 8×8; `tasks` has the task of each class."""
    generator = torch.Generator().manual_seed(1)
    ideal = torch.randint(256, (CLASSES, 1, 8, 8), generator=generator)

    def split(each: int) -> Split:
        labels = torch.arange(CLASSES).repeat(each)
        noise = torch.randint(-60, 61, (len(labels), 1, 8, 8), generator=generator)
        x = (ideal[labels] + noise).clamp(0, 255).to(torch.uint8)
        return Split(InMemory(x), labels, torch.tensor(tasks)[labels])

    return Tasks(split(per_class), split(3), CLASSES, Pixels(255.0, (0.5,), (0.25,)), augments)


def pictures(**options: Any) -> Stream:
    """A stream of those pictures: 3 tasks of 8 samples."""
    return Stream(picture_tasks(), 0, **{"batch": 3, **options})


def learner(stream: Stream, seed: int = 0, **options: Any) -> Learner:
    """A learner of the stream whose every number is drawn from `seed`."""
    return Learner(network(seed), stream.transform, seed=seed, **options)


def made(case: str, pupil: Learner) -> Method:
    """A method by the name of its case."""
    name, options = CASES[case]
    method = methods.registry.get(name)(pupil, **options)
    assert isinstance(method, Method)
    return method


def beginning(case: str, stream: Stream, **options: Any) -> Callable[[], Method]:
    """What `train` calls to begin, and to begin again."""

    def begin() -> Method:
        torch.manual_seed(7)
        return made(case, learner(stream, **options))

    return begin


# Numbered samples ---------------------------------------------------------------------------------


def numbered(sizes: Sequence[int], shuffled: int | None = None) -> Tasks:
    """Tasks of these sizes; the label of a sample is its task, and its value its number.

    With `shuffled`, a seed, the samples of all tasks are stored in a mixed order.
    """
    task = torch.tensor([task for task, size in enumerate(sizes) for _ in range(size)])
    if shuffled is not None:
        task = task[torch.randperm(len(task), generator=torch.Generator().manual_seed(shuffled))]
    numbers = torch.arange(len(task), dtype=torch.float32)[:, None]
    one_each = torch.arange(len(sizes))
    test = Split(InMemory(one_each[:, None].float()), one_each, one_each)
    return Tasks(Split(InMemory(numbers), task, task), test, classes=len(sizes))


def numbers(batches: Iterable[Batch]) -> list[int]:
    """The numbers of the samples in these batches, in order."""
    return [int(value) for batch in batches for value in batch.x.flatten()]


def parts(stream: Stream) -> list[list[Batch]]:
    """The batches of each part of the stream, cut at its ends."""
    starts = [0, *stream.ends[:-1]]
    return [
        [stream[step] for step in range(start, end)]
        for start, end in zip(starts, stream.ends, strict=True)
    ]


def weights(method: Method) -> dict[str, Tensor]:
    """Copies of everything in the network, and in its average where there is one."""
    learner = method.learner
    found = {name: value.clone() for name, value in learner.model.state_dict().items()}
    if learner.evaluated_model is not learner.model:
        averaged = learner.evaluated_model.state_dict().items()
        found |= {f"average.{name}": value.clone() for name, value in averaged}
    return found
