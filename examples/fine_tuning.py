"""Fine-tuning that keeps what a model knew: handwritten digits, then the same digits lying down.

Of the upright digits 256 images without labels are left. Three seeds of AdamW with and without the
gate, on weights as they are and on weights that were turned, where it closes directions.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap import SynGAP, rotate, unrotate

images, labels = map(torch.tensor, load_digits(return_X_y=True))
upright = images.float().view(-1, 8, 8) / 16
lying = upright.transpose(1, 2)
test = torch.arange(len(labels)) % 4 == 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int) -> None:
    for _ in range(steps):
        chosen = torch.randint(int((~test).sum()), (64,))
        optimizer.zero_grad()
        cross_entropy(model(x[~test][chosen]), labels[~test][chosen]).backward()
        optimizer.step()


def fine_tune(model: nn.Module, *, gated: bool, turned: bool) -> list[float]:
    """Return the accuracy on upright digits and on lying ones."""
    torch.manual_seed(0)  # the same batches for all
    known = upright[~test][:256]
    if turned:
        rotate(model, known)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if gated:
        optimizer = gate = SynGAP.wrap(optimizer, consolidation=0.9999)
        gate.consolidate(model, known, batch_size=1)
    train(model, optimizer, lying, 150)
    unrotate(model)  # a plain model again
    with torch.no_grad():
        hits = [model(x[test]).argmax(1) == labels[test] for x in (upright, lying)]
    return [100 * hit.float().mean().item() for hit in hits]


torch.set_num_threads(1)  # a network this small is slower on two
ends: dict[str, list[list[float]]] = {}
for seed in range(3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), upright, 600)
    for name in ("AdamW", "gated", "AdamW, turned", "gated, turned"):
        options = {"gated": "gated" in name, "turned": "turned" in name}
        ends.setdefault(name, []).append(fine_tune(copy.deepcopy(model), **options))
means = {name: torch.tensor(found).mean(0) for name, found in ends.items()}
for name, (old, new) in means.items():
    print(f"{name:13}  upright {old:.1f}, lying {new:.1f}")
assert (means["gated, turned"] > means["AdamW"] + torch.tensor([20, -2])).all()
assert means["gated, turned"][0] > means["AdamW, turned"][0]
