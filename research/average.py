"""How long an average of the weights should be, on digits: fixed lengths against `average: auto`.

Averages change nothing of training, so one run has them all beside each other: ACC, and the mean
accuracy over all steps (anytime), for tasks of three lengths, five and ten tasks, and domains (the
same digits rotated and mirrored, a form at a time). Minutes on a CPU:

    python research/average.py --seeds 5..9
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from statistics import fmean, stdev

import torch
from scipy.stats import t as student
from torch import Tensor, nn

from syngap.bench import methods, models, streams
from syngap.bench.config.experiment import seeds_of
from syngap.bench.methods import Learner
from syngap.bench.methods.average import AutomaticAverage, Average
from syngap.bench.streams import InMemory, Pixels, Split, Stream, Tasks

RATES = {"er": 0.453, "er_ace": 0.174}  # those of the experiment `digits`
CLASSES = [(5, 3), (5, 10), (10, 10), (5, 40)]  # tasks, epochs
SETTINGS = [
    *((name, "classes", tasks, epochs) for name in RATES for tasks, epochs in CLASSES),
    *(("er", "domains", 5, epochs) for epochs in (3, 10)),
]
AVERAGES: dict[str, Callable[[nn.Module], Average]] = {
    **{
        str(fixed): lambda model, fixed=fixed: Average(model, fixed)
        for fixed in (0.9, 0.97, 0.99, 0.999)
    },
    "auto": AutomaticAverage,
}
EVERY = 10  # steps between evaluations


def forms(x: Tensor) -> list[Tensor]:
    """Return images in five forms: as they are, rotated, transposed, upside down, mirrored."""
    rotated = [x.rot90(quarters, (-2, -1)) for quarters in (1, 2)]
    return [x, rotated[0], x.transpose(-2, -1), rotated[1], x.flip(-1)]


def domains(seed: int) -> Tasks:
    """Return digits with all ten labels in every task, each task in a form of its own."""
    digits = streams.registry.get("digits")(0, None, tasks=5)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).tolist()

    def split(of: Split, parts: int) -> Split:
        x, count = of.samples.take(torch.arange(len(of.labels))), len(of.labels)
        part = torch.randint(parts, (count,), generator=torch.Generator().manual_seed(1))
        chosen = [part == task % parts for task in range(5)]
        images = [forms(x[rows])[order[task]] for task, rows in enumerate(chosen)]
        task = torch.cat([torch.full((int(rows.sum()),), k) for k, rows in enumerate(chosen)])
        labels = torch.cat([of.labels[rows] for rows in chosen])
        return Split(InMemory(torch.cat(images).contiguous()), labels, task)

    return Tasks(split(digits.train, 5), split(digits.test, 1), 10, Pixels(16.0), False)


def accuracy(model: nn.Module, stream: Stream, tasks: int) -> float:
    """Return the mean accuracy on the first tasks, in per cent."""
    found = []
    for task in range(tasks):
        rows = (stream.test.task == task).nonzero().flatten()
        logits = model(stream.transform(stream.test.samples.take(rows), None))
        found.append(100 * float((logits.argmax(1) == stream.test.labels[rows]).float().mean()))
    return fmean(found)


def run(name: str, kind: str, tasks: int, epochs: int, seed: int) -> dict[str, tuple[float, float]]:
    """Return ACC and anytime of each average."""
    if kind == "domains":
        stream = Stream(domains(seed), seed, batch=10, epochs=epochs)
    else:
        stream = streams.load("digits", seed=seed, tasks=tasks, epochs=epochs, batch=10)
    torch.manual_seed(seed)
    learner = Learner(models.mlp(stream.shape, stream.classes), stream.transform, seed=seed)
    method = methods.registry.get(name)(learner, lr=RATES[name], buffer=50, replay=10)
    averages = {label: make(learner.model) for label, make in AVERAGES.items()}
    networks = {"none": learner.model} | {label: each.model for label, each in averages.items()}
    found: dict[str, list[float]] = {label: [] for label in networks}
    for step in range(len(stream)):
        method.step(stream[step])
        for average in averages.values():
            average.follow(stream[step].y)
        if (step + 1) % EVERY == 0 or step + 1 == len(stream):
            known = 1 + sum(step >= end for end in stream.ends)
            with torch.no_grad():
                for label, network in networks.items():
                    found[label].append(accuracy(network, stream, min(known, stream.tasks)))
    return {label: (values[-1], fmean(values)) for label, values in found.items()}


def lines(seeds: list[int]) -> Iterator[str]:
    """Yield the table as it grows, and what `auto` gains over each other, paired over seeds."""
    labels = ["none", *AVERAGES]
    yield "setting".ljust(24) + "".join(label.rjust(13) for label in labels)
    ends: dict[str, list[list[float]]] = {label: [] for label in labels}
    for setting in SETTINGS:
        runs = [run(*setting, seed) for seed in seeds]
        for label in labels:
            ends[label].append([each[label][0] for each in runs])
        cells = [tuple(fmean(each[label][i] for each in runs) for i in (0, 1)) for label in labels]
        name, kind, tasks, epochs = setting
        text = f"{name} {kind} {tasks} x {epochs}".ljust(24)
        yield text + "".join(f"{acc:.1f} ({anytime:.1f})".rjust(13) for acc, anytime in cells)
    means = {label: [fmean(rows) for rows in zip(*ends[label], strict=True)] for label in labels}
    for label in labels[:-1] if len(seeds) > 1 else []:
        gains = [a - b for a, b in zip(means["auto"], means[label], strict=True)]
        half = student.ppf(0.975, len(gains) - 1) * stdev(gains) / math.sqrt(len(gains))
        yield f"auto less {label}: {fmean(gains):+.2f} ± {half:.2f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0..4")
    torch.set_num_threads(1)
    for line in lines(seeds_of(parser.parse_args().seeds)):
        print(line, flush=True)
