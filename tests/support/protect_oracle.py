"""Slow reference for `syngap.protect`: plain loops in float64, one sample at a time.

It takes the drawn labels as data, so that the fast implementation can be compared exactly. Symbols:
a weight W (d0, d1) has rows left_t (d0) and right_t (d1) with G_s = Σ_t left_t right_tᵀ, the
gradient of log p(y_s) of sample s; M0 = Σ left leftᵀ, M1 = Σ right rightᵀ; L, R are their
eigenvectors; F = (1/N) Σ_s (Lᵀ G_s R)²; Ω = 1 - tanh(c (F + λ)) + ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal

from syngap.optim.scores import sample_labels

LAMBDA = 1e-16

Batch = Any  # a tensor, or a dict of keyword arguments
Rank = int | float | str


class Conv1D(nn.Module):
    """Linear layer of GPT-2 with weight (in, out), written like that of `transformers`."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.nx = inputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.5)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


@dataclass(frozen=True)
class Product:
    """A weight that the gate covers by matrices.

    Attributes:
        name: its name among `model.named_parameters()`.
        inputs_side: 1 where W is (out, in), 0 where it is (in, out). Low rank is taken there.
        one_hot_side: the side that an embedding's tokens pick, which stays plain entries.
        stack: whether it is a stack of matrices (experts, d0, d1).
        by_batches: whether it is not known which sample a row is of, so that gradients are squared
            by batches.
    """

    name: str
    inputs_side: int = 1
    one_hot_side: int | None = None
    stack: bool = False
    by_batches: bool = False


class Record(Protocol):
    """Call to note one use of a matrix; it returns the output unchanged."""

    def __call__(
        self,
        name: str,
        x: Tensor,
        output: Tensor,
        *,
        inputs_side: int = 1,
        index: int = 0,
        start: int = 0,
    ) -> Tensor: ...


# The forward pass written again, with a call of `record` at each functional use of a weight.
SpelledOut = Callable[[nn.Module, Batch, Record], "Tensor | Distribution"]


@dataclass
class Task:
    """A model, its known inputs cut into batches, and which parameters are covered how."""

    model: nn.Module
    batches: list[Batch]
    products: tuple[Product, ...]
    biases: tuple[str, ...] = ()
    spelled_out: SpelledOut | None = None


@dataclass
class Rows:
    """The rows of one use of one matrix for one sample: G = leftᵀ right."""

    name: str
    index: int
    occurrence: int
    left: Tensor
    right: Tensor
    counted: Tensor


@dataclass
class Trace:
    """What one sample gives: its rows at each use, and the gradient of log p for each parameter."""

    rows: list[Rows]
    gradients: dict[str, Tensor]
    predictions: int


# --- Batches, predictions and labels ----------------------------------------------------------


def cut(known: Tensor, batch_size: int) -> list[Batch]:
    return [known[first : first + batch_size] for first in range(0, len(known), batch_size)]


def batch_length(batch: Batch) -> int:
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)


def take_sample(batch: Batch, sample: int) -> Batch:
    """Return a batch of one."""
    if isinstance(batch, dict):
        return {key: value[sample : sample + 1] for key, value in batch.items()}
    return batch[sample : sample + 1]


def run_model(model: nn.Module, batch: Batch) -> Tensor | Distribution:
    output: Tensor | Distribution = model(**batch) if isinstance(batch, dict) else model(batch)
    return output


def counted_positions(batch: Batch, shape: torch.Size) -> Tensor:
    """Return True for each position that counts, of the shape of the labels."""
    if isinstance(batch, dict) and "attention_mask" in batch:
        mask: Tensor = batch["attention_mask"]
        return mask.bool()
    return torch.ones(shape, dtype=torch.bool)


def draw_labels(
    model: nn.Module, batches: Sequence[Batch], generator: torch.Generator
) -> list[Tensor]:
    """Draw labels for each batch in order: one call of `sample_labels`, or of `sample`."""
    drawn = []
    for batch in batches:
        with torch.no_grad():
            prediction = run_model(model, batch)
        if isinstance(prediction, Distribution):
            drawn.append(prediction.sample())
        else:
            drawn.append(sample_labels(prediction, generator))
    return drawn


def draw_labels_twice(
    model: nn.Module, batches: Sequence[Batch], seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Draw as the fast path does: all batches for the moments, then all for the importance."""
    generator = torch.Generator().manual_seed(seed)
    for_moments = draw_labels(model, batches, generator)
    for_importance = draw_labels(model, batches, generator)
    return for_moments, for_importance


def log_probability(
    prediction: Tensor | Distribution, labels: Tensor, counted: Tensor
) -> tuple[Tensor, int]:
    """Return Σ log p(label) over the positions that count, and their number."""
    if isinstance(prediction, Distribution):
        values = prediction.log_prob(labels).reshape(-1)
        counted = counted.reshape(-1)
    else:
        logits = prediction.reshape(-1, prediction.shape[-1])
        flat, counted = labels.reshape(-1), counted.reshape(-1)
        values = torch.stack(
            [
                logits[position, int(flat[position])] - logits[position].exp().sum().log()
                for position in range(len(flat))
            ]
        )
    total = values.new_zeros(())
    number = 0
    for position in range(len(values)):
        if counted[position]:
            total = total + values[position]
            number += 1
    return total, number


# --- Rows of each use -------------------------------------------------------------------------


def unfold_patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return the patch (in*kh*kw entries) under each output position of one sample, in loops."""
    image = x[0] if isinstance(layer, nn.Conv2d) else x[0].unsqueeze(1)
    pairs = []
    for option in (layer.kernel_size, layer.stride, layer.padding, layer.dilation):
        values = [int(value) for value in option]
        default = 0 if option is layer.padding else 1
        pairs.append(values if isinstance(layer, nn.Conv2d) else [default, *values])
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = pairs
    channels, height, width = image.shape
    padded = image.new_zeros(channels, height + 2 * ph, width + 2 * pw)
    padded[:, ph : ph + height, pw : pw + width] = image
    patches = []
    for top in range(0, padded.shape[1] - dh * (kh - 1), sh):
        for left in range(0, padded.shape[2] - dw * (kw - 1), sw):
            patch = image.new_zeros(channels, kh, kw)
            for channel in range(channels):
                for i in range(kh):
                    for j in range(kw):
                        patch[channel, i, j] = padded[channel, top + i * dh, left + j * dw]
            patches.append(patch.reshape(-1))
    return torch.stack(patches)


def one_hot(tokens: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    rows = torch.zeros(tokens.numel(), classes, dtype=dtype)
    for row, token in enumerate(tokens.reshape(-1).tolist()):
        rows[row, token] = 1.0
    return rows


@dataclass
class _Noted:
    name: str
    index: int
    occurrence: int
    x: Tensor
    output: Tensor
    inputs_side: int
    start: int
    image: bool = False
    unlearned: Tensor | None = None  # rows that give no gradient


@dataclass
class _Notes:
    shapes: dict[str, torch.Size]
    noted: list[_Noted] = field(default_factory=list)

    def __call__(
        self,
        name: str,
        x: Tensor,
        output: Tensor,
        *,
        inputs_side: int = 1,
        index: int = 0,
        start: int = 0,
        image: bool = False,
        unlearned: Tensor | None = None,
    ) -> Tensor:
        if name in self.shapes:
            before = sum(
                note.name == name and note.index == index and note.start == start
                for note in self.noted
            )
            rows = x.detach().reshape(-1, x.shape[-1])
            self.noted.append(
                _Noted(name, index, before, rows, output, inputs_side, start, image, unlearned)
            )
        return output

    def rows_of(self, note: _Noted, delta: Tensor) -> Rows:
        if note.image:  # (1, out, ...) to (positions, out)
            delta = delta[0].reshape(delta.shape[1], -1).T
        delta = delta.reshape(-1, delta.shape[-1])
        if note.unlearned is not None:
            delta = delta.masked_fill(note.unlearned.reshape(-1, 1), 0.0)
        counted = torch.tensor([bool((row != 0).any()) for row in delta])
        shape = self.shapes[note.name]
        outputs = shape[0] if note.inputs_side == 1 else shape[1]
        whole = delta.new_zeros(
            len(delta), outputs
        )  # a use of a part of the outputs: zero elsewhere
        whole[:, note.start : note.start + delta.shape[1]] = delta
        left, right = (whole, note.x) if note.inputs_side == 1 else (note.x, whole)
        # Parts of one matrix, as of a packed projection, are different uses.
        occurrence = 1000 * note.start + note.occurrence
        return Rows(note.name, note.index, occurrence, left, right, counted)


def matrix_shape(product: Product, weight: Tensor) -> torch.Size:
    """Return (d0, d1)."""
    if product.stack:
        return weight.shape[1:]
    return torch.Size([weight.shape[0], weight[0].numel()])


def as_matrices(product: Product, weight: Tensor) -> list[Tensor]:
    """Return the weight as a list of matrices (d0, d1): one, or one for each expert."""
    if product.stack:
        return [weight[index] for index in range(len(weight))]
    return [weight.reshape(matrix_shape(product, weight))]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def trace_sample(task: Task, sample: Batch, labels: Tensor) -> Trace:
    """Run a batch of one and take the rows of each use and the gradient for each parameter."""
    model, params = task.model, trainable(task.model)
    products = {product.name: product for product in task.products}
    notes = _Notes({name: matrix_shape(each, params[name]) for name, each in products.items()})
    names = {id(params[name]): name for name in products}

    def note_module(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        name = names[id(module.weight)]
        x = inputs[0].detach()
        if isinstance(module, nn.Embedding):
            picked = one_hot(x, module.num_embeddings, output.dtype)
            padding = None if module.padding_idx is None else x == module.padding_idx
            notes(name, picked, output, inputs_side=0, unlearned=padding)
        elif isinstance(module, nn.Conv1d | nn.Conv2d):
            notes(name, unfold_patches(module, x), output, image=True)
        elif isinstance(module, Conv1D):
            notes(name, x, output, inputs_side=0)
        else:
            notes(name, x, output)

    handles = [
        module.register_forward_hook(note_module)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | Conv1D)
        and id(module.weight) in names
    ]
    try:
        if task.spelled_out is None:
            prediction = run_model(model, sample)
        else:
            prediction = task.spelled_out(model, sample, notes)
    finally:
        for handle in handles:
            handle.remove()
    score, predictions = log_probability(
        prediction, labels, counted_positions(sample, labels.shape)
    )
    # One pass back for all of them: a pass each would take most of the time.
    asked = [*(note.output for note in notes.noted), *params.values()]
    found = [
        torch.zeros_like(value) if gradient is None else gradient
        for value, gradient in zip(
            asked, torch.autograd.grad(score, asked, allow_unused=True), strict=True
        )
    ]
    rows = [
        notes.rows_of(note, delta) for note, delta in zip(notes.noted, found, strict=False)
    ]  # those of the outputs come first
    gradients = dict(zip(params, found[len(notes.noted) :], strict=True))
    return Trace(rows, {name: value.detach() for name, value in gradients.items()}, predictions)


def trace_batches(task: Task, labels: Sequence[Tensor]) -> list[list[Trace]]:
    """Return the traces of each sample of each batch."""
    traces = []
    for batch, drawn in zip(task.batches, labels, strict=True):
        traces.append(
            [
                trace_sample(task, take_sample(batch, sample), drawn[sample : sample + 1])
                for sample in range(batch_length(batch))
            ]
        )
    return traces


# --- Moments, bases, importance ---------------------------------------------------------------


def second_moments(
    task: Task, product: Product, traces: Sequence[Sequence[Trace]]
) -> list[tuple[Tensor, Tensor]]:
    """Return (M0, M1) for each matrix of a weight, each use weighted by its other side."""
    weight = trainable(task.model)[product.name]
    d0, d1 = matrix_shape(product, weight)
    moments = []
    for index in range(len(as_matrices(product, weight))):
        uses: dict[int, list[Rows]] = {}
        for batch in traces:
            for trace in batch:
                for rows in trace.rows:
                    if rows.name == product.name and rows.index == index:
                        uses.setdefault(rows.occurrence, []).append(rows)
        m0, m1 = weight.new_zeros(d0, d0), weight.new_zeros(d1, d1)
        for use in uses.values():
            use0, use1 = torch.zeros_like(m0), torch.zeros_like(m1)
            lefts = rights = 0.0
            number = 0
            for rows in use:
                for left, right, counts in zip(rows.left, rows.right, rows.counted, strict=True):
                    if counts:
                        use0 += torch.outer(left, left)
                        use1 += torch.outer(right, right)
                        lefts += float(left @ left)
                        rights += float(right @ right)
                        number += 1
            if number:
                m0 += use0 * (rights / number)
                m1 += use1 * (lefts / number)
        moments.append((m0.detach(), m1.detach()))
    return moments


def eigenvectors(moment: Tensor, count: int) -> Tensor:
    """Return the first `count` eigenvectors as columns, largest eigenvalue first."""
    _, vectors = torch.linalg.eigh(moment)
    largest_first: Tensor = vectors.flip(1)
    return largest_first[:, :count]


def count_directions(rank: Rank, size: int) -> int:
    """Return how many directions of a side of `size` entries `rank` keeps."""
    if rank == "full":
        return size
    assert not isinstance(rank, str)
    if isinstance(rank, int):
        return min(rank, size)
    return max(1, round(rank * size))


def choose_basis(product: Product, m0: Tensor, m1: Tensor, rank: Rank) -> tuple[Tensor, Tensor]:
    """Return (L, R). "full": both sides. A number: the inputs' side only, the other is identity."""
    sides = []
    for side, moment in enumerate((m0, m1)):
        size = len(moment)
        entries = side == product.one_hot_side or (rank != "full" and side != product.inputs_side)
        if entries:
            sides.append(torch.eye(size, dtype=moment.dtype))
        else:
            sides.append(eigenvectors(moment, count_directions(rank, size)))
    return sides[0], sides[1]


@dataclass
class Gate:
    """Bases, importance and mask of every trainable parameter.

    Attributes:
        bases: (L, R) for each matrix of a covered weight.
        importance: F for each matrix; a list of one for biases and plain entries.
        mask: Ω, like `importance`.
        mean: mu.
    """

    products: dict[str, Product]
    bases: dict[str, list[tuple[Tensor, Tensor]]]
    importance: dict[str, list[Tensor]]
    mask: dict[str, list[Tensor]]
    mean: float
    predictions: int


def plasticity_mask(
    importance: Tensor, mean: float, consolidation: float = 0.999, ambient: float = 0.01
) -> Tensor:
    """Return Ω = 1 - tanh(c (F + λ)) + ε with c = arctanh(τ) / (mu + λ), entry by entry."""
    c = math.atanh(consolidation) / (mean + LAMBDA)
    values = [
        1.0 - math.tanh(c * (value + LAMBDA)) + ambient for value in importance.flatten().tolist()
    ]
    return torch.tensor(values, dtype=importance.dtype).reshape(importance.shape)


def count_predictions(traces: Sequence[Sequence[Trace]]) -> int:
    return sum(trace.predictions for batch in traces for trace in batch)


def gradients_of(task: Task, name: str, traces: Sequence[Sequence[Trace]]) -> list[Tensor]:
    """Return what is squared: gradients of samples where they are known apart, else of batches."""
    apart = {product.name for product in task.products if not product.by_batches}
    apart |= set(task.biases)
    if name in apart:
        return [trace.gradients[name] for batch in traces for trace in batch]
    sums = []
    for batch in traces:
        summed = torch.zeros_like(batch[0].gradients[name])
        for trace in batch:
            summed += trace.gradients[name]
        sums.append(summed)
    return sums


def mean_importance(task: Task, traces: Sequence[Sequence[Trace]]) -> float:
    """Return mu = (1/P) (1/N) Σ |G_s|², over batches where entries come from batches."""
    params = trainable(task.model)
    total = 0.0
    for name in params:
        for gradient in gradients_of(task, name, traces):
            total += float((gradient**2).sum())
    size = sum(param.numel() for param in params.values())
    return total / size / count_predictions(traces)


@torch.no_grad()
def build_gate(
    task: Task,
    traces_for_moments: Sequence[Sequence[Trace]],
    traces_for_importance: Sequence[Sequence[Trace]],
    *,
    rank: Rank = "full",
    consolidation: float = 0.999,
    ambient: float = 0.01,
    given: Mapping[str, list[tuple[Tensor, Tensor]]] | None = None,
) -> Gate:
    """Compute bases from the first traces, if none are given, importance and mask from the second.

    Where numbers are rounded, eigenvectors of eigenvalues that are close are any of their span: all
    else can still be compared in a basis that is given.
    """
    products = {product.name: product for product in task.products}
    predictions = count_predictions(traces_for_importance)
    bases: dict[str, list[tuple[Tensor, Tensor]]] = {}
    importance: dict[str, list[Tensor]] = {}
    for name, param in trainable(task.model).items():
        if name in products:
            product = products[name]
            if given is None:
                moments = second_moments(task, product, traces_for_moments)
                bases[name] = [choose_basis(product, m0, m1, rank) for m0, m1 in moments]
            else:
                bases[name] = given[name]
            importance[name] = []
            for index, (left, right) in enumerate(bases[name]):
                total = param.new_zeros(left.shape[1], right.shape[1])
                for gradient in gradients_of(task, name, traces_for_importance):
                    matrix = as_matrices(product, gradient)[index]
                    total += (left.T @ matrix @ right) ** 2
                importance[name].append(total / predictions)
        else:
            total = torch.zeros_like(param)
            for gradient in gradients_of(task, name, traces_for_importance):
                total += gradient**2
            importance[name] = [total / predictions]
    mean = mean_importance(task, traces_for_importance)
    mask = {
        name: [plasticity_mask(each, mean, consolidation, ambient) for each in values]
        for name, values in importance.items()
    }
    return Gate(products, bases, importance, mask, mean, predictions)


def kronecker_coefficients(left: Tensor, gradient: Tensor, right: Tensor) -> Tensor:
    """Return (R ⊗ L)ᵀ vec(G) as a matrix, with vec that stacks columns."""
    vec = gradient.T.reshape(-1)
    coefficients = torch.kron(right.contiguous(), left.contiguous()).T @ vec
    return coefficients.reshape(right.shape[1], left.shape[1]).T


# --- Base optimizers as formulas --------------------------------------------------------------

State = dict[str, Any]
Rule = Callable[[Tensor, Tensor, State], Tensor]  # (weight, gradient, state) -> update


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Rule:
    def update(weight: Tensor, gradient: Tensor, state: State) -> Tensor:
        direction = gradient + weight_decay * weight
        if momentum:
            if "buffer" in state:
                state["buffer"] = momentum * state["buffer"] + direction
            else:
                state["buffer"] = direction
            direction = state["buffer"]
        return -lr * direction

    return update


def adam(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> Rule:
    """Adam with L2 weight decay, or AdamW where `decoupled`."""
    beta1, beta2 = betas

    def update(weight: Tensor, gradient: Tensor, state: State) -> Tensor:
        if not decoupled:
            gradient = gradient + weight_decay * weight
        t = state["t"] = state.get("t", 0) + 1
        state["m"] = beta1 * state.get("m", torch.zeros_like(weight)) + (1 - beta1) * gradient
        state["v"] = beta2 * state.get("v", torch.zeros_like(weight)) + (1 - beta2) * gradient**2
        mean = state["m"] / (1 - beta1**t)
        square = state["v"] / (1 - beta2**t)
        step: Tensor = -lr * mean / (square.sqrt() + eps)
        if decoupled:
            step = step - lr * weight_decay * weight
        return step

    return update


# --- Protected steps --------------------------------------------------------------------------


def filter_update(update: Tensor, left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Return u - L ((1 - Ω) * (Lᵀ u R)) Rᵀ."""
    coefficients = (1.0 - mask) * (left.T @ update @ right)
    return update - left @ coefficients @ right.T


@torch.no_grad()
def protected_steps(
    gate: Gate,
    weights: Mapping[str, Tensor],
    gradients: Sequence[Mapping[str, Tensor]],
    rule: Rule,
    *,
    rotate: bool,
) -> dict[str, Tensor]:
    """Return the weights after one protected step for each entry of `gradients`."""
    now = {name: weight.detach().clone() for name, weight in weights.items()}
    states: dict[tuple[str, int], State] = {}
    for step in gradients:
        for name, weight in now.items():
            if name not in gate.mask:
                continue  # frozen
            product = gate.products.get(name)
            if product is None:
                state = states.setdefault((name, 0), {})
                now[name] = weight + gate.mask[name][0] * rule(weight, step[name], state)
                continue
            after = []
            for index, (before, gradient) in enumerate(
                zip(as_matrices(product, weight), as_matrices(product, step[name]), strict=True)
            ):
                left, right = gate.bases[name][index]
                mask = gate.mask[name][index]
                state = states.setdefault((name, index), {})
                if rotate:
                    update = rule(left.T @ before @ right, left.T @ gradient @ right, state)
                    after.append(before + left @ (mask * update) @ right.T)
                else:
                    update = rule(before, gradient, state)
                    after.append(before + filter_update(update, left, right, mask))
            now[name] = torch.stack(after).reshape(weight.shape)
    return now


# --- Teacher ----------------------------------------------------------------------------------


def teacher_kl(before: Tensor, now: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the mean over positions that count of KL(before || now), from logits (..., C)."""
    classes = before.shape[-1]
    before, now = before.reshape(-1, classes), now.reshape(-1, classes)
    mask = torch.ones(len(before), dtype=torch.bool) if counted is None else counted.reshape(-1)
    total, number = now.new_zeros(()), 0
    for position in range(len(before)):
        if not mask[position]:
            continue
        p = before[position].exp() / before[position].exp().sum()
        q = now[position].exp() / now[position].exp().sum()
        for p_class, q_class in zip(p, q, strict=True):
            if p_class > 0:
                total = total + p_class * (p_class.log() - q_class.log())
        number += 1
    return total / number


def distribution_kl(before: Distribution, now: Distribution) -> Tensor:
    """Return the mean over the batch of KL(before || now), by formula."""
    if isinstance(before, Normal) and isinstance(now, Normal):
        m0, s0, m1, s1 = before.loc, before.scale, now.loc, now.scale
        values = (s1 / s0).log() + (s0**2 + (m0 - m1) ** 2) / (2 * s1**2) - 0.5
    elif isinstance(before, Bernoulli) and isinstance(now, Bernoulli):
        p, q = before.probs, now.probs
        values = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    elif isinstance(before, Categorical) and isinstance(now, Categorical):
        return teacher_kl(before.probs.log(), now.probs.log())
    else:
        raise TypeError(f"no formula for {type(before).__name__} and {type(now).__name__}")
    total = values.new_zeros(())
    for value in values.reshape(-1):
        total = total + value
    return total / values.numel()
