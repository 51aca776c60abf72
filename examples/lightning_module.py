"""SynGAP in Lightning: handwritten digits, two at a time, at a rate that is too high for SGD."""

from tempfile import TemporaryDirectory

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from syngap import SynGAP
from syngap.integrations.lightning import SynGAPCallback

TASKS, PASSES, TEST, KEPT, BATCH = 5, 5, 70, 10, 20
images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
images = images.float() / images.max()
tasks = [(task == labels // 2).nonzero()[:, 0] for task in range(TASKS)]


class Classifier(LightningModule):
    def __init__(self, kind: type[Optimizer]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
        self.optimizer = kind(self.parameters(), lr=1.0)
        self.accuracy = torch.zeros(TASKS, TASKS)  # after each task, on each task

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer

    def train_dataloader(self) -> DataLoader:  # an epoch is a task, half of it replayed
        new = tasks[self.current_epoch][:-TEST]
        kept = torch.cat([task[:KEPT] for task in tasks[: self.current_epoch + 1]])
        which = torch.cat([new, kept.repeat(len(new) // len(kept))]).repeat(PASSES)
        return DataLoader(TensorDataset(images[which], labels[which]), BATCH, shuffle=True)

    def on_train_epoch_end(self) -> None:
        hits = 100.0 * (self.net(images).argmax(1) == labels)
        self.accuracy[self.current_epoch] = torch.stack([hits[t[-TEST:]].mean() for t in tasks])


def train(kind: type[Optimizer], *others: Callback, **resume: str) -> tuple[Optimizer, float]:
    torch.manual_seed(0)
    module, each = Classifier(kind), {"max_epochs": TASKS, "reload_dataloaders_every_n_epochs": 1}
    Trainer(accelerator="cpu", logger=False, callbacks=[*others], **each).fit(module, **resume)
    return module.optimizer, (module.accuracy.amax(0) - module.accuracy[-1])[:-1].mean().item()


with TemporaryDirectory() as folder:
    _, plain = train(SGD, ModelCheckpoint(folder, "plain"))
    ours = SynGAPCallback(output_of="net"), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    whole, gated = train(SynGAP, *ours)
    resumed, _ = train(SynGAP, *ours, ckpt_path=f"{folder}/epoch=2.ckpt")
print(f"points of accuracy lost: {plain:.1f} with SGD, {gated:.1f} with SynGAP")
assert gated < plain
assert all(map(torch.equal, whole.importance(), resumed.importance()))
