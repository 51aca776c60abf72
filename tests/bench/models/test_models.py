"""The networks that ship: their size, what they take and refuse, and that they can be trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap import SynGAP
from syngap.bench import streams
from syngap.bench.errors import UserError
from syngap.bench.models import cnn, mlp, registry, resnet18
from syngap.bench.options import checked, signature

Make = Callable[..., nn.Module]

# Narrow, so that they are quick; each is made for a shape and a number of classes.
SMALL: dict[str, Make] = {
    "mlp": partial(mlp, hidden=[12, 7]),
    "cnn-group": partial(cnn, width=4),
    "cnn-none": partial(cnn, width=4, norm="none"),
    "resnet18-batch": partial(resnet18, width=4),
    "resnet18-group": partial(resnet18, width=4, norm="group"),
}
EVERY = pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
ON_IMAGES = pytest.mark.parametrize(
    "make", [SMALL[name] for name in SMALL if name != "mlp"], ids=[n for n in SMALL if n != "mlp"]
)


def built(make: Make, shape: tuple[int, ...] = (3, 16, 16), classes: int = 5) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(shape, classes)


def images(count: int, shape: tuple[int, ...] = (3, 16, 16)) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def size(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


# Size ---------------------------------------------------------------------------------------------


def test_resnet18_has_the_familiar_number_of_parameters() -> None:
    with torch.device("meta"):
        assert size(resnet18((3, 32, 32), 100)) == 11_220_132
        assert size(resnet18((3, 32, 32), 10)) == 11_173_962
        assert size(resnet18((3, 32, 32), 100, norm="group")) == 11_220_132


def test_mlp_has_the_layers_it_was_asked_for() -> None:
    sizes = [(m.in_features, m.out_features) for m in mlp((1, 28, 28), 10, hidden=[30, 20])[1::2]]
    assert sizes == [(784, 30), (30, 20), (20, 10)]
    assert size(mlp((64,), 10)) == 64 * 100 + 100 + 100 * 10 + 10
    assert size(mlp((64,), 10, hidden=[])) == 64 * 10 + 10


def test_cnn_stays_small() -> None:
    assert size(cnn((1, 8, 8), 10)) < 50_000
    assert size(cnn((3, 32, 32), 100)) < 500_000
    assert size(cnn((3, 64, 64), 100)) < 1_000_000


# What they take and refuse ------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 64, 64), (2, 9, 20)], ids=str)
@pytest.mark.parametrize("classes", [1, 7])
def test_one_logit_a_class_for_images_of_any_size(
    make: Make, shape: tuple[int, ...], classes: int
) -> None:
    assert built(make, shape, classes)(images(2, shape)).shape == (2, classes)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("width", [1, 3, 7, 20, 33])
def test_resnet18_takes_any_width(norm: Any, width: int) -> None:
    model = resnet18((3, 8, 8), 4, width=width, norm=norm)
    assert model(images(2, (3, 8, 8))).isfinite().all()
    assert model.head.in_features == 8 * width


def test_no_group_of_channels_is_so_small_that_its_mean_is_all_of_it() -> None:
    for width in (1, 2, 3, 7, 8, 20, 31, 32, 33, 64, 100, 128):
        with torch.device("meta"):
            model = resnet18((1, 4, 4), 2, width=width, norm="group")
        norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
        assert min(norm.num_channels // norm.num_groups for norm in norms) >= min(4, width)
        assert 1 < max(norm.num_groups for norm in norms) <= 32


@ON_IMAGES
@pytest.mark.parametrize("shape", [(64,), (8, 8), (2, 3, 8, 8), (3, 0, 8), ()], ids=str)
def test_what_is_no_image_is_refused_in_words(make: Make, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"takes images \(channels, height, width\), got shape \("):
        make(shape, 10)


def test_mlp_takes_samples_of_any_shape_but_none() -> None:
    for shape in ((5,), (2, 3), (1, 4, 4), (2, 3, 4, 5)):
        assert mlp(shape, 3)(images(2, shape)).shape == (2, 3)
    with pytest.raises(UserError, match=r"mlp takes vectors or images, got shape \(\)"):
        mlp((), 3)


# What is promised of their outputs ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "cnn-group", "cnn-none", "resnet18-group"])
def test_a_samples_output_is_its_own(name: str) -> None:
    model, x = built(SMALL[name]), images(6)
    assert model.training
    alone = torch.cat([model(sample[None]) for sample in x])
    torch.testing.assert_close(model(x), alone, rtol=1e-4, atol=1e-5)


def test_group_normalisation_leaves_something_of_a_single_pixel() -> None:
    model = built(SMALL["resnet18-group"], (3, 8, 8))
    outputs = model(images(8, (3, 8, 8)))
    assert outputs.std(0).min() > 1e-3


@EVERY
def test_gradients_reach_every_parameter(make: Make) -> None:
    model = built(make)
    cross_entropy(model(images(8)), torch.arange(8) % 5).backward()
    assert {name for name, p in model.named_parameters() if not p.grad.count_nonzero()} == set()


@EVERY
def test_the_exact_estimator_reads_every_parameter(make: Make) -> None:
    model, x = built(make), images(8)
    optimizer = SynGAP(model.parameters(), lr=0.1, estimator="exact", model=model)
    logits = model(x)
    optimizer.observe(logits)  # warnings are errors here: nothing falls back
    cross_entropy(logits, torch.arange(8) % 5).backward()
    optimizer.step()
    importance = optimizer.importance()
    assert importance.keys() == dict(model.named_parameters()).keys()
    assert [name for name, value in importance.items() if not value.count_nonzero()] == []


@EVERY
def test_they_learn_a_handful_of_images_by_heart(make: Make) -> None:
    model, x, y = built(make, (3, 8, 8)), images(10, (3, 8, 8)), torch.arange(10) % 5
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def write_photographs(root: Path, classes: int = 4, count: int = 24, size: int = 32) -> None:
    """Write stripes of a direction for each class, in bright and in dark light of any colour."""
    chance = np.random.default_rng(0)
    down, across = np.mgrid[:size, :size]
    for label in range(classes):
        (root / str(label)).mkdir(parents=True)
        angle = math.pi * label / classes
        for number in range(count):
            place = math.cos(angle) * across + math.sin(angle) * down
            stripes = np.sin(place / 2 + chance.uniform(0, 2 * math.pi))[..., None]
            light = chance.uniform(0.6, 1.2, 3) if number % 2 else chance.uniform(-0.2, 0.4, 3)
            noise = chance.standard_normal((size, size, 3))
            image = 255 * (light + 0.3 * stripes + 0.05 * noise).clip(0, 1)
            Image.fromarray(image.astype(np.uint8)).save(root / str(label) / f"{number}.png")


def loss_on_photographs(root: Path, rate: float, **options: Any) -> float:
    """Return the mean loss of the last of twelve epochs of SGD."""
    stream = streams.load("folder", path=str(root), tasks=1, batch=12, epochs=12)
    model = built(partial(cnn, **options), stream.shape, stream.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for x, y in stream:
        optimizer.zero_grad()
        loss = cross_entropy(model(stream.transform(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return fmean(losses[-len(losses) // 12 :])


@pytest.mark.slow
def test_cnn_learns_photographs_at_rates_at_which_it_diverges_without_norms(tmp_path: Path) -> None:
    write_photographs(tmp_path)
    guessing = math.log(4)
    for rate in (0.05, 0.1, 0.3):
        assert loss_on_photographs(tmp_path, rate) < guessing / 2, rate
    for rate in (0.1, 0.3):
        diverged = loss_on_photographs(tmp_path, rate, norm="none")
        assert not diverged < guessing / 2, rate  # NaN, too


def test_cnn_without_norms_is_the_network_of_earlier_records() -> None:
    torch.manual_seed(3)
    stem, stage = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, padding=1)
    torch.manual_seed(3)
    for conv in (stem, stage):  # drawn in the order in which layers are made
        conv.reset_parameters()
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    earlier = nn.Sequential(
        stem, nn.ReLU(), stage, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)
    )
    torch.manual_seed(3)
    model, x = cnn((1, 8, 8), 10, width=4, norm="none"), images(5, (1, 8, 8))
    assert torch.equal(model(x), earlier(x))


@EVERY
def test_layers_have_names_to_show_plasticity_by(make: Make) -> None:
    first = {name.split(".")[0] for name, _ in built(make).named_parameters()}
    assert first <= {"stem", "stages", "head", "hidden1", "hidden2"}
    assert "head" in first


# By name ------------------------------------------------------------------------------------------


def test_the_registry_has_every_network_with_its_options() -> None:
    options = {name: list(signature(registry.get(name))) for name in ("mlp", "cnn", "resnet18")}
    assert options == {"mlp": ["hidden"], "cnn": ["width", "norm"], "resnet18": ["width", "norm"]}
    assert registry.names()[:3] == list(options)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("mlp", {"hidden": 100}, "a list, each a whole number ≥ 1"),
        ("mlp", {"hidden": [0]}, "a list, each a whole number ≥ 1"),
        ("cnn", {"width": 0}, "a whole number ≥ 1"),
        ("cnn", {"norm": "batch"}, 'one of "group", "none"'),
        ("resnet18", {"norm": "layer"}, 'one of "batch", "group"'),
    ],
)
def test_wrong_options_are_met_at_the_door(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        checked(given, signature(registry.get(name)), "model")
