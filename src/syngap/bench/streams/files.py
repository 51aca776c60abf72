"""Samples in image files, read on use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from syngap.bench.errors import UserError
from syngap.bench.streams.places import check_plain

__all__ = ["SUFFIXES", "ImageFiles", "size_of"]

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF")
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff"})
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
LARGEST = 1 << 26  # pixels: a small file can claim to be an image that fills the memory
CACHE_BYTES = 1 << 30  # bytes of read images that stay in memory, all or none of them


class ImageFiles:
    """Images in files, as uint8 (3, height, width), read on first use.

    Where all of them together are small enough they stay in memory; others are read anew each time.

    Args:
        paths: one file a sample.
        shape: of a sample.
        resize: bring every image to that shape, squashed where its sides have another ratio;
            otherwise one of another size is refused.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "red.png"
        ...     Image.new("RGB", (2, 1), "red").save(path)
        ...     ImageFiles([path], (3, 1, 2)).take(torch.tensor([0])).tolist()
        [[[[255, 255]], [[0, 0]], [[0, 0]]]]
    """

    def __init__(
        self, paths: Sequence[Path], shape: tuple[int, int, int], *, resize: bool = False
    ) -> None:
        self.paths, self._shape, self._resize = list(paths), shape, resize
        self._cache: dict[int, Tensor] | None = (
            {} if len(paths) * math.prod(shape) <= CACHE_BYTES else None
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self._shape

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, index: Tensor) -> Tensor:
        """Read the images at `index`."""
        values = torch.empty((len(index), *self._shape), dtype=torch.uint8)
        for row, number in zip(values, index.tolist(), strict=True):
            row.copy_(self._image(number))
        return values

    def to(self, device: torch.device) -> ImageFiles:
        """Return themselves: files are near to no device."""
        return self

    def _image(self, number: int) -> Tensor:
        if self._cache is not None and number in self._cache:
            return self._cache[number]
        image = torch.from_numpy(self._read(self.paths[number])).permute(2, 0, 1).contiguous()
        if self._cache is not None:
            self._cache[number] = image
        return image

    def _read(self, path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        size = (self._shape[2], self._shape[1])
        with _decode_errors(path), _open(path) as image:
            if image.size != size and not self._resize:
                raise UserError(
                    f"{path}: an image of {image.width}×{image.height}, expected "
                    f"{size[0]}×{size[1]} like the others"
                )
            if image.mode not in MODES:
                raise UserError(
                    f"{path}: pixels of the kind {image.mode}, expected 8 bits a channel; "
                    "convert it first"
                )
            # A palette with transparency becomes RGB only through RGBA.
            plain = (image.convert("RGBA") if image.mode == "P" else image).convert("RGB")
            if plain.size != size:
                plain = plain.resize(size, _filter(plain.size, size))
            return np.array(plain)


def size_of(path: Path) -> tuple[int, int]:
    """Return width and height of an image by its header alone."""
    with _decode_errors(path), _open(path) as image:
        return image.width, image.height


def _open(path: Path) -> Image.Image:
    check_plain(path)
    image = Image.open(path, formats=FORMATS)  # reads the header
    if image.width * image.height > LARGEST:
        image.close()
        raise UserError(
            f"{path}: refused, an image of {image.width}×{image.height}; up to {LARGEST} pixels "
            "are read"
        )
    return image


@contextmanager
def _decode_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{path}: not an image of {', '.join(FORMATS)}") from error
    except OSError as error:
        if error.errno is None:  # a decoder's: the file is damaged
            raise UserError(f"{path}: not a readable image ({_reason(error)})") from error
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except MemoryError as error:
        raise UserError(f"{path}: not read, there is no memory left for it") from error
    except Exception as error:  # pillow's decoders raise anything when a file makes no sense
        raise UserError(f"{path}: not a readable image ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _filter(size: tuple[int, int], target: tuple[int, int]) -> Image.Resampling:
    """Return the mean of what falls together, or a line between what is pulled apart."""
    shrinks = size[0] >= target[0] and size[1] >= target[1]
    return Image.Resampling.BOX if shrinks else Image.Resampling.BILINEAR
