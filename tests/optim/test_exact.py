"""The exact estimator is a loop of autograd over the samples, at the cost of one more backward."""

from __future__ import annotations

import copy
import gc
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import TensorsSince, has_forward_hooks
from networks import Applied, Doubling
from oracle import Values, trainable
from samples import (
    assert_near,
    diagonal_by_loop,
    importance_of,
    labelled,
    labels_for,
    observed,
    observer,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from syngap import SynGAP
from syngap.optim import per_sample
from syngap.optim.scores import sample_labels

ROWS = 5
# Said by torch, once a process, of an even kernel that keeps its input's size.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


# One module at a time -----------------------------------------------------------------------------


class Probe(nn.Module):
    """A module with something to learn before it, and classes after it."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.before = nn.Linear(shape[-1], shape[-1])
        self.layer = layer
        with torch.no_grad():
            width = copy.deepcopy(layer).eval()(torch.zeros(ROWS, *shape)).flatten(1).shape[1]
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.before(x)))).flatten(1))


class TokenProbe(nn.Module):
    """An embedding, and classes for the sequence, to which a token's place matters."""

    def __init__(self, layer: nn.Embedding, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(math.prod(shape) * layer.embedding_dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)).flatten(1))


@dataclass(frozen=True)
class Layer:
    """How to make a module, the shape of one sample, and the mode it runs in."""

    make: Callable[..., nn.Module]
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    training: bool = True

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = self.make(*self.arguments, **self.options)
            probe: Any = TokenProbe if isinstance(layer, nn.Embedding) else Probe
            model: nn.Module = probe(layer, self.shape)
            with torch.no_grad():
                # Off the values that they start at, where several mistakes cannot be seen.
                for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
                    if value.dim() == 1 and "tracked" not in name:
                        value.add_(0.1 + 0.5 * torch.rand_like(value))
        return model.train(self.training)

    def inputs(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        if self.make is nn.Embedding:
            return torch.randint(3, (ROWS, *self.shape), generator=generator)
        return torch.randn(ROWS, *self.shape, generator=generator)


def batch_norms(name: str, make: type[nn.Module], shape: tuple[int, ...]) -> dict[str, Layer]:
    """The ways to normalise: with what is seen, or with what is remembered."""
    channels = (shape[0],)
    return {
        f"{name}-train": Layer(make, channels, shape, {"eps": 0.1}),
        f"{name}-eval": Layer(make, channels, shape, {"eps": 0.1}, training=False),
        f"{name}-untracked-train": Layer(make, channels, shape, {"track_running_stats": False}),
        f"{name}-untracked-eval": Layer(
            make, channels, shape, {"track_running_stats": False}, training=False
        ),
        f"{name}-plain": Layer(make, channels, shape, {"affine": False}),
    }


LAYERS = {
    "linear": Layer(nn.Linear, (4, 5), (4,)),
    "linear-no-bias": Layer(nn.Linear, (4, 5), (4,), {"bias": False}),
    "linear-3d": Layer(nn.Linear, (4, 5), (3, 4)),
    "linear-3d-no-bias": Layer(nn.Linear, (4, 5), (3, 4), {"bias": False}),
    "linear-4d": Layer(nn.Linear, (4, 5), (2, 3, 4)),
    "conv1d": Layer(nn.Conv1d, (2, 4, 3), (2, 7)),
    "conv1d-no-bias": Layer(nn.Conv1d, (2, 4, 3), (2, 7), {"bias": False}),
    "conv1d-everything": Layer(
        nn.Conv1d, (4, 6, 3), (4, 9), {"stride": 2, "padding": 3, "dilation": 2, "groups": 2}
    ),
    "conv1d-same-even": Layer(nn.Conv1d, (2, 3, 4), (2, 7), {"padding": "same"}),
    "conv1d-circular": Layer(
        nn.Conv1d, (2, 3, 3), (2, 7), {"padding": 2, "padding_mode": "circular"}
    ),
    "conv2d": Layer(nn.Conv2d, (2, 4, 3), (2, 5, 6)),
    "conv2d-no-bias": Layer(nn.Conv2d, (2, 4, (3, 2)), (2, 5, 6), {"bias": False}),
    "conv2d-stride-with-remainder": Layer(nn.Conv2d, (2, 3, 3), (2, 6, 6), {"stride": (2, 3)}),
    "conv2d-padding": Layer(nn.Conv2d, (2, 3, 3), (2, 5, 4), {"padding": (2, 1)}),
    "conv2d-dilation": Layer(nn.Conv2d, (2, 3, 2), (2, 5, 6), {"dilation": (2, 3)}),
    "conv2d-groups": Layer(nn.Conv2d, (4, 6, 3), (4, 5, 4), {"groups": 2}),
    "conv2d-depthwise": Layer(nn.Conv2d, (3, 6, 3), (3, 5, 5), {"groups": 3}),
    "conv2d-everything": Layer(
        nn.Conv2d, (4, 4, 3), (4, 7, 6), {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}
    ),
    "conv2d-same": Layer(nn.Conv2d, (2, 3, (3, 4)), (2, 5, 6), {"padding": "same", "dilation": 2}),
    "conv2d-valid": Layer(nn.Conv2d, (2, 3, 3), (2, 5, 6), {"padding": "valid"}),
    "conv2d-reflect": Layer(
        nn.Conv2d, (2, 3, 3), (2, 5, 6), {"padding": (1, 2), "padding_mode": "reflect", "stride": 2}
    ),
    "conv2d-circular-same": Layer(
        nn.Conv2d, (2, 3, (3, 2)), (2, 5, 6), {"padding": "same", "padding_mode": "circular"}
    ),
    "conv2d-replicate": Layer(
        nn.Conv2d, (2, 3, 3), (2, 5, 6), {"padding": 1, "padding_mode": "replicate"}
    ),
    **batch_norms("batchnorm1d", nn.BatchNorm1d, (4,)),
    **batch_norms("batchnorm1d-3d", nn.BatchNorm1d, (3, 4)),
    **batch_norms("batchnorm2d", nn.BatchNorm2d, (3, 2, 4)),
    **batch_norms("batchnorm3d", nn.BatchNorm3d, (2, 2, 2, 3)),
    "layernorm": Layer(nn.LayerNorm, (4,), (4,)),
    "layernorm-sequence": Layer(nn.LayerNorm, (4,), (3, 4)),
    "layernorm-two-dims": Layer(nn.LayerNorm, ((3, 4),), (2, 3, 4)),
    "layernorm-whole-sample": Layer(nn.LayerNorm, ((3, 4),), (3, 4)),
    "layernorm-no-bias": Layer(nn.LayerNorm, (4,), (3, 4), {"bias": False}),
    "layernorm-plain": Layer(nn.LayerNorm, (4,), (3, 4), {"elementwise_affine": False}),
    "groupnorm": Layer(nn.GroupNorm, (2, 4), (4, 3, 2)),
    "groupnorm-vectors": Layer(nn.GroupNorm, (2, 6), (6,), {"eps": 0.1}),
    "groupnorm-plain": Layer(nn.GroupNorm, (2, 4), (4, 3), {"affine": False}),
    "embedding-repeated-tokens": Layer(nn.Embedding, (6, 4), (7,)),
    "embedding-padding": Layer(nn.Embedding, (6, 4), (7,), {"padding_idx": 1}),
    "embedding-2d-tokens": Layer(nn.Embedding, (6, 4), (3, 4), {"padding_idx": -6}),
}


def as_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_module_is_squared_sample_by_sample(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    x = LAYERS[name].inputs()
    expected = diagonal_by_loop(LAYERS[name].build().double(), as_input(x, torch.float64))
    assert all(value.any() for value in expected.values())
    model = LAYERS[name].build().to(dtype)
    found = observed(observer(model), model(as_input(x, dtype)))
    assert all(value.dtype == dtype for value in found.values())
    assert_near(found, expected, tolerance)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_squares_in_float32(name: str) -> None:
    x = LAYERS[name].inputs()
    expected = diagonal_by_loop(LAYERS[name].build(), x)
    model = LAYERS[name].build()
    optimizer = observer(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    assert logits.dtype == torch.bfloat16
    found = observed(optimizer, logits.float())
    assert all(value.dtype == torch.float32 for value in found.values())
    assert_near(found, expected, 5e-2)


@pytest.mark.parametrize(
    "name", [name for name in LAYERS if name.startswith(("conv", "linear-3d", "linear-4d"))]
)
def test_samples_side_by_side_are_the_samples_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator takes many samples at once, a CPU one: the gradients are the same."""
    x = LAYERS[name].inputs().double()
    expected = diagonal_by_loop(LAYERS[name].build().double(), x)

    def at_once(
        grad: Tensor, entered: Tensor, numel: int, gradients: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        each = gradients(grad, entered)
        assert len(each) == ROWS
        assert each[0].numel() == numel
        return each.square().sum(0)

    monkeypatch.setattr(per_sample, "_sum_of_squares", at_once)
    model = LAYERS[name].build().double()
    assert_near(observed(observer(model), model(x)), expected, 1e-12)


# Networks -----------------------------------------------------------------------------------------


class StopGradient(torch.autograd.Function):
    """The identity, and no gradient behind it: not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


class OwnBatchNorm(nn.BatchNorm1d):
    """Is a BatchNorm, and its forward is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@dataclass(frozen=True)
class Net:
    """A network, the shape of one sample, and what to expect.

    ``pooled`` names the parameters whose scores are summed before they are squared, ``chosen``
    those that the optimizer holds.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    pooled: frozenset[str] = frozenset()
    chosen: Callable[[str], bool] = lambda name: True
    tokens: int = 0
    differentiable_input: bool = False

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().double()

    def inputs(self, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.tokens:
            return torch.randint(self.tokens, (ROWS, *self.shape), generator=generator)
        x = torch.randn(ROWS, *self.shape, generator=generator, dtype=torch.float64)
        return x.requires_grad_(self.differentiable_input)


def net(
    function: Callable[[Any, Tensor], Tensor],
    parts: Callable[[], dict[str, Any]],
    *pooled: str,
    **options: Any,
) -> Net:
    return Net(lambda: Applied(function, **parts()), pooled=frozenset(pooled), **options)


def stack(*make: Callable[[], nn.Module], **options: Any) -> Net:
    return Net(lambda: nn.Sequential(*(one() for one in make)), **options)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def in_place() -> nn.Module:
    return nn.ReLU(inplace=True)


def dropout() -> nn.Module:
    return nn.Dropout(0.4)


def batch_norm() -> nn.Module:
    return nn.BatchNorm1d(4, eps=0.1)


def frozen(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().requires_grad_(False)


def embedding() -> nn.Embedding:
    return nn.Embedding(6, 4)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(4))


def linears(*names: str, **others: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """A maker of layers, one a name, and of whatever else is wanted."""
    return lambda: {
        **{name: linear() for name in names},
        **{name: make() for name, make in others.items()},
    }


def residual(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(net.a(x))
    h = h + torch.tanh(net.b(h))
    deeper = net.c(h)
    deeper += h
    return net.head(torch.tanh(deeper))


def branches(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(net.a(x))
    return net.head(torch.cat([torch.tanh(net.b(h)) * net.c(h).sigmoid(), h], 1)[:, 2:6])


def checkpointed(net: Any, x: Tensor) -> Tensor:
    def block(h: Tensor) -> Tensor:
        return torch.tanh(net.b(F.dropout(torch.tanh(net.a(h)), 0.3)))

    return net.head(checkpoint(block, torch.tanh(net.c(x)), use_reentrant=False))


def called_once_for_good(net: Any, x: Tensor) -> Tensor:
    """Other calls leave no use behind: one has no graph, one is not a part of the prediction."""
    with torch.no_grad():
        target = net.a(x + 1)
    net.a(x - 1)
    return net.head(torch.tanh(net.a(x)) * target)


def stopped(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(net.a(x)) * net.scale
    return net.head(torch.tanh(net.b(x)) + StopGradient.apply(torch.tanh(net.c(h))))


def image_stack() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        in_place(),
        nn.BatchNorm2d(4),
        in_place(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        in_place(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 3),
    )


def partly_frozen() -> nn.Module:
    first, second = linear(), linear()
    first.weight.requires_grad_(False)
    second.bias.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), second)


def hooked() -> nn.Module:
    """A layer whose output another hook, there before ours, replaces."""
    model = nn.Sequential(linear(), linear())
    model[0].register_forward_hook(lambda module, args, output: torch.tanh(3 * output))
    return model


def tied() -> dict[str, Any]:
    parts: dict[str, Any] = {"a": embedding(), "b": linear(), "head": nn.Linear(4, 6)}
    parts["head"].weight = parts["a"].weight
    return parts


def pruned() -> nn.Module:
    return prune.random_unstructured(linear(), "weight", 0.4)


def replaced_forward() -> nn.Module:
    layer = linear()
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    return layer


def penalised(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.a(x))) * (1 + net.a.weight.square().sum())


def attend(net: Any, x: Tensor) -> Tensor:
    return net.head(net.a(x, x, x, need_weights=False)[0].mean(1))


SEQUENCE = (3, 4)
IMAGE = (2, 4, 4)
SQUARED = {
    "residual": net(residual, linears("a", "b", "c", "head")),
    "branches": net(branches, linears("a", "b", "c", "head")),
    "in-place-after-linear": stack(linear, in_place, linear, in_place, linear),
    "in-place-after-convolution-and-batchnorm": Net(image_stack, IMAGE),
    "channels-last": Net(lambda: image_stack().to(memory_format=torch.channels_last), IMAGE),
    "dropout": stack(linear, nn.Tanh, dropout, linear, dropout, linear),
    "batchnorm-above-batchnorm": stack(linear, batch_norm, linear, batch_norm, nn.Tanh, linear),
    "batchnorm-first": stack(batch_norm, linear, nn.Tanh, linear),
    "frozen-backbone": stack(frozen(linear), frozen(batch_norm), nn.Tanh, linear, nn.Tanh, linear),
    "frozen-batchnorm-above": stack(linear, frozen(batch_norm), nn.Tanh, linear),
    "frozen-weight-trainable-bias": Net(partly_frozen),
    "head-of-its-own-optimizer": stack(
        linear, batch_norm, nn.Tanh, linear, chosen=lambda name: name.startswith("3.")
    ),
    "middle-of-its-own-optimizer": stack(
        linear, batch_norm, nn.Tanh, linear, chosen=lambda name: name.startswith("1.")
    ),
    "unused-head": net(
        lambda net, x: net.head(torch.tanh(net.a(x))), linears("a", "head", "other_head")
    ),
    "checkpointed": net(checkpointed, linears("a", "b", "c", "head")),
    "differentiable-input": stack(linear, nn.Tanh, linear, differentiable_input=True),
    "token-logits": net(
        lambda net, x: net.head(torch.tanh(net.b(net.a(x)))),
        linears("b", "head", a=embedding),
        shape=(7,),
        tokens=3,
    ),
    "input-not-contiguous": net(
        lambda net, x: net.head(torch.tanh(net.a(x.transpose(1, 2))).mean(1)),
        linears("a", "head"),
        shape=(4, 3),
    ),
    "instance-norm-keeps-samples-apart": stack(
        lambda: nn.Conv1d(3, 4, 2, bias=False),
        lambda: nn.InstanceNorm1d(4),
        nn.Tanh,
        lambda: nn.Linear(3, 4),
        nn.Flatten,
        lambda: nn.Linear(16, 3),
        shape=SEQUENCE,
    ),
    "output-replaced-by-an-earlier-hook": Net(hooked),
    "called-once-for-good": net(called_once_for_good, linears("a", "head")),
}
POOLED = {
    "unknown-module": net(
        lambda net, x: net.head(torch.tanh(net.a(x, x))),
        linears("head", a=lambda: nn.Bilinear(4, 4, 4)),
        "a.weight",
        "a.bias",
    ),
    "unknown-convolution": stack(
        lambda: nn.ConvTranspose1d(3, 4, 1),
        nn.Flatten,
        lambda: nn.Linear(16, 3),
        shape=SEQUENCE,
        pooled=frozenset({"0.weight", "0.bias"}),
    ),
    "recurrent": net(
        lambda net, x: net.head(net.a(x)[0][:, -1]),
        linears("head", a=lambda: nn.LSTM(4, 4, batch_first=True)),
        *(f"a.{kind}_{gate}_l0" for kind in ("weight", "bias") for gate in ("ih", "hh")),
        shape=SEQUENCE,
    ),
    "attention": net(
        attend,
        linears("head", a=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
        "a.in_proj_weight",
        "a.in_proj_bias",
        "a.out_proj.weight",
        "a.out_proj.bias",
        shape=SEQUENCE,
    ),
    "called-twice": net(
        lambda net, x: net.head(torch.tanh(net.a(torch.tanh(net.a(x))))),
        linears("a", "head"),
        "a.weight",
        "a.bias",
    ),
    "batchnorm-called-twice": net(
        lambda net, x: net.head(torch.tanh(net.norm(net.a(x)) * net.norm(net.b(x)))),
        linears("a", "b", "head", norm=batch_norm),
        "norm.weight",
        "norm.bias",
    ),
    "tied": net(
        lambda net, x: net.head(torch.tanh(net.b(net.a(x).mean(1)))),
        tied,
        "a.weight",
        shape=(7,),
        tokens=6,
    ),
    "weight-as-an-argument": net(
        lambda net, x: net.head(torch.tanh(F.linear(x, net.a.weight, net.a.bias))),
        linears("a", "head"),
        "a.weight",
        "a.bias",
    ),
    "weight-in-a-penalty": net(penalised, linears("a", "head"), "a.weight"),
    "parametrised": stack(
        lambda: weight_norm(linear()),
        nn.Tanh,
        linear,
        pooled=frozenset({f"0.parametrizations.weight.original{index}" for index in (0, 1)}),
    ),
    "pruned": stack(pruned, nn.Tanh, linear, pooled=frozenset({"0.weight_orig"})),
    "subclass": stack(
        lambda: Doubling(4, 4), nn.Tanh, linear, pooled=frozenset({"0.weight", "0.bias"})
    ),
    "forward-on-the-instance": stack(
        replaced_forward, nn.Tanh, linear, pooled=frozenset({"0.weight", "0.bias"})
    ),
    "keyword-argument": net(
        lambda net, x: net.head(torch.tanh(net.a(input=x))),
        linears("a", "head"),
        "a.weight",
        "a.bias",
    ),
    "sequence-first": net(
        lambda net, x: net.head(torch.tanh(net.a(x.transpose(0, 1))).mean(0)),
        linears("a", "head"),
        "a.weight",
        "a.bias",
        shape=SEQUENCE,
    ),
    "tokens-flattened-into-the-batch": net(
        lambda net, x: net.head(torch.tanh(net.a(x.flatten(0, 1))).view(x.shape).mean(1)),
        linears("a", "head"),
        "a.weight",
        "a.bias",
        shape=SEQUENCE,
    ),
    "parameter-of-no-module": net(
        lambda net, x: net.head(torch.tanh(net.norm(net.a(x) + net.shift))),
        linears("a", "head", norm=batch_norm, shift=parameter),
        "shift",
    ),
    "behind-a-stopped-gradient": net(
        stopped, linears("a", "b", "c", "head", scale=parameter), "scale"
    ),
    "prediction-itself": net(
        lambda net, x: net.logits,
        lambda: {"logits": nn.Parameter(torch.randn(ROWS, 3))},
        "logits",
    ),
}


@contextmanager
def seeded() -> Iterator[None]:
    """The same dropout in every block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        yield


def optimizer_of(case: Net, model: nn.Module) -> Any:
    chosen = [param for name, param in model.named_parameters() if case.chosen(name)]
    return observer(model, params=chosen)


def observed_alone(case: Net, model: nn.Module, x: Tensor) -> Values:
    """The importance of one seeded pass, of the parameters that learn and are held."""
    optimizer = optimizer_of(case, model)
    with seeded():
        found = observed(optimizer, model(x))
    return {name: found[name] for name in found if name in trainable(model)}


def expected_of(case: Net, x: Tensor) -> Values:
    with seeded():
        expected = diagonal_by_loop(case.build(), x, pooled=case.pooled)
    return {name: value for name, value in expected.items() if case.chosen(name)}


def named_in(message: str) -> set[str]:
    named = re.search(r"noisier\) for (.*): shared", message)
    assert named is not None, message
    return set(named[1].split(", "))


@pytest.mark.parametrize("name", SQUARED)
def test_network_is_squared_sample_by_sample(name: str) -> None:
    case = SQUARED[name]
    x = case.inputs()
    assert_near(observed_alone(case, case.build(), x), expected_of(case, x), 1e-12)


@pytest.mark.parametrize("name", POOLED)
def test_what_cannot_be_squared_by_sample_is_named_and_takes_the_sum(name: str) -> None:
    case = POOLED[name]
    x = case.inputs()
    with pytest.warns(UserWarning, match="one-backward estimate") as caught:
        found = observed_alone(case, case.build(), x)
    (message,) = [str(warning.message) for warning in caught]
    assert named_in(message) == case.pooled
    assert_near(found, expected_of(case, x), 1e-12)


def test_a_weight_cast_once_for_two_uses_is_shared() -> None:
    """Autocast keeps the cast weight for its next use, so that use is not seen at the weight."""
    case = net(
        lambda net, x: net.head(torch.tanh(net.a(x) + F.linear(x * x, net.a.weight))),
        linears("a", "head"),
    )
    model, x = case.build().float(), case.inputs().float()
    optimizer = observer(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    with pytest.warns(UserWarning, match="one-backward estimate") as caught:
        found = observed(optimizer, logits.float())
    assert named_in(str(caught[0].message)) == {"a.weight"}
    assert_near(found, diagonal_by_loop(model, x, pooled={"a.weight"}), 5e-2)


def test_a_forward_replaced_after_hooking_is_noticed() -> None:
    case = stack(linear, nn.Tanh, linear)
    model, x = case.build(), case.inputs()
    optimizer = observer(model)
    model[0].forward = lambda x: 2 * F.linear(x, model[0].weight, model[0].bias)
    with pytest.warns(UserWarning, match="one-backward estimate") as caught:
        found = observed(optimizer, model(x))
    pooled = named_in(str(caught[0].message))
    assert pooled == {"0.weight", "0.bias"}
    assert_near(found, diagonal_by_loop(model, x, pooled=pooled), 1e-12)


def test_a_prediction_may_be_a_parameter_itself() -> None:
    model = POOLED["prediction-itself"].build()
    optimizer = observer(model, generator=torch.Generator().manual_seed(3))
    with pytest.warns(UserWarning, match="for logits: shared"):
        optimizer.observe(model.logits)
    optimizer.step()
    labels = sample_labels(model.logits, torch.Generator().manual_seed(3))
    residual = F.one_hot(labels, 3) - model.logits.detach().softmax(1)
    assert_near(importance_of(optimizer), {"logits": residual**2 / ROWS}, 1e-12)


def test_fallback_is_said_once() -> None:
    case = POOLED["called-twice"]
    model, x = case.build(), case.inputs()
    optimizer = observer(model)
    with pytest.warns(UserWarning, match="a.weight, a.bias|a.bias, a.weight"):
        observed(optimizer, model(x))
    observed(optimizer, model(x))  # a second warning would be an error


def test_pooled_scores_below_batchnorm_hold_its_statistics_too() -> None:
    """Otherwise one network would be measured with two Fishers; the sampled one lets them move."""
    case = POOLED["parameter-of-no-module"]
    model, x = case.build(), case.inputs()
    moving = observed(observer(model, "sampled"), model(x))["shift"]
    assert not torch.allclose(moving, expected_of(case, x)["shift"], rtol=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, importing its compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.append(nn.SyncBatchNorm(4)), "SyncBatchNorm"),
        (torch.compile, "compiled"),
        (lambda model: model.compile() or model, "compiled"),
        (lambda model: nn.Sequential(torch.compile(model[0]), model[1]), "compiled"),
    ],
    ids=["sync-batchnorm", "compiled", "compiled-in-place", "compiled-layer"],
)
def test_what_cannot_be_hooked_is_refused(
    change: Callable[[nn.Module], nn.Module], message: str
) -> None:
    model = change(nn.Sequential(linear(), linear()))
    with pytest.raises(ValueError, match=f"{message}.*use estimator='sampled'"):
        observer(model)
    observer(model, "sampled")


# Manners ------------------------------------------------------------------------------------------

MANNERS = {**SQUARED, **{name: POOLED[name] for name in ("called-twice", "tied", "recurrent")}}


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels_for(logits, seed=9).flatten())


@contextmanager
def said_or_not() -> Iterator[None]:
    """Where it does not matter whether something fell back."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="estimator='exact' takes the one-backward")
        yield


@dataclass
class Pass:
    """What one forward and backward pass leaves behind."""

    logits: Tensor
    grads: list[Tensor | None]
    buffers: list[Tensor]


def training_pass(case: Net, observe: bool, accumulating: bool) -> Pass:
    model, x = case.build(), case.inputs()
    optimizer = observer(model) if observe else None
    params = list(model.parameters())
    with seeded():
        for param in params:
            param.grad = torch.rand_like(param) if accumulating else None
        logits = model(x)
    if optimizer is not None:
        before = [(param.grad, copy.deepcopy(param.grad)) for param in params]
        with said_or_not():
            optimizer.observe(labelled(logits))
        assert x.grad is None
        for param, (same, value) in zip(params, before, strict=True):
            assert param.grad is same
            assert same is None or torch.equal(same, value)
    loss_of(logits).backward()
    return Pass(logits, [param.grad for param in params], list(model.buffers()))


@pytest.mark.parametrize("accumulating", [False, True], ids=["first-pass", "accumulating"])
@pytest.mark.parametrize("name", MANNERS)
def test_training_is_bitwise_what_it_is_without_observing(name: str, accumulating: bool) -> None:
    watched = training_pass(MANNERS[name], True, accumulating)
    alone = training_pass(MANNERS[name], False, accumulating)
    assert torch.equal(watched.logits, alone.logits)
    pairs = [*zip(watched.grads, alone.grads, strict=True)]
    pairs += [*zip(watched.buffers, alone.buffers, strict=True)]
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("name", MANNERS)
def test_no_activation_outlives_its_backward_pass(name: str) -> None:
    """Also while the training loop still has its loss and logits, and with them the graph."""
    model, x = MANNERS[name].build(), MANNERS[name].inputs()
    optimizer = optimizer_of(MANNERS[name], model)
    activations: list[StorageWeakRef] = []

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        made = [value for value in (*args, output) if isinstance(value, Tensor) and value.grad_fn]
        activations.extend(StorageWeakRef(value.untyped_storage()) for value in made)

    for module in model.modules():
        module.register_forward_hook(watch)
    logits = model(x)
    with said_or_not():
        optimizer.observe(labelled(logits))
    loss = loss_of(logits)
    loss.backward()
    kept = StorageWeakRef(logits.untyped_storage())
    leaked = [one for one in activations if not one.expired() and one.cdata != kept.cdata]
    assert activations
    assert loss.grad_fn is not None
    assert not leaked


@pytest.mark.parametrize("name", ["in-place-after-convolution-and-batchnorm", "checkpointed"])
def test_fifty_steps_leave_nothing_behind(name: str) -> None:
    model, x = SQUARED[name].build(), SQUARED[name].inputs()
    optimizer = observer(model, retention=0.9)
    made = TensorsSince()
    alive = []
    for step in range(50):
        logits = model(x)
        loss = loss_of(logits)
        optimizer.zero_grad()
        if step % 7 != 3:  # a step that is not observed leaves its notes to the graph
            optimizer.observe(labelled(logits))
        loss.backward()
        optimizer.step()
        if step in (5, 25, 49):
            alive.append(len(made()))
    assert len(set(alive)) == 1, alive


def notes_of(logits: Tensor) -> int:
    """How many nodes of a prediction's graph carry a note of somebody's."""
    assert logits.grad_fn is not None
    waiting, seen = [logits.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [child for child, _ in node.next_functions if child is not None]
    return sum(bool(node.metadata) for node in seen)


def test_nothing_is_noted_on_steps_that_are_not_due() -> None:
    case = SQUARED["in-place-after-convolution-and-batchnorm"]
    model, x = case.build(), case.inputs()
    optimizer = observer(model, every=4, warmup=0)
    counts = []
    for _ in range(9):
        logits = model(x)
        counts.append(notes_of(logits))
        optimizer.observe(labelled(logits))
        assert notes_of(logits) == 0
        optimizer.step()
    layers = 5
    assert counts == [layers, 0, 0, 0, layers, 0, 0, 0, layers]


@pytest.mark.parametrize("gradients", [False, True], ids=["no-grad", "with-graph"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "name", ["in-place-after-convolution-and-batchnorm", "batchnorm-above-batchnorm", "residual"]
)
def test_another_forward_pass_in_between_changes_nothing(
    name: str, training: bool, gradients: bool
) -> None:
    case = SQUARED[name]
    model, x = case.build(), case.inputs()
    optimizer = observer(model)
    logits = model(x)
    with torch.set_grad_enabled(gradients):
        model.train(training)(case.inputs(seed=8))
    found = observed(optimizer, logits)
    assert_near(found, expected_of(case, x), 1e-12)


def test_two_optimizers_share_one_model() -> None:
    case = SQUARED["batchnorm-above-batchnorm"]
    model, x = case.build(), case.inputs()
    first, last = list(model.parameters())[:3], list(model.parameters())[3:]
    optimizers = [observer(model, params=params) for params in (first, last, None)]
    logits = model(x)
    each = [observed(optimizer, logits) for optimizer in optimizers]
    expected = expected_of(case, x)
    assert_near({**each[0], **each[1]}, expected, 1e-12)
    assert_near(each[2], expected, 1e-12)


@pytest.mark.parametrize("affine", [True, False])
def test_an_unknown_batchnorm_is_refused_only_where_it_mixes_samples(affine: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), OwnBatchNorm(4, affine=affine), nn.Linear(4, 2))
    optimizer = SynGAP(model.parameters(), lr=0.1, estimator="exact", model=model)
    before = [value.clone() for value in optimizer.importance().values()]
    with pytest.raises(RuntimeError, match=r"BatchNorm\w* in train mode.*use estimator='sampled'"):
        optimizer.observe(model(torch.randn(5, 3)))
    assert all(map(torch.equal, before, optimizer.importance().values()))
    model.eval()
    with pytest.warns(UserWarning, match=r"1\.weight") if affine else nullcontext():
        optimizer.observe(model(torch.randn(5, 3)))


def test_an_optimizer_takes_its_hooks_along() -> None:
    model = stack(linear, nn.Tanh, linear).build()
    for _ in range(3):
        observed(observer(model), model(stack().inputs()))
        gc.collect()
    assert not has_forward_hooks(model)


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_a_file])
def test_a_copy_of_a_hooked_model_lives_its_own_life(
    duplicate: Callable[[nn.Module], nn.Module],
) -> None:
    case = SQUARED["in-place-after-convolution-and-batchnorm"]
    model, x = case.build(), case.inputs()
    expected = expected_of(case, x)
    optimizer = observer(model)
    other = duplicate(model)
    logits = model(x)
    assert torch.equal(other(x), logits)
    assert_near(observed(optimizer, logits), expected, 1e-12)
    again = duplicate(model)
    others = observer(again)
    assert_near(observed(others, again(x)), expected, 1e-12)
    assert_near(observed(optimizer, model(x)), expected, 1e-12)


SWAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda param: param * 2,
    "masked": lambda param: param * (torch.arange(param.numel()).view_as(param) % 2),
}


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
def test_parameters_swapped_for_a_call_are_not_read_as_the_modules(
    swap: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    swapped = {name: swap(param) for name, param in model.named_parameters()}
    found = []
    for estimator in ("exact", "sampled"):
        model.eval()  # so that the two mean the same
        generator = torch.Generator().manual_seed(0)
        optimizer = SynGAP(
            model.parameters(),
            lr=0.0,
            retention=0.0,
            estimator=estimator,
            model=model,
            generator=generator,
        )
        exact = estimator == "exact"
        with pytest.warns(UserWarning, match=r"0\.weight") if exact else nullcontext():
            optimizer.observe(torch.func.functional_call(model, swapped, (x,)))
        optimizer.step()
        found.append(optimizer.importance())
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-10, atol=1e-14)


def test_swapped_statistics_scale_is_the_one_that_was_used() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    gain = torch.rand(4, dtype=torch.float64) + 2
    x = torch.randn(5, 3, dtype=torch.float64)
    results = []
    for swap in (True, False):
        model[1].weight.data.fill_(1.0) if swap else model[1].weight.data.copy_(gain)
        optimizer = SynGAP(
            [model[0].weight],
            lr=0.0,
            retention=0.0,
            estimator="exact",
            model=model,
            generator=torch.Generator().manual_seed(0),
        )
        used = {"1.weight": gain} if swap else {}
        optimizer.observe(torch.func.functional_call(model, used, (x,)))
        optimizer.step()
        results.append(optimizer.importance()["0.weight"])
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=0.0)
