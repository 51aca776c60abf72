"""Second moments of the two sides of each weight, and their eigenvectors (K-FAC)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from syngap.optim.basis import Basis
from syngap.optim.errors import FLOAT16, NotFiniteError
from syngap.optim.uses import Key, Rows, Use

__all__ = [
    "Moments",
    "Rank",
    "add_moments",
    "affordable_rank",
    "are_on_gpu",
    "basis_dtype",
    "find_bases",
    "half_is_enough",
    "require_finite",
]

Rank: TypeAlias = "int | float | Literal['full']"
_Found: TypeAlias = tuple[tuple[int, float], Tensor, Tensor]  # mark, moment, directions
_Find: TypeAlias = "Callable[[Tensor, int, torch.dtype, list[_Found]], Tensor]"

LARGEST = 8192  # a side of more rows stays plain entries
_ROWS_A_DIRECTION = 16  # more change eigenvectors little
_FEWEST_BATCHES = 8  # of which half are taken
_SMALL = 1 << 28  # bytes of complete bases: larger ones give way to some directions
_SHARE = 0.25  # of the inputs' directions


@dataclass
class _Sums:
    """The second moments of one use of a weight; of a side without one, the squares alone.

    Rows are those with a gradient, `places` also those without.
    """

    moments: list[Tensor | None]
    plain_squares: list[Tensor]
    rows: Tensor
    places: int = 0

    def squares(self, place: int) -> Tensor:
        """Return the sum of the squares of a side."""
        moment = self.moments[place]
        return self.plain_squares[place] if moment is None else moment.trace()


@dataclass
class Moments:
    """The second moments of a weight, use by use.

    Attributes:
        uses: its uses in a forward pass, in their order.
        inputs: the side that inputs are on.
    """

    uses: list[_Sums] = field(default_factory=list)
    inputs: int = 1


def add_moments(factors: Iterable[tuple[Use, Rows, Rows]], sides: dict[Key, Moments]) -> None:
    """Add the rows of a batch."""
    numbers: dict[Key, int] = {}
    for use, left, right in factors:
        side = sides.setdefault(use.key, Moments(inputs=use.inputs_side))
        number = numbers[use.key] = numbers.get(use.key, -1) + 1
        delta = left if use.kind in ("linear", "bias") else right
        used = delta.values.flatten(0, 1).any(-1)
        if number == len(side.uses):
            zero = delta.values.new_zeros(())
            side.uses.append(_Sums([None, None], [zero, zero], zero))
        sums = side.uses[number]
        count = used.sum()
        sums.rows = sums.rows + count
        sums.places += len(used)
        for place, rows in enumerate((left, right)):
            if rows.is_one_hot:
                sums.plain_squares[place] = sums.plain_squares[place] + count
                continue
            chosen = rows.values.flatten(0, 1)
            if rows is not delta:  # whose rows are zero; to pick some would wait for the GPU
                chosen = chosen.masked_fill(~used.unsqueeze(-1), 0.0)
            if use.kind == "bias" or chosen.shape[-1] > LARGEST:
                sums.plain_squares[place] = sums.plain_squares[place] + chosen.square().sum()
                continue
            moment = sums.moments[place]
            product = chosen.T @ chosen
            sums.moments[place] = product if moment is None else moment.add_(product)


def half_is_enough(sides: Mapping[Key, Moments], batches: int) -> bool:
    """Return, from the moments of a first batch, whether every second batch has enough rows.

    It follows from shapes alone, so that all processes decide alike. The matrices of a stack,
    such as experts, may be used by few batches, and get all.
    """
    return batches >= _FEWEST_BATCHES and all(
        index is None
        and all(
            moment is None or batches // 2 * use.places >= _ROWS_A_DIRECTION * len(moment)
            for use in side.uses
            for moment in use.moments
        )
        for (_, index), side in sides.items()
    )


def require_finite(sides: Mapping[Key, Moments], model: nn.Module) -> None:
    """Refuse moments that overflowed, by the name of their weight."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    for (param, _), side in sides.items():
        if not all(bool(use.squares(place).isfinite()) for use in side.uses for place in (0, 1)):
            raise NotFiniteError(
                f"what goes through {names[param]}, or its gradient, is not finite: look at the "
                f"inputs; {FLOAT16}"
            )


def find_bases(
    sides: Mapping[Key, Moments], rank: Rank, dtype: torch.dtype | None, find: _Find | None = None
) -> dict[Tensor, Basis]:
    """Return the directions of each weight that has moments.

    Args:
        sides: the moments.
        rank: "full" takes all directions of both sides of a weight; a number, or a share of all,
            the most important ones of the inputs' side.
        dtype: of the directions; None is that of the moments.
        find: returns so many directions of a moment; None is its eigenvectors.
    """
    find = find or _directions
    found: dict[Key, tuple[Tensor | None, Tensor | None]] = {}
    known: list[_Found] = []  # of inputs that several layers have
    for key, side in sides.items():
        wanted = {0, 1} if rank == "full" else {side.inputs}
        chosen: list[Tensor | None] = [None, None]
        for place in wanted:
            moment = _combined(side, place)
            if moment is not None:
                count = _count(rank, len(moment))
                chosen[place] = find(moment, count, dtype or moment.dtype, known)
        found[key] = (chosen[0], chosen[1])
    bases: dict[Tensor, Basis] = {}
    for (param, index), pair in found.items():
        if index is None:
            basis = Basis(*pair)
        elif param not in bases:
            basis = Basis(*(_stack(found, param, place) for place in (0, 1)))
        else:
            continue
        if basis.left is not None or basis.right is not None:
            bases[param] = basis
    return bases


def are_on_gpu(params: Sequence[Tensor], device: str | None = None) -> bool:
    """Return whether what is known of parameters may take half precision: on a GPU it does.

    Args:
        params: the parameters.
        device: the type of device that they will be on; None is where they are.
    """
    return bool(params) and all(
        (device or param.device.type) == "cuda" and param.dtype != torch.float64 for param in params
    )


def basis_dtype(params: Sequence[Tensor], device: str | None = None) -> torch.dtype | None:
    """Return what directions are kept in: on a GPU bfloat16, a third of a per cent off."""
    return torch.bfloat16 if are_on_gpu(params, device) else None


def affordable_rank(params: Sequence[Tensor], device: str | None = None) -> Rank:
    """Return "full" where complete bases take little memory, else a share of the inputs'."""
    size = 2 if basis_dtype(params, device) is not None else 4
    matrices = [(len(param), param.shape[1:].numel()) for param in params if param.dim() >= 2]
    needed = size * sum(side**2 for shape in matrices for side in shape if side <= LARGEST)
    return "full" if needed <= _SMALL else _SHARE


def _count(rank: Rank, size: int) -> int:
    if rank == "full":
        return size
    return max(1, min(size, round(rank * size) if isinstance(rank, float) else int(rank)))


def _combined(side: Moments, place: int) -> Tensor | None:
    """Return the moment of a side over all uses, each as large as what it is multiplied with."""
    moments = [use.moments[place] for use in side.uses]
    if any(moment is None for moment in moments):
        return None
    if len(moments) == 1:
        return moments[0]
    total = torch.zeros_like(moments[0])  # type: ignore[arg-type]
    for use, moment in zip(side.uses, moments, strict=True):
        total.add_(moment * (use.squares(1 - place) / use.rows.clamp(min=1)))  # type: ignore[operator]
    return total


def _directions(moment: Tensor, count: int, dtype: torch.dtype, known: list[_Found]) -> Tensor:
    """Return the eigenvectors of the largest eigenvalues, as columns, those first."""
    mark = (len(moment), float(moment.trace()))
    for other_mark, other, directions in known:
        if other_mark == mark and torch.equal(other, moment):
            return directions
    # A GPU is slow in double precision, and directions that are confused there matter little.
    exact = moment if moment.is_cuda else moment.double()
    vectors: Tensor = torch.linalg.eigh(
        exact / exact.trace().clamp(min=torch.finfo(exact.dtype).tiny)
    ).eigenvectors
    directions = vectors[:, -count:].flip(-1).to(dtype).contiguous()
    known.append((mark, moment, directions))
    return directions


def _stack(
    found: Mapping[Key, tuple[Tensor | None, Tensor | None]], param: Tensor, place: int
) -> Tensor | None:
    """Return the directions of every matrix of a stack; one that was not used has any."""
    parts = [found.get((param, index), (None, None))[place] for index in range(len(param))]
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    none = torch.eye(*like.shape, dtype=like.dtype, device=like.device)
    return torch.stack([none if part is None else part for part in parts])
