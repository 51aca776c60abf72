"""What a network sees of stored samples, against plain loops over samples and pixels."""

from __future__ import annotations

import pytest
import torch
from chances import UNLIKELY, chance, p_value
from torch import Tensor

from syngap.bench.streams.tasks import Pixels
from syngap.bench.streams.transform import Transform

COLOUR = Pixels(scale=255.0, mean=(0.5, 0.25, 0.125), std=(0.5, 0.25, 2.0))
PLAIN = Pixels()


def photographs(count: int, height: int = 8, width: int = 6, channels: int = 3) -> Tensor:
    """Images of which no two pixels and no two neighbours are alike by chance."""
    shape = (count, channels, height, width)
    return torch.randint(1, 256, shape, generator=chance(0), dtype=torch.uint8)


def scaled_in_loops(x: Tensor, pixels: Pixels) -> Tensor:
    result = x.double()
    for sample in result:
        for channel, values in enumerate(sample):
            mean = pixels.mean[channel % len(pixels.mean)]
            std = pixels.std[channel % len(pixels.std)]
            values.copy_((values / pixels.scale - mean) / std)
    return result.float()


def moved_in_loops(image: Tensor, down: int, right: int, mirrored: bool) -> Tensor:
    """One image, mirrored first and then moved, black where nothing comes in."""
    _, height, width = image.shape
    result = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            row, column = i - down, j - right
            if 0 <= row < height and 0 <= column < width:
                result[:, i, j] = image[:, row, width - 1 - column if mirrored else column]
    return result


def every_move(image: Tensor, pad: int) -> dict[tuple[int, int, bool], Tensor]:
    shifts = range(-pad, pad + 1)
    return {
        (down, right, mirrored): moved_in_loops(image, down, right, mirrored)
        for down in shifts
        for right in shifts
        for mirrored in (False, True)
    }


def moves(before: Tensor, after: Tensor, pad: int) -> list[tuple[int, int, bool]]:
    """How each image was moved; fails where none of the possible moves gives it."""
    found = []
    for image, result in zip(before, after, strict=True):
        (move,) = [m for m, one in every_move(image, pad).items() if torch.equal(one, result)]
        found.append(move)
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4, 4), (5, 3, 7)], ids=str)
def test_values_are_scaled_by_channel_to_float32(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randint(256, shape, generator=chance(0)).to(dtype)
    seen = Transform(COLOUR, augments=False)(x)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen, scaled_in_loops(x, COLOUR), rtol=1e-6, atol=1e-6)


def test_one_mean_serves_every_channel() -> None:
    pixels, x = Pixels(scale=16.0, mean=(0.3,), std=(0.2,)), photographs(4)
    expected = scaled_in_loops(x, pixels)
    torch.testing.assert_close(Transform(pixels, False)(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("pad", [0, 1, 3])
def test_every_image_is_moved_by_one_of_the_possible_moves(dtype: torch.dtype, pad: int) -> None:
    x = photographs(20).to(dtype)
    seen = Transform(PLAIN, augments=True, pad=pad)(x, chance(1))
    moves(x.float(), seen, pad)


def test_what_comes_in_at_the_border_is_black_before_scaling() -> None:
    x = photographs(30)
    moved = Transform(PLAIN, augments=True, pad=2)(x, chance(1))
    seen = Transform(COLOUR, augments=True, pad=2)(x, chance(1))
    assert moved.eq(0).any()
    torch.testing.assert_close(seen, scaled_in_loops(moved, COLOUR), rtol=1e-6, atol=1e-6)


def test_shifts_and_mirrors_are_uniform_and_independent() -> None:
    count, pad = 6000, 1
    image = photographs(1, 4, 4, 1)
    x = image.expand(count, -1, -1, -1)
    seen = Transform(PLAIN, augments=True, pad=pad)(x, chance(2))
    cases = torch.stack(list(every_move(image[0].float(), pad).values()))
    found = (seen[:, None] == cases).flatten(2).all(2)
    assert (found.sum(1) == 1).all()
    counts = found.sum(0).double()
    assert p_value(counts, torch.full_like(counts, count / len(cases))) > UNLIKELY


def test_images_of_one_batch_are_moved_independently() -> None:
    # Were the moves of neighbours tied, equal pairs would come more or less often than by chance.
    image = photographs(1, 4, 4, 1)
    seen = Transform(PLAIN, augments=True, pad=1)(image.expand(6000, -1, -1, -1), chance(3))
    pairs = seen.reshape(3000, 2, -1)
    equal = (pairs[:, 0] == pairs[:, 1]).all(1).sum().double()
    observed = torch.stack([equal, 3000 - equal])
    assert p_value(observed, torch.tensor([3000 / 18, 3000 * 17 / 18]).double()) > UNLIKELY


def test_the_same_random_numbers_give_the_same_images() -> None:
    transform, x = Transform(COLOUR, augments=True), photographs(10, 32, 32)
    torch.manual_seed(0)
    first = transform(x, chance(4))
    torch.manual_seed(1)
    assert torch.equal(first, transform(x, chance(4)))
    assert not torch.equal(first, transform(x, chance(5)))


def test_torchs_own_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    Transform(COLOUR, augments=True)(photographs(10), chance(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("generator", [None, 0])
def test_stored_values_stay_as_they_are(dtype: torch.dtype, generator: int | None) -> None:
    x = photographs(10).to(dtype)
    before = x.clone()
    for pixels in (PLAIN, COLOUR):
        seen = Transform(pixels, augments=True)(x, None if generator is None else chance(0))
        seen.zero_()
        assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("augments", "generator"), [(True, None), (False, 0), (False, None)], ids=str
)
def test_nothing_moves_where_it_was_not_asked_for(augments: bool, generator: int | None) -> None:
    x = photographs(10)
    seen = Transform(PLAIN, augments)(x, None if generator is None else chance(0))
    assert torch.equal(seen, x.float())


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 8)], ids=str)
def test_what_is_no_image_is_only_scaled(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=chance(0))
    transform = Transform(COLOUR, augments=True)
    assert torch.equal(transform(x, chance(1)), transform(x))


def test_batches_may_be_empty() -> None:
    transform = Transform(COLOUR, augments=True)
    assert transform(photographs(0), chance(0)).shape == (0, 3, 8, 6)
