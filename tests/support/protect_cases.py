"""Small float64 models and known inputs on which `syngap.protect` is compared with its oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from protect_oracle import (
    Batch,
    Conv1D,
    Product,
    Record,
    Rule,
    SpelledOut,
    Task,
    Trace,
    adam,
    cut,
    draw_labels_twice,
    sgd,
    trace_batches,
)
from torch import Tensor, nn
from torch.distributions import Distribution, Normal
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH = 6, 4, 4

# --- Models -----------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.head = nn.Linear(6, 4)
        self.second.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return output


class ConvNet1d(nn.Module):
    """Stride, padding, and a convolution in two groups, which falls back to entries."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, stride=2, padding=1)
        self.grouped = nn.Conv1d(4, 4, 2, groups=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.grouped(torch.tanh(self.conv(x))))
        output: Tensor = self.head(features.flatten(1))
        return output


class ConvNet2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0))
        self.second = nn.Conv2d(4, 4, 2, bias=False, dilation=(1, 2))
        self.third = nn.Conv2d(4, 4, 2, bias=False, dilation=(1, 2))
        self.grouped = nn.Conv2d(4, 4, 1, groups=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.conv(x))
        features = torch.tanh(self.second(features) + self.third(features.square()))
        output: Tensor = self.head(torch.tanh(self.grouped(features)).flatten(1))
        return output


def attend(packed: Tensor, causal: bool = True) -> Tensor:
    """Attention of one head from packed queries, keys and values (B, T, 3 n)."""
    q, k, v = packed.chunk(3, dim=-1)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores.softmax(-1) @ v


class GPT(nn.Module):
    """One block with Linear layers; positions are looked up for every sample or once for all."""

    def __init__(
        self, tied: bool = False, broadcast: bool = False, padding: int | None = None
    ) -> None:
        super().__init__()
        self.broadcast = broadcast
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 6)
        self.down = nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        # Padding is at the end and attention is causal: the mask changes no position that counts.
        places = torch.arange(input_ids.shape[1]).unsqueeze(0)
        if not self.broadcast:
            places = places.expand(input_ids.shape)
        x = self.tokens(input_ids) + self.positions(places)
        x = x + self.out(attend(self.qkv(self.norm(x))))
        x = x + self.down(torch.tanh(self.up(x)))
        output: Tensor = self.head(x)
        return output


class GPT2(nn.Module):
    """One block with GPT-2's Conv1D and the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.ln = nn.LayerNorm(WIDTH)
        self.c_attn = Conv1D(3 * WIDTH, WIDTH)
        self.c_proj = Conv1D(WIDTH, WIDTH)
        self.c_fc = Conv1D(6, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.c_out = Conv1D(WIDTH, 6)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        x = x + self.c_proj(attend(self.c_attn(self.ln(x))))
        x = x + self.c_out(torch.tanh(self.c_fc(x)))
        output: Tensor = self.lm_head(x)
        return output


class Attention(nn.Module):
    """nn.MultiheadAttention, as self-attention or with queries of their own."""

    def __init__(self, cross: bool = False) -> None:
        super().__init__()
        self.cross = cross
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        queries = torch.tanh(self.queries(x))
        memory = x if self.cross else queries
        mixed, _ = self.attention(queries, memory, memory, need_weights=False)
        output: Tensor = self.head(queries + mixed)
        return output


class RoutedExperts(nn.Module):
    """Experts (E, out, in), each used for the rows that are routed to it.

    Args:
        way: "linear" takes one expert at a time, "gathered" and "transposed" one for each row, by
            W x and by x Wᵀ, and "grouped" all at once, of which torch has no kernel in float64.
    """

    def __init__(self, way: str = "linear") -> None:
        super().__init__()
        self.way = way
        self.router = nn.Linear(4, 2)
        width = 8 if way == "grouped" else 6  # whose rows have to be multiples of 16 bytes
        self.experts = nn.Parameter(torch.randn(2, width, 4))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        share, chosen = self.router(rows).softmax(-1).max(-1)
        mixed = share.unsqueeze(-1) * self.mix(rows, chosen)
        output: Tensor = self.head(torch.tanh(mixed))
        return output.reshape(*x.shape[:-1], -1)

    def mix(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Multiply each row with the expert that is chosen for it."""
        if self.way == "gathered":
            return torch.bmm(self.experts[chosen], rows.unsqueeze(-1)).squeeze(-1)
        if self.way == "transposed":
            picked = torch.index_select(self.experts, 0, chosen)
            return (rows.unsqueeze(1) @ picked.transpose(1, 2)).squeeze(1)
        if self.way == "grouped" and rows.dtype is not torch.float64:
            order = chosen.argsort()
            ends = chosen.bincount(minlength=2).cumsum(0).int()
            mixed = F.grouped_mm(rows[order], self.experts.transpose(1, 2), offs=ends)
            return mixed[order.argsort()]
        mixed = rows.new_zeros(len(rows), self.experts.shape[1])
        for expert in range(2):
            found = (chosen == expert).nonzero().squeeze(-1)
            if len(found):
                outputs = F.linear(rows[found], self.experts[expert])
                mixed = mixed.index_add(0, found, outputs)
        return mixed


class DenseExperts(nn.Module):
    """Experts (E, in, out), all used at once by torch.bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.Parameter(torch.randn(2, 4, 6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        outputs = torch.bmm(x.expand(2, *x.shape), self.experts)
        mixed = (share.T.unsqueeze(-1) * outputs).sum(0)
        output: Tensor = self.head(torch.tanh(mixed))
        return output


class Recurrent(nn.Module):
    """One layer used twice in the same forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.block(torch.tanh(self.block(x)))))
        return output


class Autoencoder(nn.Module):
    """W on the way in and its transpose on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.bias = nn.Parameter(torch.randn(4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.weight, self.bias))
        return F.linear(hidden, self.weight.t())


class SeededNormal(Normal):
    """Normal distribution whose draws come from `draws`, so that two implementations draw alike."""

    draws = torch.Generator()

    @classmethod
    def restart(cls, seed: int = 0) -> None:
        cls.draws.manual_seed(seed)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        assert not sample_shape, "one draw a prediction"
        noise = torch.randn(self.loc.shape, generator=self.draws, dtype=self.loc.dtype)
        return (self.loc + self.scale * noise).detach()


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Distribution:
        return SeededNormal(self.second(torch.tanh(self.first(x))), torch.tensor(0.5).to(x))


# --- Forward passes spelled out, where weights are not used by a module of their own ------------


def spell_out_attention(model: nn.Module, x: Batch, record: Record) -> Tensor:
    assert isinstance(model, Attention)
    layer, name = model.attention, "attention.in_proj_weight"
    queries = torch.tanh(model.queries(x))
    weight, bias = layer.in_proj_weight, layer.in_proj_bias
    if model.cross:  # two products, with the first third of the outputs and with the rest
        n = WIDTH
        q = record(name, queries, queries @ weight[:n].T + bias[:n], start=0)
        kv = record(name, x, x @ weight[n:].T + bias[n:], start=n)
        packed = torch.cat([q, kv], -1)
    else:
        packed = record(name, queries, queries @ weight.T + bias)
    q, k, v = packed.chunk(3, -1)
    half = WIDTH // 2
    heads = []
    for first in (0, half):
        part = slice(first, first + half)
        heads.append(attend(torch.cat([q[..., part], k[..., part], v[..., part]], -1), False))
    mixed = torch.cat(heads, -1)
    out = mixed @ layer.out_proj.weight.T + layer.out_proj.bias
    record("attention.out_proj.weight", mixed, out)
    output: Tensor = model.head(queries + out)
    return output


def spell_out_routed(model: nn.Module, x: Batch, record: Record) -> Tensor:
    assert isinstance(model, RoutedExperts)
    rows = x.reshape(-1, x.shape[-1])
    shares = model.router(rows).softmax(-1)
    choices = shares.argmax(-1)
    mixed: list[Tensor | None] = [None] * len(rows)
    for expert in range(2):
        picked = [row for row in range(len(rows)) if int(choices[row]) == expert]
        if picked:
            y = record(
                "experts", rows[picked], rows[picked] @ model.experts[expert].T, index=expert
            )
            for place, row in enumerate(picked):
                mixed[row] = y[place] * shares[row, expert]
    outputs = [each for each in mixed if each is not None]
    output: Tensor = model.head(torch.tanh(torch.stack(outputs)))
    return output.reshape(*x.shape[:-1], -1)


def spell_out_dense(model: nn.Module, x: Batch, record: Record) -> Tensor:
    assert isinstance(model, DenseExperts)
    shares = model.router(x).softmax(-1)
    mixed = x.new_zeros(len(x), 6)
    for expert in range(2):
        y = record("experts", x, x @ model.experts[expert], inputs_side=0, index=expert)
        mixed = mixed + y * shares[:, expert : expert + 1]
    output: Tensor = model.head(torch.tanh(mixed))
    return output


def spell_out_autoencoder(model: nn.Module, x: Batch, record: Record) -> Tensor:
    assert isinstance(model, Autoencoder)
    hidden = torch.tanh(record("weight", x, x @ model.weight.T + model.bias))
    return record("weight", hidden, hidden @ model.weight, inputs_side=0, start=0)


# --- Cases ------------------------------------------------------------------------------------


def linears(*names: str) -> tuple[Product, ...]:
    return tuple(Product(f"{name}.weight") for name in names)


def biases(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.bias" for name in names)


def images(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, dtype=torch.float64)


def texts(count: int = 30) -> Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH))


def padded_texts() -> list[Batch]:
    """Batches as dicts, with padding at the end."""
    batches: list[Batch] = []
    for count in (11, 11, 8):
        lengths = torch.randint(2, LENGTH + 1, (count, 1))
        mask = (torch.arange(LENGTH) < lengths).long()
        batches.append({"input_ids": texts(count), "attention_mask": mask})
    return batches


@dataclass(frozen=True)
class Case:
    """A model and known inputs.

    Attributes:
        products: the weights that matrices cover, with all that is trainable and not in `biases`
            as plain entries.
        seed: of weights and inputs, chosen for eigenvalues that are well apart.
    """

    name: str
    build: Callable[[], nn.Module]
    make_known: Callable[[], Tensor | list[Batch]]
    products: tuple[Product, ...]
    biases: tuple[str, ...] = ()
    spelled_out: SpelledOut | None = None
    seed: int = 0
    batch_size: int = 7
    gain: float = 1.5

    def make(self) -> tuple[nn.Module, Tensor | list[Batch]]:
        """Return a new model in float64 and its known inputs, the same at each call."""
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(self.seed)
            model = self.build().double().eval()
            known = self.make_known()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(self.gain)
                    if param.dim() == 1:  # biases and norms away from zero and one
                        param.add_(0.2 * torch.randn_like(param))
        return model, known

    def task(self) -> Task:
        model, known = self.make()
        batches = cut(known, self.batch_size) if isinstance(known, Tensor) else known
        return Task(model, batches, self.products, self.biases, self.spelled_out)


_EMBEDDINGS = (
    Product("tokens.weight", inputs_side=1, one_hot_side=0),
    Product("positions.weight", inputs_side=1, one_hot_side=0),
)
_BLOCK = linears("qkv", "out", "up", "down")
_BLOCK_BIASES = biases("qkv", "out", "up", "down")
_TIED = Product("tokens.weight", inputs_side=1, one_hot_side=0)
_ATTENTION = (
    *linears("queries", "attention.out_proj", "head"),
    Product("attention.in_proj_weight"),
)
_ATTENTION_BIASES = (*biases("queries", "attention.out_proj", "head"), "attention.in_proj_bias")

CASES: tuple[Case, ...] = (
    Case(
        "mlp",
        MLP,
        images(30, 6),
        linears("first", "second", "head"),
        biases("first", "second", "head"),
        seed=2,
    ),
    Case(
        "mlp_frozen_layer",
        lambda: MLP(frozen=True),
        images(30, 6),
        linears("first", "head"),
        biases("first", "head"),
        seed=2,
    ),
    Case(
        "conv1d",
        ConvNet1d,
        images(30, 2, 5),
        linears("conv", "head"),
        biases("conv", "grouped", "head"),
        seed=2,
    ),
    Case(
        "conv2d",
        ConvNet2d,
        images(40, 2, 4, 5),
        linears("conv", "second", "third", "head"),
        biases("conv", "grouped", "head"),
        seed=3,
    ),
    Case(
        "gpt",
        GPT,
        texts,
        (*_EMBEDDINGS, *_BLOCK, *linears("head")),
        _BLOCK_BIASES,
        seed=3,
    ),
    Case(
        "gpt_padded",
        GPT,
        padded_texts,
        (*_EMBEDDINGS, *_BLOCK, *linears("head")),
        _BLOCK_BIASES,
    ),
    Case(
        "gpt_padding_idx",
        lambda: GPT(padding=-2),
        texts,
        (*_EMBEDDINGS, *_BLOCK, *linears("head")),
        _BLOCK_BIASES,
        seed=3,
    ),
    Case(
        "gpt_tied",
        lambda: GPT(tied=True),
        texts,
        (_TIED, _EMBEDDINGS[1], *_BLOCK),
        _BLOCK_BIASES,
        seed=3,
    ),
    Case(
        "gpt_broadcast_positions",
        lambda: GPT(broadcast=True),
        texts,
        (
            _EMBEDDINGS[0],
            *_BLOCK,
            *linears("head"),
        ),
        _BLOCK_BIASES,
        seed=3,
    ),
    Case(
        "gpt2_conv1d_tied",
        GPT2,
        texts,
        (
            Product("wte.weight", inputs_side=1, one_hot_side=0),
            *(Product(f"{name}.weight", 0) for name in ("c_attn", "c_proj", "c_fc", "c_out")),
        ),
        biases("c_attn", "c_proj", "c_fc", "c_out"),
        seed=1,
        gain=0.8,
    ),
    Case(
        "self_attention",
        Attention,
        images(30, 3, WIDTH),
        _ATTENTION,
        _ATTENTION_BIASES,
        spell_out_attention,
        seed=4,
    ),
    Case(
        "cross_attention",
        lambda: Attention(cross=True),
        images(30, 3, WIDTH),
        _ATTENTION,
        _ATTENTION_BIASES,
        spell_out_attention,
        seed=3,
    ),
    Case(
        "experts_routed",
        RoutedExperts,
        images(40, 4),
        (Product("experts", stack=True, by_batches=True), *linears("router", "head")),
        biases("router", "head"),
        spell_out_routed,
        seed=4,
    ),
    Case(
        "experts_routed_tokens",
        RoutedExperts,
        images(20, 3, 4),
        (Product("experts", stack=True, by_batches=True), *linears("router", "head")),
        biases("router", "head"),
        spell_out_routed,
        seed=1,
    ),
    *(
        Case(
            f"experts_{way}",
            partial(RoutedExperts, way),
            images(20, 3, 4),
            (Product("experts", stack=True, by_batches=True), *linears("router", "head")),
            biases("router", "head"),
            spell_out_routed,
            seed=1,
        )
        for way in ("gathered", "transposed")
    ),
    Case(
        "experts_bmm",
        DenseExperts,
        images(30, 4),
        (
            Product("experts", inputs_side=0, stack=True, by_batches=True),
            *linears("router", "head"),
        ),
        biases("router", "head"),
        spell_out_dense,
        seed=2,
    ),
    Case(
        "shared_across_depth",
        Recurrent,
        images(30, 6),
        linears("block", "head"),
        biases("block", "head"),
        seed=2,
    ),
    Case(
        "weight_and_transpose",
        Autoencoder,
        images(30, 6),
        (Product("weight"),),
        ("bias",),
        spell_out_autoencoder,
    ),
    Case(
        "normal_regression",
        Regression,
        images(30, 6),
        linears("first", "second"),
        biases("first", "second"),
        seed=3,
    ),
)


# In float64, of which torch has no kernel for groups, its way is that of `experts_routed_tokens`.
GROUPED = Case(
    "experts_grouped",
    partial(RoutedExperts, "grouped"),
    images(20, 3, 4),
    (Product("experts", stack=True, by_batches=True), *linears("router", "head")),
    biases("router", "head"),
    spell_out_routed,
    seed=1,
)


# --- Traces, base optimizers and gradients that the tests share ---------------------------------


@cache
def traced(case: Case, seed: int = 0) -> tuple[Task, list[list[Trace]], list[list[Trace]]]:
    """Return the task and its traces with the labels for the moments and for the importance."""
    task = case.task()
    SeededNormal.restart()
    for_moments, for_importance = draw_labels_twice(task.model, task.batches, seed)
    return task, trace_batches(task, for_moments), trace_batches(task, for_importance)


@dataclass(frozen=True)
class Base:
    """A base optimizer of torch and the same as a formula."""

    kind: Callable[..., torch.optim.Optimizer]
    options: dict[str, float]
    rule: Rule


BASES = {
    "sgd": Base(torch.optim.SGD, {"lr": 0.1}, sgd(0.1)),
    "sgd_momentum": Base(
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        sgd(0.1, momentum=0.9, weight_decay=0.1),
    ),
    "adam": Base(torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}, adam(0.01, weight_decay=0.1)),
    "adamw": Base(
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1},
        adam(0.01, weight_decay=0.1, decoupled=True),
    ),
}


def random_gradients(model: nn.Module, steps: int = 3) -> list[dict[str, Tensor]]:
    """Return a gradient for each parameter and step, the same at each call."""
    generator = torch.Generator().manual_seed(5)
    return [
        {
            name: torch.randn(param.shape, generator=generator, dtype=param.dtype)
            for name, param in model.named_parameters()
        }
        for _ in range(steps)
    ]
