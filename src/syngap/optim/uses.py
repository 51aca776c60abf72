"""Where a forward pass multiplies with a weight: what came in, and what went out.

The gradient of a weight is a sum over rows, left ⊗ right: for y = W x of ∂/∂y and x, for an
embedding of the token's unit vector and ∂/∂y. `Recorder` notes calls of torch's functions, not of
modules, so that it sees packed projections, tied weights and matrices of stacked experts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # as everywhere
from torch.overrides import TorchFunctionMode

from syngap.optim.experts import Experts, Part

__all__ = ["Key", "Recorder", "Rows", "Use"]

Key = tuple[Tensor, "int | None"]  # a parameter, and which matrix of a stack

_PRODUCTS = (torch.matmul, Tensor.matmul, torch.mm, Tensor.mm)
_SUMS = (torch.addmm, Tensor.addmm)
_BATCHED = (torch.bmm, Tensor.bmm)
_GATHERS = (Tensor.__getitem__, torch.index_select, Tensor.index_select)
# By name: older versions of torch lack the first, and transformers has the second in its place.
_GROUPED = ("_grouped_mm", "grouped_mm_fallback")
_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2}
_ARGUMENTS: dict[str, tuple[str, ...]] = {"matmul": ("input", "other"), "mm": ("input", "mat2")}
_ARGUMENTS |= {"bmm": ("input", "mat2"), "addmm": ("input", "mat1", "mat2")}
_ARGUMENTS |= {"index_select": ("input", "dim", "index")}


@dataclass
class Rows:
    """Rows (groups, T, d), each group of which holds whole samples; or tokens (groups, T)."""

    values: Tensor
    is_one_hot: bool = False

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(self.values)

    def are_shared(self, batch: int) -> bool:
        """Return whether they are tokens that are looked up once for all samples of a batch."""
        return self.is_one_hot and self.groups != batch

    def pooled(self) -> Rows:
        """Return the same rows as one group."""
        return Rows(self.values.flatten(0, 1).unsqueeze(0), self.is_one_hot)


@dataclass
class Use:
    """One use of a weight in a forward pass.

    Attributes:
        key: the weight.
        kind: what the rows of its two sides are: "linear" has ∂/∂y on the left and x on the right,
            "product" (x W) the reverse, "embedding" tokens and ∂/∂y, "bias" ∂/∂y and one.
        entered: x, a row in its last dimension (patches of a convolution); tokens; None for a bias.
        output: what came out, of which a gradient can be taken.
        offset: at which row of the weight its part begins, for a packed one.
        batch_dim: the dimension of `entered` and `output` that the batch is in; None where rows
            are in no order that is known.
        to_rows: brings the gradient of the output into rows.
    """

    key: Key
    kind: Literal["linear", "product", "embedding", "bias"]
    entered: Tensor | None
    output: Tensor
    offset: int = 0
    batch_dim: int | None = 0
    to_rows: Callable[[Tensor], Tensor] = lambda delta: delta
    padding: int | None = None  # the token that an embedding does not learn

    @property
    def inputs_side(self) -> int:
        """The side of the weight that inputs are on; of an embedding, that of its vectors."""
        return 0 if self.kind == "product" else 1

    def factors(
        self, delta: Tensor, batch: int, dtype: torch.dtype, scale: float = 1.0
    ) -> tuple[Rows, Rows]:
        """Return the rows of both sides, for the scaled gradient of the output, in batch groups."""
        # One copy: of a large vocabulary a second one would count.
        scaled = self.to_rows(delta.detach()).to(dtype, copy=True).mul_(scale)
        rows = self._grouped(scaled, batch)
        if self.kind == "bias":
            return self._padded(rows), Rows(rows.new_ones(*rows.shape[:2], 1))
        assert self.entered is not None
        if self.kind == "embedding":
            tokens = self._grouped(self.entered.detach().unsqueeze(-1), batch).squeeze(-1)
            if self.padding is not None:  # torch gives its row no gradient
                rows = rows * (tokens != self.padding).unsqueeze(-1)
            return Rows(tokens, is_one_hot=True), Rows(rows)
        entered = Rows(self._grouped(self.entered.detach().to(dtype), batch))
        if self.kind == "product":
            return entered, Rows(rows)
        return self._padded(rows), entered

    def _padded(self, rows: Tensor) -> Rows:
        size = self.key[0].shape[0] if self.key[1] is None else rows.shape[-1]
        missing = size - self.offset - rows.shape[-1]
        return Rows(F.pad(rows, (self.offset, missing)) if self.offset or missing else rows)

    def _grouped(self, rows: Tensor, batch: int) -> Tensor:
        """Return rows (groups, T, width): a group a sample where that is known, else one."""
        width = rows.shape[-1]
        if self.batch_dim is not None and rows.dim() > 2:
            rows = rows.movedim(self.batch_dim, 0)
            if len(rows) == batch:
                return rows.reshape(batch, -1, width)
        elif self.batch_dim == 0 and len(rows) % batch == 0:  # flattened, batch first
            return rows.reshape(batch, -1, width)
        return rows.reshape(1, -1, width)


class Recorder(TorchFunctionMode):
    """Notes the uses of parameters while it is entered.

    Args:
        params: the parameters to look for.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self.params = set(params)
        self.uses: list[Use] = []
        self._experts = Experts(self.params)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, and note it where it multiplies with a parameter."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self._attention(func, *args, **kwargs)
        output = func(*args, **kwargs)
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        before = len(self.uses)
        args, kwargs = _in_order(func, args, kwargs)
        if func is F.linear:
            self._linear(output, *args, **kwargs)
        elif func in _PRODUCTS:
            self._product(output, *args, **kwargs)
        elif func in _SUMS:
            self._sum(output, *args, **kwargs)
        elif func in _BATCHED:
            self._batched(output, *args, **kwargs)
        elif func in _GATHERS:
            self._experts.note(output, *args, **kwargs)
        elif getattr(func, "__name__", "") in _GROUPED:
            self._grouped(output, *args, **kwargs)
        elif func in _CONVOLUTIONS:
            self._convolution(_CONVOLUTIONS[func], output, *args, **kwargs)
        elif func is F.embedding:
            self._embedding(output, *args, **kwargs)
        # What follows may change the output in place, and its gradient would be of something else.
        return output.clone() if len(self.uses) > before else output

    # Each of these has the arguments of the function it notes.

    def _linear(
        self, output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        found = self._locate(weight)
        if found is not None:
            param, index, offset, transposed = found
            kind: Literal["linear", "product"] = "product" if transposed else "linear"
            self._note(Use((param, index), kind, input, output, offset), index is not None)
        self._bias(output, bias, found is not None and found[1] is not None)

    def _product(self, output: Tensor, input: Tensor, other: Tensor, **_: Any) -> None:
        found = self._locate(other)
        if found is not None and input.dim() >= 2:
            param, index, offset, transposed = found
            if transposed or not offset:
                kind: Literal["linear", "product"] = "linear" if transposed else "product"
                self._note(Use((param, index), kind, input, output, offset), index is not None)
        elif input.dim() == other.dim() == 3:
            self._batched(output, *(_broadcast(each, len(output)) for each in (input, other)))

    def _sum(
        self,
        output: Tensor,
        input: Tensor,
        mat1: Tensor,
        mat2: Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> None:
        if beta == alpha == 1:
            self._product(output, mat1, mat2)
            self._bias(output, input, False)

    def _batched(self, output: Tensor, input: Tensor, mat2: Tensor, **_: Any) -> None:
        stack = self._experts.find(mat2)
        if stack is not None:
            kind: Literal["linear", "product"] = "linear" if stack.transposed else "product"
            self._parts(stack.param, stack.parts(), kind, input, output)
            return
        stack = self._experts.find(input)
        if stack is not None:  # W x: its rows are columns
            kind = "product" if stack.transposed else "linear"
            self._parts(stack.param, stack.parts(), kind, mat2.mT, output, columns=True)

    def _grouped(
        self, output: Tensor, input: Tensor, weight: Tensor, offs: Any = None, *_: Any, **__: Any
    ) -> None:
        stack = self._experts.find(weight)
        if stack is not None and input.dim() == 2 and isinstance(offs, Tensor):
            kind: Literal["linear", "product"] = "linear" if stack.transposed else "product"
            self._parts(stack.param, stack.groups(offs), kind, input, output)

    def _parts(
        self,
        param: Tensor,
        parts: Iterable[Part],
        kind: Literal["linear", "product"],
        entered: Tensor,
        output: Tensor,
        columns: bool = False,
    ) -> None:
        """Note a product with matrices of a stack: a use of each, with its part of the rows."""
        for index, part in parts:

            def to_rows(delta: Tensor, part: Any = part) -> Tensor:
                return (delta.mT if columns else delta)[part]

            use = Use((param, index), kind, entered.detach()[part], output, to_rows=to_rows)
            self._note(use, unordered=True)

    def _convolution(
        self,
        dims: int,
        output: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> None:
        def to_rows(delta: Tensor) -> Tensor:
            return delta.flatten(2).transpose(1, 2)

        if input.dim() != dims + 2:
            return
        if weight in self.params and groups == 1:
            patches = _patches(input.detach(), weight.shape[2:], stride, padding, dilation)
            self.uses.append(Use((weight, None), "linear", patches, output, to_rows=to_rows))
        self._bias(output, bias, False, to_rows)

    def _embedding(
        self,
        output: Tensor,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> None:
        if weight in self.params and not scale_grad_by_freq and max_norm is None:
            if padding_idx is not None and padding_idx < 0:
                padding_idx += len(weight)
            self.uses.append(Use((weight, None), "embedding", input, output, padding=padding_idx))

    def _bias(
        self,
        output: Tensor,
        bias: Any,
        unordered: bool,
        to_rows: Callable[[Tensor], Tensor] = lambda delta: delta,
    ) -> None:
        if isinstance(bias, Tensor) and bias.dim() == 1:
            base = bias if bias in self.params else bias._base
            if base is not None and base in self.params and base.dim() == 1:
                use = Use(
                    (base, None), "bias", None, output, int(bias.storage_offset()), 0, to_rows
                )
                self._note(use, unordered)

    def _note(self, use: Use, unordered: bool) -> None:
        if unordered:  # rows of a routed expert come from any samples
            use.batch_dim = None
        self.uses.append(use)

    def _locate(self, weight: Any) -> tuple[Tensor, int | None, int, bool] | None:
        """Return the parameter of a matrix: which of its stack, from which row, transposed."""
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        if weight in self.params:
            return weight, None, 0, False
        base = weight._base
        if base is None or base not in self.params or not base.is_contiguous():
            return None
        index: int | None = None
        offset, shape, strides = int(weight.storage_offset()), base.shape, base.stride()
        if base.dim() == 3:
            index, offset = divmod(offset, strides[0])
            shape, strides = shape[1:], strides[1:]
        if len(shape) != 2:
            return None
        if weight.shape == shape and weight.stride() == strides and not offset:
            return base, index, 0, False
        if weight.shape == shape[::-1] and weight.stride() == strides[::-1] and not offset:
            return base, index, 0, True
        is_rows = weight.shape[1] == shape[1] and weight.stride() == strides
        if index is None and is_rows and offset % strides[0] == 0:
            return base, None, offset // strides[0], False
        return None

    def _attention(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute attention with its projections taken out of torch's own function."""
        names = list(signature(func).parameters)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        packed, bias = arguments["in_proj_weight"], arguments["in_proj_bias"]
        out_weight, out_bias = arguments["out_proj_weight"], arguments["out_proj_bias"]
        if packed is None or arguments.get("use_separate_proj_weight"):
            return func(*args, **kwargs)
        width = arguments["embed_dim_to_check"]
        sources = (arguments["query"], arguments["key"], arguments["value"])
        one = torch.eye(width, dtype=packed.dtype, device=packed.device)
        first = len(self.uses)
        # Parts that have an input in common are one product, as torch itself has it.
        query, key, value = sources
        parts = [query, None, None] if query is key is value else [query, key, None]
        parts = parts if key is value else list(sources)
        projected: list[Tensor] = []
        with self:
            for place, source in enumerate(parts):
                if source is not None:
                    end = next((n for n in range(place + 1, 3) if parts[n] is not None), 3)
                    rows = slice(place * width, end * width)
                    whole = place == 0 and end == 3
                    weight = packed if whole else packed[rows]
                    shift = bias if bias is None or whole else bias[rows]
                    projected += F.linear(source, weight, shift).tensor_split(end - place, -1)
        arguments |= dict(zip(("query", "key", "value"), projected, strict=True))
        arguments |= {"q_proj_weight": one, "k_proj_weight": one, "v_proj_weight": one}
        arguments |= {"in_proj_weight": None, "in_proj_bias": None}
        arguments |= {"use_separate_proj_weight": True}
        arguments |= {"out_proj_weight": one, "out_proj_bias": None}
        attended, weights = func(**arguments)
        with self:
            attended = F.linear(attended, out_weight, out_bias)
        for use in self.uses[first:]:  # torch puts the sequence first
            use.batch_dim = 1 if use.output.dim() == 3 else None
        return attended, weights


def _in_order(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a function by place, whether they were given by name or not."""
    rest = dict(kwargs)
    names = _ARGUMENTS.get(getattr(func, "__name__", ""), ())
    return [*args, *(rest.pop(name) for name in names[len(args) :] if name in rest)], rest


def _broadcast(matrices: Tensor, count: int) -> Tensor:
    """Return matrices as a product takes them that has so many."""
    return matrices if len(matrices) == count else matrices.expand(count, -1, -1)


def _patches(x: Tensor, kernel: torch.Size, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Return what a convolution's weight is multiplied with at each place: (N, places, inputs)."""
    dims = len(kernel)
    stride, dilation = (
        [value] * dims if isinstance(value, int) else list(value) for value in (stride, dilation)
    )
    if isinstance(padding, str):
        same = padding == "same"
        spans = [d * (k - 1) * same for d, k in zip(dilation, kernel, strict=True)]
        edges = [edge for span in reversed(spans) for edge in (span // 2, span - span // 2)]
        x, padding = F.pad(x, edges), [0] * dims
    padding = [padding] * dims if isinstance(padding, int) else list(padding)
    if dims == 1:
        x, kernel = x.unsqueeze(2), torch.Size((1, *kernel))
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    return F.unfold(x, kernel, dilation, padding, stride).transpose(1, 2)
