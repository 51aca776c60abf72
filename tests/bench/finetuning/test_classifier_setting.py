"""A classifier's losses are those of an image's own head; images are read, cropped and split."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from finetuned import classifier_setting, share_nothing, tiny_classifier, tiny_images
from PIL import Image
from torch import nn

from syngap.bench.errors import UserError
from syngap.bench.finetuning.classifier_setting import ClassifierSetting
from syngap.bench.finetuning.images import Images, Labelled
from syngap.bench.finetuning.images.class_files import read_class_files, split_known
from syngap.bench.finetuning.images.new_classes import folder_images
from syngap.bench.finetuning.models import Making
from syngap.bench.finetuning.models.efficientnet_lite import (
    Convolution,
    EfficientNetLite,
    efficientnet_lite0,
)
from syngap.bench.finetuning.setting import Anchors


def making(images: Images, data: Path | None = None) -> Making[Images]:
    return Making(images, 0, torch.device("cpu"), data, share_nothing)


# Losses -------------------------------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_over_the_classes_of_the_own_head() -> None:
    of = classifier_setting()
    with torch.no_grad():
        of.start.get_parameter("new_head.weight").normal_()
    new, old = of.batch(3, "new"), of.old_batch(3, "old")
    images, labels = (torch.cat(parts) for parts in zip(new, old, strict=True))
    told = 0.0
    for image, label in zip(images, labels.tolist(), strict=True):
        logits = of.start.all_logits(image[None])[0].tolist()  # type: ignore[operator]
        own = range(3, 5) if label >= 3 else range(3)
        told += math.log(sum(math.exp(logits[place]) for place in own)) - logits[label]
    found = of.loss(of.start, (images, labels))
    assert float(found.detach()) == pytest.approx(told / 6, rel=1e-4)
    found.backward()  # type: ignore[no-untyped-call]
    assert all(bool(param.grad.isfinite().all()) for param in of.start.parameters())  # type: ignore[union-attr]
    of.start.zero_grad()


def test_predictions_on_anchors_are_those_of_the_known_classes() -> None:
    of = classifier_setting()
    assert of.predict(of.start, of.anchors).shape == (8, 3)
    assert of.evaluate(of.start).new == pytest.approx((math.log(2),) * 2)  # a head of zeros


def test_old_losses_and_accuracies_are_those_of_all_test_images_of_a_half() -> None:
    of = classifier_setting(windows=99)
    found, images = of.evaluate(of.start), tiny_images()
    assert list(found.old) == ["objects", "animals"]
    assert found.old_exact is not None
    for kind, labelled in images.old.items():
        for half in (0, 1):
            some = labelled.rows(slice(half, None, 2))
            with torch.no_grad():
                logits = of.start(some.images.float() / 255)
            right = float((logits.argmax(1) == some.labels).float().mean())
            assert found.old_exact[kind][half] == pytest.approx(right)
            loss = float(nn.functional.cross_entropy(logits, some.labels))
            assert found.old[kind][half] == pytest.approx(loss, rel=1e-4)


def test_so_many_images_of_a_half_are_spread_over_it() -> None:
    of = classifier_setting(windows=2)
    first, second = of.tests["objects"]
    all_of_them = tiny_images().old["objects"].images
    assert torch.equal(first.images, all_of_them[[0, 4]])
    assert torch.equal(second.images, all_of_them[[1, 5]])


def test_what_does_not_fit_the_model_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"anchors\.count: got 9; the data have 8 known images"):
        classifier_setting(anchors=9)
    few = tiny_images()
    more = Images(few.train, few.test, 2, Labelled(few.known.images, few.known.labels + 7), few.old)
    with pytest.raises(UserError, match=r"images\.old: a class has the number 9.* knows 3"):
        ClassifierSetting(
            tiny_classifier(making(more)),
            making(more),
            anchors=Anchors(source="images", count=4),
            windows=4,
        )


# Images -------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Known images of four classes, three of each, and two class folders to learn."""
    (tmp_path / "known").mkdir()
    for number in range(4):
        for name in "abc":
            pixels = np.full((16, 32, 3), 10 * number, np.uint8)
            pixels[1:15, 9:23] = 200 + number  # the square of 87.5 % in the middle
            Image.fromarray(pixels).save(tmp_path / "known" / f"n0{number}_{name}.png")
    for name in ("cup", "hat"):
        (tmp_path / "new" / name).mkdir(parents=True)
        for view in range(4):
            Image.new("RGB", (8, 8), (50 * view, 0, 0)).save(
                tmp_path / "new" / name / f"{view}.png"
            )
    return tmp_path


def test_a_file_is_the_square_in_its_middle_and_its_class_is_in_its_name(data: Path) -> None:
    found = read_class_files(data / "known", 14)
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert found.images.shape == (12, 3, 14, 14)
    for image, label in zip(found.images, found.labels, strict=True):
        assert bool((image == 200 + label).all())


def test_known_images_for_anchors_are_not_tested_on_and_another_kind_has_none(data: Path) -> None:
    whole = read_class_files(data / "known", 7)
    numbered = Labelled(torch.arange(12).view(12, 1, 1, 1), whole.labels)
    known, kinds = split_known(numbered, animals=1)
    assert list(kinds) == ["objects", "animals"]
    assert known.images.flatten().tolist() == [3, 5, 7, 9, 11]
    assert kinds["objects"].images.flatten().tolist() == [4, 6, 8, 10]
    assert kinds["animals"].images.flatten().tolist() == [0, 1, 2]
    assert list(split_known(numbered, animals=0)[1]) == ["images"]
    with pytest.raises(UserError, match="animals: got 3, which leaves 3 images"):
        split_known(numbered, animals=3)


def test_new_classes_are_read_as_streams_read_them(data: Path) -> None:
    found = folder_images(data, path="new", old="known", animals=1, size=7)
    assert (found.classes, len(found.train), len(found.test)) == (2, 6, 2)
    assert found.train.images.shape == (6, 3, 8, 8)
    with pytest.raises(UserError, match="there is no folder"):
        folder_images(data, path="new", old="nowhere")
    (data / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no images called CLASS_NAME\.jpg"):
        folder_images(data, path="new", old="empty")


# EfficientNet-Lite0 -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "kernel", "stride"), [(6, 3, 2), (7, 5, 2), (5, 3, 1), (4, 1, 1)])
def test_convolutions_are_padded_as_in_tensorflow(size: int, kernel: int, stride: int) -> None:
    torch.manual_seed(0)
    layer, image = Convolution(1, 1, kernel, stride), torch.randn(1, 1, size, size)
    whole = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    before = whole // 2
    told = torch.zeros(math.ceil(size / stride), math.ceil(size / stride))
    for row in range(len(told)):
        for column in range(len(told)):
            for i in range(kernel):
                for j in range(kernel):
                    y, x = row * stride + i - before, column * stride + j - before
                    if 0 <= y < size and 0 <= x < size:
                        told[row, column] += layer.weight[0, 0, i, j].detach() * image[0, 0, y, x]
    torch.testing.assert_close(layer(image)[0, 0].detach(), told)


def test_the_network_has_its_published_size_and_is_read_by_the_order_of_its_weights(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleList([EfficientNetLite(), nn.Linear(1280, 1000)])
    assert sum(param.numel() for param in whole.parameters()) == 4_652_008
    held = {f"other.{name}": value for name, value in whole.state_dict().items()}
    torch.save(held, tmp_path / "weights.pth")
    found = efficientnet_lite0(making(tiny_images(), tmp_path), file="weights.pth", size=32)
    inputs = found.prepare(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8))
    torch.testing.assert_close(inputs, torch.ones(1, 3, 32, 32))
    with torch.no_grad():
        told = whole[1](whole[0].eval()(inputs))
        torch.testing.assert_close(found.head(found.features.eval()(inputs)), told)


def test_a_file_that_is_not_there_or_holds_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        efficientnet_lite0(making(tiny_images(), tmp_path))
    torch.save({"weight": torch.zeros(3)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match="does not hold EfficientNet-Lite0"):
        efficientnet_lite0(making(tiny_images(), tmp_path), file="weights.pth")
