"""The exact estimator squares sample by sample, or says that it does not: never a third thing."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Applied, Doubling, Network, dictated, images, sequences, vectors
from oracle import exact_diagonal, trainable
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.parametrizations import weight_norm

from syngap import SynGAP

Part = nn.Module | nn.Parameter


def doubled_by_a_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


def doubled_by_its_instance(layer: nn.Module) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return 2 * nn.Linear.forward(self, x)

    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]
    return layer


def after_steps(layer: nn.BatchNorm1d) -> nn.Module:
    """In eval mode, with running statistics that are not the initial ones."""
    nn.init.normal_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer.eval()


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def applied(
    function: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Part]
) -> Callable[[], nn.Module]:
    return lambda: Applied(function, **{name: make() for name, make in parts.items()})


def stacked(*layers: Callable[[], nn.Module]) -> Network:
    """The layers, and a head, on vectors of four."""
    return Network(
        lambda: nn.Sequential(*(make() for make in layers), nn.Tanh(), linear()), vectors
    )


def on_images(layer: Callable[[], nn.Module], channels: int) -> Network:
    """The layer, then a mean over what is left of the image, and a head."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(torch.tanh(net.layer(x)).flatten(2).mean(2))

    return Network(applied(forward, layer=layer, head=lambda: nn.Linear(channels, 3)), images)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def on_tokens(function: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Part]) -> Network:
    """The function of three embedded tokens, and a head for each."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(function(net, net.embedding(x)))

    make = applied(forward, embedding=lambda: nn.Embedding(5, 4), head=linear, **parts)
    return Network(make, sequences)


def attend(net: Any, h: Tensor) -> Tensor:
    return net.attention(h, h, h, need_weights=False)[0]


def flattened(net: Any, h: Tensor) -> Tensor:
    return net.layer(h.flatten(0, 1)).view_as(h)


def sequence_first(net: Any, h: Tensor) -> Tensor:
    return net.layer(h.transpose(0, 1)).transpose(0, 1)


def checkpointed(net: Any, x: Tensor) -> Tensor:
    def block(h: Tensor) -> Tensor:
        return torch.tanh(net.layer(h))

    return net.head(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))


# A network, and the names of the parameters for which it falls back; None where it is free to.
NETWORKS: dict[str, tuple[Network, set[str] | None]] = {
    "in-place-activation": (stacked(linear, lambda: nn.ReLU(inplace=True), linear), set()),
    "layer-of-its-own-kind": (stacked(lambda: Doubling(4, 4)), {"0.weight", "0.bias"}),
    "output-changed-by-a-hook": (stacked(lambda: doubled_by_a_hook(linear())), None),
    "forward-replaced-on-the-instance": (
        stacked(lambda: doubled_by_its_instance(linear())),
        {"0.weight", "0.bias"},
    ),
    "parametrised-weight": (
        stacked(lambda: weight_norm(linear())),
        {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
    ),
    "unknown-layer": (stacked(linear, lambda: nn.PReLU(4)), {"1.weight"}),
    "batchnorm-first": (stacked(lambda: nn.BatchNorm1d(4)), set()),
    "batchnorm-in-eval-mode": (stacked(linear, lambda: after_steps(nn.BatchNorm1d(4))), set()),
    "batchnorm-without-weights": (stacked(linear, lambda: nn.BatchNorm1d(4, affine=False)), set()),
    "batchnorm-frozen": (stacked(linear, lambda: frozen(nn.BatchNorm1d(4))), set()),
    "parameter-under-batchnorm": (
        Network(
            applied(
                lambda net, x: net.head(torch.tanh(net.norm(torch.tanh(x + net.shift)))),
                shift=lambda: nn.Parameter(torch.randn(4)),
                norm=lambda: nn.BatchNorm1d(4),
                head=linear,
            ),
            vectors,
        ),
        {"shift"},
    ),
    "weight-used-without-its-layer": (
        Network(
            applied(
                lambda net, x: net.head(torch.tanh(F.linear(x, net.layer.weight, net.layer.bias))),
                layer=linear,
                head=linear,
            ),
            vectors,
        ),
        {"layer.weight", "layer.bias"},
    ),
    "weight-used-beside-its-layer": (
        Network(
            applied(
                lambda net, x: F.linear(torch.tanh(net.layer(x)), net.layer.weight),
                layer=linear,
            ),
            vectors,
        ),
        {"layer.weight"},
    ),
    "layer-called-and-not-used": (
        Network(
            applied(lambda net, x: (net.layer(x), net.head(x))[1], layer=linear, head=linear),
            vectors,
        ),
        set(),
    ),
    "checkpointed": (Network(applied(checkpointed, layer=linear, head=linear), vectors), set()),
    "convolution-of-same-size": (
        on_images(lambda: nn.Conv2d(1, 3, (3, 5), padding="same"), 3),
        set(),
    ),
    "convolution-reflecting": (
        on_images(
            lambda: nn.Conv2d(1, 4, (3, 2), (2, 1), padding=(2, 1), padding_mode="reflect"), 4
        ),
        set(),
    ),
    "convolution-dilated-with-remainder": (
        on_images(lambda: nn.Conv2d(1, 2, 2, stride=2, dilation=(1, 2)), 2),
        set(),
    ),
    "convolution-transposed": (
        on_images(lambda: nn.ConvTranspose2d(1, 3, 3, stride=2), 3),
        {"layer.weight", "layer.bias"},
    ),
    "groupnorm": (
        on_images(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)), 4),
        set(),
    ),
    "embedding-with-padding": (
        Network(
            applied(
                lambda net, x: net.head(torch.tanh(net.embedding(x).sum(1))),
                embedding=lambda: nn.Embedding(5, 4, padding_idx=2),
                head=linear,
            ),
            sequences,
        ),
        set(),
    ),
    "multi-head-attention": (
        on_tokens(attend, attention=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
        {
            "attention.in_proj_weight",
            "attention.in_proj_bias",
            "attention.out_proj.weight",
            "attention.out_proj.bias",
        },
    ),
    "recurrent": (
        on_tokens(lambda net, h: net.cells(h)[0], cells=lambda: nn.GRU(4, 4, batch_first=True)),
        {
            "cells.weight_ih_l0",
            "cells.weight_hh_l0",
            "cells.bias_ih_l0",
            "cells.bias_hh_l0",
        },
    ),
    "tokens-flattened-into-the-batch": (
        on_tokens(flattened, layer=linear),
        {"layer.weight", "layer.bias"},
    ),
    "sequence-first": (on_tokens(sequence_first, layer=linear), {"layer.weight", "layer.bias"}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_exact_is_per_sample_or_says_that_it_is_not(name: str) -> None:
    network, fallback = NETWORKS[name]
    model = network.build().double()
    untouched = copy.deepcopy(model)
    optimizer = SynGAP(model.parameters(), lr=0.0, retention=0.0, estimator="exact", model=model)

    generator = torch.Generator().manual_seed(0)
    x = network.inputs(6, generator)
    logits = model(x.double() if x.is_floating_point() else x)
    labels = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.observe(dictated(Categorical(logits=logits), labels))
    optimizer.step()

    said = " ".join(str(warning.message) for warning in caught)
    named = {
        name
        for name in trainable(model)
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", said)
    }
    assert fallback is None or named == fallback, said
    expected = exact_diagonal(
        untouched,
        x.double() if x.is_floating_point() else x,
        labels,
        torch.ones(labels.shape, dtype=torch.bool),
        pooled=named,
    )
    importance = optimizer.importance()
    for name in expected:
        torch.testing.assert_close(importance[name], expected[name], rtol=1e-10, atol=1e-12)
