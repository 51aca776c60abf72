"""Learn handwritten digits two at a time, never seeing the earlier ones again but for a few.

Five tasks of two digits, one head, one pass over each; scikit-learn's embedded 8 × 8 images. Every
method runs at each learning rate on the same seeds, because which one is best depends on the rate.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from syngap import SynGAP

SEEDS = range(5)
RATES = (0.1, 0.3, 1.0)
BATCH = REPLAY = 8
BUFFER = 50
METHODS = {  # name: gated, with a replay buffer
    "SGD": (False, False),
    "SynGAP, no replay": (True, False),
    "replay (ER)": (False, True),
    "SynGAP + replay": (True, True),
}


class Reservoir:
    """Keeps every sample of the stream with the same probability."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self.size, self.seen, self.generator = size, 0, generator
        self.x, self.y = torch.empty(size, 64), torch.empty(size, dtype=torch.long)

    def add(self, x: Tensor, y: Tensor) -> None:
        for sample, label in zip(x, y, strict=True):
            slot = self.seen
            if self.seen >= self.size:
                slot = int(torch.randint(self.seen + 1, (), generator=self.generator))
            self.seen += 1
            if slot < self.size:
                self.x[slot], self.y[slot] = sample, label

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        index = torch.randint(min(self.seen, self.size), (count,), generator=self.generator)
        return self.x[index], self.y[index]


def run(gated: bool, replays: bool, rate: float, seed: int) -> tuple[Tensor, float]:
    """Return R, where R[i, j] is the accuracy on task j after task i, and seconds of training."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    classes = torch.randperm(10, generator=generator)
    shuffled = torch.randperm(len(labels), generator=generator)
    train, test = shuffled[: len(labels) * 3 // 4], shuffled[len(labels) * 3 // 4 :]

    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if gated:
        optimizer = SynGAP(model.parameters(), lr=rate)
    buffer = Reservoir(BUFFER, generator)
    accuracy, seconds = torch.zeros(5, 5), 0.0
    for task in range(5):
        start = time.perf_counter()
        arriving = train[torch.isin(labels[train], classes[2 * task : 2 * task + 2])]
        for index in arriving.split(BATCH):
            stream_x, stream_y = images[index], labels[index]
            x, y = stream_x, stream_y
            if replays and buffer.seen:
                old_x, old_y = buffer.draw(REPLAY)
                x, y = torch.cat([x, old_x]), torch.cat([y, old_y])
            logits = model(x)
            loss = functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            if isinstance(optimizer, SynGAP):
                optimizer.observe(logits)
            loss.backward()
            optimizer.step()
            buffer.add(stream_x, stream_y)
        seconds += time.perf_counter() - start
        with torch.no_grad():
            right = model(images[test]).argmax(1) == labels[test]
        for other in range(5):
            members = torch.isin(labels[test], classes[2 * other : 2 * other + 2])
            accuracy[task, other] = 100 * right[members].float().mean()
    return accuracy, seconds


def forgetting(accuracy: Tensor) -> float:
    """Mean over all but the last task of its best accuracy before the end minus that at the end."""
    return (accuracy[:-1, :-1].max(0).values - accuracy[-1, :-1]).mean().item()


def main() -> None:
    torch.set_num_threads(1)
    print(__doc__)
    print(f"{'':20}", *(f"rate {rate:<15}" for rate in RATES), "time a run")
    print(f"{'':20}", *[f"{'accuracy':10}   {'forgets':7}"] * len(RATES))
    runs, done = len(METHODS) * len(RATES) * len(SEEDS), 0
    for name, (gated, replays) in METHODS.items():
        cells, seconds = [], []
        for rate in RATES:
            finals, losses = [], []
            for seed in SEEDS:
                done += 1
                if sys.stderr.isatty():
                    print(f"\r\033[Krun {done} of {runs}", end="", file=sys.stderr, flush=True)
                accuracy, took = run(gated, replays, rate, seed)
                finals.append(accuracy[-1].mean().item())
                losses.append(forgetting(accuracy))
                seconds.append(took)
            spread = statistics.stdev(finals)
            cells.append(
                f"{statistics.mean(finals):4.1f} ± {spread:3.1f}   {sum(losses) / 5:4.1f}   "
            )
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        print(f"{name:20}", *cells, f"{statistics.mean(seconds):.2f} s", flush=True)
    print(f"\nmean ± sd of {len(SEEDS)} seeds, percent; {BUFFER} samples kept by replay")


if __name__ == "__main__":
    main()
