"""SynGAP in Avalanche: handwritten digits, two at a time, at a rate that is too high for SGD."""

from tempfile import TemporaryDirectory

import torch
from avalanche.benchmarks.scenarios.supervised import class_incremental_benchmark
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.models import IncrementalClassifier
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Replay
from avalanche.training.templates import SupervisedTemplate
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from syngap.integrations.avalanche import SynGAPReplay

LR, MEMORY, TASKS, TRAINING = 1.5, 50, 5, 1200
torch.set_num_threads(1)  # a network this small is slower on two
images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
parts = {"train": slice(TRAINING), "test": slice(TRAINING, None)}
for name, which in parts.items():
    data = TensorDataset(images[which].float() / images.max(), labels[which])
    data.targets = labels[which].tolist()
    parts[name] = as_classification_dataset(data)
digits = class_incremental_benchmark(parts, num_experiences=TASKS, class_order=range(10))


def learner(gated: bool) -> SupervisedTemplate:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), IncrementalClassifier(100))
    accuracy = EvaluationPlugin(accuracy_metrics(experience=True))
    options = {"mem_size": MEMORY, "train_mb_size": 10, "train_epochs": 2, "evaluator": accuracy}
    if gated:
        return SynGAPReplay(model=model, lr=LR, **options)
    sgd = SGD(model.parameters(), lr=LR)
    return Replay(model=model, optimizer=sgd, criterion=nn.CrossEntropyLoss(), **options)


def forgetting(strategy: SupervisedTemplate, first: int = 0, checkpoint: str = "") -> float:
    accuracy = torch.zeros(TASKS, TASKS)  # after each task, on each task
    for task in range(first, TASKS):
        strategy.train(digits.train_stream[task])
        accuracy[task] = 100 * torch.tensor([*strategy.eval(digits.test_stream).values()])
        if checkpoint and task == TASKS // 2:
            save_checkpoint(strategy, checkpoint)
    return (accuracy.amax(0) - accuracy[-1])[:-1].mean().item()


plain, whole, resumed = (learner(gated) for gated in (False, True, True))
with TemporaryDirectory() as folder:
    lost = forgetting(plain), forgetting(whole, checkpoint=f"{folder}/middle")
    forgetting(*maybe_load_checkpoint(resumed, f"{folder}/middle"))
print("points of accuracy lost: {:.1f} with SGD, {:.1f} with SynGAP".format(*lost))
assert lost[1] < lost[0] / 2
found, expected = resumed.optimizer.importance(), whole.optimizer.importance()
assert all(torch.equal(found[name], expected[name]) for name in expected)
