"""Avalanche's replay, a turn at every line of its input; prints the seconds of each turn.

It runs in an environment that has avalanche-lib, which does not need to have syngap.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
answers = os.fdopen(os.dup(1), "w")  # what Avalanche prints goes elsewhere
os.dup2(2, 1)
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch  # noqa: E402
from avalanche.benchmarks import tensors_benchmark  # noqa: E402
from avalanche.training.plugins import EvaluationPlugin  # noqa: E402
from avalanche.training.supervised import Replay  # noqa: E402
from cases import CASES  # noqa: E402

device = torch.device(sys.argv[1])
case = CASES[device.type][sys.argv[2]]
torch.set_num_threads(1)
x, y = case.samples(case.batch * case.steps)
scaled = x.float().div_(255).sub_(0.5).div_(0.25)
parts = [(scaled, y)] * 2
stream = tensors_benchmark(
    train_tensors=parts, test_tensors=parts, task_labels=[0, 0], complete_test_set_only=False
).train_stream
model = case.network().to(device)
strategy = Replay(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
    criterion=torch.nn.CrossEntropyLoss(),
    mem_size=case.memory,
    train_mb_size=case.batch,
    train_epochs=1,
    device=device,
    evaluator=EvaluationPlugin(),
)
strategy.train(stream[0])  # fills its memory
clock = time.process_time if device.type == "cpu" else time.perf_counter
for _ in sys.stdin:
    start = clock()
    strategy.train(stream[1])
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(clock() - start, file=answers, flush=True)
