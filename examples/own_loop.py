"""SynGAP and a small memory in a loop of your own: handwritten digits, two at a time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from syngap import SynGAP, streams
from syngap.memory import Reservoir


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a network this small is slower on two
    stream = streams.load("digits", epochs=10, batch=10)  # any iterable of (x, y) does
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = SynGAP(model.parameters(), lr=1.0)
    memory = Reservoir(50, generator=torch.Generator().manual_seed(0))

    for step in range(len(stream)):
        x, y = stream[step]
        kept = memory.draw(10)
        both = (torch.cat([x, kept["x"]]), torch.cat([y, kept["y"]])) if kept else (x, y)
        logits = model(both[0] / 16)
        loss = cross_entropy(logits, both[1])
        optimizer.zero_grad()
        optimizer.observe(logits)  # importance, from this same forward pass
        loss.backward()
        optimizer.step()
        memory.add(x=x, y=y)

        if step + 1 in stream.ends:
            test = stream.test
            with torch.no_grad():
                right = model(test.samples.take(torch.arange(len(test.labels))) / 16).argmax(1)
            hits = (right == test.labels).double()
            by_task = [100 * hits[test.task == task].mean().item() for task in range(stream.tasks)]
            learned = stream.ends.index(step + 1) + 1
            print(f"after task {learned}:", *(f"{accuracy:5.1f}" for accuracy in by_task[:learned]))


if __name__ == "__main__":
    main()
