"""A classifier of images: it learns new classes through a second head, and keeps those it knows.

The loss is the cross-entropy over the classes of an image's own head, in nats an image: over the
new classes for new images, and over those that it knew for old ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap.bench import seeds
from syngap.bench.errors import UserError
from syngap.bench.finetuning.images import Images, Labelled
from syngap.bench.finetuning.models import Making
from syngap.bench.finetuning.models.classifier import NEW_HEAD, Classifier, TwoHeads
from syngap.bench.finetuning.point import Halves
from syngap.bench.finetuning.setting import (
    TEST_BATCH,
    Anchors,
    Batch,
    Measured,
    Precision,
    Setting,
)
from syngap.messages import count_of

__all__ = ["ClassifierSetting"]


class ClassifierSetting(Setting):
    """A classifier, and images to learn and to keep.

    Args:
        classifier: the model.
        making: images, seed and device.
        anchors: how many of the known images, whose labels no method but `replay` sees.
        windows: images at most of each half of the test images of a kind.
        precision: of the forward pass.

    Attributes:
        classes: how many it knew.
        tests: images of both halves of each kind, old kinds first and then the new one; labels of
            new images come after those of the classes that it knew.
    """

    new_parameters = frozenset({f"{NEW_HEAD}.weight", f"{NEW_HEAD}.bias"})

    def __init__(
        self,
        classifier: Classifier,
        making: Making[Images],
        *,
        anchors: Anchors,
        windows: int,
        precision: Precision = "fp32",
    ) -> None:
        images = making.source
        start = TwoHeads(classifier.features, classifier.head, images.classes).eval()
        super().__init__(start, making.seed, making.device, precision)
        self._prepare, self._known = classifier.prepare, images.known
        self._new = images.train
        self.classes = classifier.head.out_features
        highest = max(int(one.labels.max()) for one in (images.known, *images.old.values()))
        if highest >= self.classes:
            raise UserError(
                f"images.old: a class has the number {highest}, and the model knows {self.classes}"
            )
        self.tests = {kind: _halves(found, windows) for kind, found in images.old.items()}
        shifted = Labelled(images.test.images, images.test.labels + self.classes)
        self.tests["new"] = _halves(shifted, windows)
        self._anchors = self._draw_anchors(anchors.count)

    # Images

    def _draw_anchors(self, count: int) -> Tensor:
        if count > len(self._known):
            images = count_of(len(self._known), "known image")
            raise UserError(f"anchors.count: got {count}; the data have {images}")
        order = torch.randperm(len(self._known), generator=seeds.generator(self.seed, "anchors"))
        return self._on_device(self._known.images[order[:count]])

    def _on_device(self, images: Tensor) -> Tensor:
        return self._prepare(images.to(self.device))

    def _draw(self, found: Labelled, count: int, purpose: str) -> tuple[Tensor, Tensor]:
        order = seeds.generator(self.seed, purpose)
        some = found.rows(torch.randint(len(found), (count,), generator=order))
        return self._on_device(some.images), some.labels.to(self.device)

    def batch(self, count: int, purpose: str) -> Batch:
        """Return new images, and their classes after those that the model knew."""
        images, labels = self._draw(self._new, count, purpose)
        return images, labels + self.classes

    def old_batch(self, count: int, purpose: str) -> Batch:
        """Return known images and their classes."""
        return self._draw(self._known, count, purpose)

    # Predictions

    @property
    def anchors(self) -> Tensor:
        """Known images, without labels."""
        return self._anchors

    def predict(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return logits of the classes that the model knew."""
        with self.autocast():
            logits: Tensor = model(inputs)
        return logits

    def logits(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """Return logits of all classes, minus infinity for those of the head of other images."""
        assert isinstance(model, TwoHeads)
        with self.autocast():
            logits = model.all_logits(images).float()
        is_new = torch.arange(logits.shape[1], device=logits.device) >= self.classes
        others = is_new != (labels >= self.classes).unsqueeze(1)
        return logits.masked_fill(others, -torch.inf)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over the classes of each image's own head."""
        images, labels = batch
        return cross_entropy(self.logits(model, images, labels), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Measured:
        """Return cross-entropy and accuracy on both halves of each kind."""
        model.eval()
        losses: dict[str, Halves] = {}
        right: dict[str, Halves] = {}
        for kind, halves in self.tests.items():
            (loss, share), (other_loss, other_share) = (self._mean(model, half) for half in halves)
            losses[kind], right[kind] = (loss, other_loss), (share, other_share)
        new, exact = losses.pop("new"), right.pop("new")
        return Measured(new, losses, exact, right)

    def _mean(self, model: nn.Module, found: Labelled) -> tuple[float, float]:
        """Return the mean loss, and the share of images that are classified right."""
        total, right = 0.0, 0
        for place in range(0, len(found), TEST_BATCH):
            some = found.rows(slice(place, place + TEST_BATCH))
            labels = some.labels.to(self.device)
            logits = self.logits(model, self._on_device(some.images), labels)
            total += float(cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(1) == labels).sum())
        return total / len(found), right / len(found)


def _halves(found: Labelled, count: int) -> tuple[Labelled, Labelled]:
    """Return every second image and the others, of each so many, evenly spread."""
    first, second = (found.rows(slice(start, None, 2)) for start in (0, 1))
    return _spread(first, count), _spread(second, count)


def _spread(found: Labelled, count: int) -> Labelled:
    if len(found) <= count:
        return found
    return found.rows(torch.arange(count) * len(found) // count)
