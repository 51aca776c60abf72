"""Per-sample gradients, squared and summed over samples, for one call of one module.

Each rule takes what entered the module and the gradient that arrived at its output, and returns
Σ_n (∂ log p(y_n | x_n) / ∂ w)² for the parameters it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from syngap.optim.tensors import wide

__all__ = ["Call", "hold_statistics", "is_readable", "rule_of", "uses_batch_statistics"]

# How many numbers of per-sample weight gradients an accelerator may hold at a time. A CPU takes
# one sample at a time, which is as fast and stays in its cache.
_CHUNK = 1 << 25


@dataclass
class Call:
    """One call of a module: what entered it, and where its output's gradient will arrive.

    `params` are those the call used: `torch.func.functional_call` swaps them for its time.
    """

    module: nn.Module
    params: Mapping[str, Tensor]
    entered: Tensor
    version: int
    output_nr: int
    batch_statistics: bool
    statistics: tuple[Tensor, Tensor] | None = None


def _linear(call: Call, grad: Tensor, names: set[str]) -> dict[str, Tensor]:
    entered = wide(call.entered)
    squares = {}
    if grad.dim() == 2:
        squared = grad.square()
        if "weight" in names:
            squares["weight"] = squared.t() @ entered.square()
        if "bias" in names:
            squares["bias"] = squared.sum(0)
        return squares
    grad, entered = grad.flatten(1, -2), entered.flatten(1, -2)
    if "weight" in names:
        squares["weight"] = _sum_of_squares(
            grad, entered, grad.shape[-1] * entered.shape[-1], _linear_weight_gradients
        )
    if "bias" in names:
        squares["bias"] = grad.sum(1).square_().sum(0)
    return squares


def _linear_weight_gradients(grad: Tensor, entered: Tensor) -> Tensor:
    return grad.transpose(1, 2) @ entered


def _convolution(call: Call, grad: Tensor, names: set[str]) -> dict[str, Tensor]:
    module = call.module
    assert isinstance(module, _ConvNd)
    squares = {}
    if "weight" in names:
        entered, padding = wide(call.entered), module.padding
        if isinstance(padding, str) or module.padding_mode != "zeros":
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            entered = functional.pad(entered, module._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * len(module.kernel_size)
        weight = wide(module.weight.detach())

        def weight_gradients(grad: Tensor, entered: Tensor) -> Tensor:
            count = grad.shape[0]
            if count > 1:  # samples side by side as groups of one larger convolution
                grad, entered = grad.flatten(0, 1)[None], entered.flatten(0, 1)[None]
            repeated = weight.repeat(count, *[1] * (weight.dim() - 1)) if count > 1 else weight
            gradient: Tensor = torch.ops.aten.convolution_backward(
                grad,
                entered,
                repeated,
                None,
                module.stride,
                padding,
                module.dilation,
                False,
                [0] * len(module.kernel_size),
                module.groups * count,
                [False, True, False],
            )[1]
            return gradient.view(count, *weight.shape)

        squares["weight"] = _sum_of_squares(grad, entered, weight.numel(), weight_gradients)
    if "bias" in names:
        squares["bias"] = _by_channel(grad).square().sum(0)
    return squares


def _sum_of_squares(
    grad: Tensor,
    entered: Tensor,
    numel: int,
    gradients: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Σ over samples of the squared gradient, never holding more than a chunk of samples."""
    at_once = 1 if grad.device.type == "cpu" else max(1, _CHUNK // numel)
    total: Tensor | None = None
    for start in range(0, len(grad), at_once):
        some = slice(start, start + at_once)
        gradient = gradients(grad[some], entered[some])
        if gradient.shape[0] > 1:
            square = gradient.square_().sum(0)
            total = square if total is None else total.add_(square)
        else:
            gradient = gradient[0]
            total = gradient.square() if total is None else total.addcmul_(gradient, gradient)
    assert total is not None
    return total


def _batch_norm(call: Call, grad: Tensor, names: set[str]) -> dict[str, Tensor]:
    entered = wide(call.entered)
    mean, scale = _statistics(call)
    squares = {}
    if "weight" in names:
        centred = (entered - _along_channels(mean, entered)).mul_(grad)
        squares["weight"] = (_by_channel(centred) * scale).square_().sum(0)
    if "bias" in names:
        squares["bias"] = _by_channel(grad).square().sum(0)
    return squares


def _layer_norm(call: Call, grad: Tensor, names: set[str]) -> dict[str, Tensor]:
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    shape = module.normalized_shape
    normal = functional.layer_norm(wide(call.entered), shape, eps=module.eps)
    return {
        name: value.reshape(len(grad), -1, *shape).sum(1).square_().sum(0)
        for name, value in (("weight", normal.mul_(grad)), ("bias", grad))
        if name in names
    }


def _group_norm(call: Call, grad: Tensor, names: set[str]) -> dict[str, Tensor]:
    module = call.module
    assert isinstance(module, nn.GroupNorm)
    normal = functional.group_norm(wide(call.entered), module.num_groups, eps=module.eps)
    return {
        name: _by_channel(value).square().sum(0)
        for name, value in (("weight", normal.mul_(grad)), ("bias", grad))
        if name in names
    }


def _embedding(call: Call, grad: Tensor, names: set[str]) -> dict[str, Tensor]:
    module = call.module
    assert isinstance(module, nn.Embedding)
    rows, width = module.weight.shape
    tokens = call.entered.reshape(len(grad), -1)
    samples = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
    # A token that occurs twice in a sample gathers both gradients before the square.
    pairs, where = torch.unique(samples * rows + tokens, return_inverse=True)
    gathered = grad.new_zeros(len(pairs), width)
    gathered.index_add_(0, where.flatten(), grad.reshape(-1, width))
    square = grad.new_zeros(rows, width).index_add_(0, pairs % rows, gathered.square_())
    if module.padding_idx is not None:
        square[module.padding_idx] = 0.0
    return {"weight": square}


_Rule = Callable[[Call, Tensor, set[str]], dict[str, Tensor]]
_RULES: dict[type[nn.Module], _Rule] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
}


def rule_of(module: nn.Module) -> _Rule | None:
    """The rule of a module, or None where its forward is not the one the rule was made for."""
    for known, rule in _RULES.items():
        # The bound method, because some libraries put another forward on the instance.
        if isinstance(module, known) and getattr(module.forward, "__func__", None) is known.forward:
            return rule
    return None


def is_readable(call: Call, rows: int) -> bool:
    """Whether the noted input still has its value and has one entry a sample, samples first."""
    module, entered = call.module, call.entered
    if rule_of(module) is None:  # its forward was replaced since it was hooked
        return False
    if entered._version != call.version or entered.dim() < 1 or entered.shape[0] != rows:
        return False
    if isinstance(module, nn.Linear):
        return entered.dim() >= 2
    if isinstance(module, nn.LayerNorm):
        return entered.dim() > len(module.normalized_shape)
    if isinstance(module, _ConvNd):
        return entered.dim() == module.weight.dim()
    if isinstance(module, nn.Embedding):
        return not module.scale_grad_by_freq and not module.sparse
    return True


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether the module normalises with what it sees in the batch, which couples its samples."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _statistics(call: Call) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation that a BatchNorm call normalised with."""
    if call.statistics is not None:
        return call.statistics
    module = call.module
    assert isinstance(module, _BatchNorm)
    if call.batch_statistics:
        entered = wide(call.entered)
        dims = [0, *range(2, entered.dim())]
        variance, mean = torch.var_mean(entered, dims, correction=0)
    else:
        assert module.running_mean is not None
        assert module.running_var is not None
        variance, mean = wide(module.running_var), wide(module.running_mean)
    call.statistics = mean, (variance + module.eps).rsqrt()
    return call.statistics


def _by_channel(values: Tensor) -> Tensor:
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def _along_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def hold_statistics(call: Call) -> Callable[[tuple[Any, ...], tuple[Any, ...]], Any]:
    """Replace BatchNorm's input gradient by the one it has when its statistics are constants."""

    def replace(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
        if grad_inputs[0] is None:
            return None
        grad = grad_outputs[0]
        _, scale = _statistics(call)
        if "weight" in call.params:
            scale = scale * call.params["weight"].detach()
        grad_input = grad * _along_channels(scale, grad).to(grad.dtype)
        return (grad_input.to(grad_inputs[0].dtype), *grad_inputs[1:])

    return replace
