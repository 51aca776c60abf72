"""SynGAP and a small memory in a loop of your own: handwritten digits, two at a time.

Three seeds with SynGAP and with plain SGD, all else alike: at this high rate SGD falls. At 0.3 the
two are level.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from syngap import SynGAP
from syngap.bench import metrics, streams
from syngap.bench.memory import Reservoir


def learn(kind: type[torch.optim.Optimizer], seed: int) -> list[list[float]]:
    """Return R, the accuracy on every pair of digits (columns) after each of them (rows)."""
    torch.manual_seed(seed)
    stream = streams.load("digits", seed=seed, epochs=10, batch=10)  # any iterable of (x, y) does
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = kind(model.parameters(), lr=1.0)
    memory = Reservoir(50, generator=torch.Generator().manual_seed(seed))
    test, found = stream.test, []
    images = test.samples.take(torch.arange(len(test.labels))) / 16
    for step in range(len(stream)):
        x, y = stream[step]
        kept = memory.draw(10)
        both = (torch.cat([x, kept["x"]]), torch.cat([y, kept["y"]])) if kept else (x, y)
        logits = model(both[0] / 16)
        loss = cross_entropy(logits, both[1])
        optimizer.zero_grad()
        if isinstance(optimizer, SynGAP):
            optimizer.observe(logits)  # importance, from this same forward pass
        loss.backward()
        optimizer.step()
        memory.add(x=x, y=y)
        if step + 1 in stream.ends:
            with torch.no_grad():
                hits = 100.0 * (model(images).argmax(1) == test.labels)
            found.append([hits[test.task == task].mean().item() for task in range(stream.tasks)])
    return found


def main() -> None:
    torch.set_num_threads(1)  # a network this small is slower on two
    ends = {}
    for kind in (torch.optim.SGD, SynGAP):
        runs = [learn(kind, seed) for seed in range(3)]
        ends[kind] = torch.tensor([(metrics.accuracy(r), metrics.forgetting(r)) for r in runs])
        accuracy, forgotten = ends[kind].mean(0).tolist()
        print(f"{kind.__name__:6}  accuracy {accuracy:.1f}, forgotten {forgotten:.1f}")
    gained, forgotten = (ends[SynGAP] - ends[torch.optim.SGD]).mean(0).tolist()
    assert gained > 10
    assert forgotten < -10


if __name__ == "__main__":
    main()
