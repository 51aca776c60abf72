"""Fine-tuning that keeps what a convolutional classifier knew: digits, then digits transposed.

Of the upright digits 256 images without labels are left. Three seeds of AdamW alone, with the gate,
with the teacher, with both, and with both and weight interpolation that keeps 85 % of the change.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

import syngap

images, labels = map(torch.tensor, load_digits(return_X_y=True))
upright = images.float().view(-1, 1, 8, 8) / 16
transposed = upright.transpose(2, 3)
test = torch.arange(len(labels)) % 4 == 0


def train(model: nn.Module, optimizer: Optimizer, x: Tensor, steps: int, extra=lambda: 0.0) -> None:
    for _ in range(steps):
        chosen = torch.randint(int((~test).sum()), (64,))
        loss = extra() + cross_entropy(model(x[~test][chosen]), labels[~test][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accuracies(model: nn.Module) -> list[float]:
    """Return the accuracy on upright digits and on transposed ones, in per cent."""
    with torch.no_grad():
        right = [model(x[test]).argmax(1) == labels[test] for x in (upright, transposed)]
    return [100 * each.float().mean().item() for each in right]


torch.set_num_threads(1)  # a network this small is slower on two
ends: dict[str, list[list[float]]] = {}
for seed in range(3):
    torch.manual_seed(seed)
    convolutions = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()]
    start = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    train(start, AdamW(start.parameters(), lr=3e-3), upright, 600)
    ends.setdefault("before", []).append(accuracies(start))
    for name in ("AdamW", "gate", "teacher", "gate and teacher"):
        model, parts = copy.deepcopy(start), {"gate": "gate" in name, "teacher": "teacher" in name}
        protection = syngap.protect(model, upright[~test][:256], rank="full", **parts)
        torch.manual_seed(0)  # the same batches for all
        optimizer = protection.optimizer(AdamW(model.parameters(), lr=1e-2))
        train(model, optimizer, transposed, 150, protection.loss)
        ends.setdefault(name, []).append(accuracies(model))
    protection.interpolate(0.85)
    ends.setdefault("both, keeping 85 %", []).append(accuracies(model))
means = {name: torch.tensor(found).mean(0) for name, found in ends.items()}
for name, (old, new) in means.items():
    print(f"{name:18}  upright {old:.1f}, transposed {new:.1f}")
assert (means["gate and teacher"] > means["AdamW"] + torch.tensor([30, -1])).all()
assert means["both, keeping 85 %"][0] > means["gate and teacher"][0] > means["teacher"][0]
