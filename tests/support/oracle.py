"""The paper's rule in plain loops and float64: slow, and meant to be obviously right.

It shares no code with ``syngap``: one autograd call a row, one loop over the parameters, every
formula as it is written in the paper. Parameters go by their names in the oracle's own network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Values = dict[str, Tensor]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def zeros(model: nn.Module) -> Values:
    return {name: torch.zeros_like(p) for name, p in trainable(model).items()}


def gradient(value: Tensor, model: nn.Module) -> Values:
    """d value / d parameter, zero where the value does not depend on the parameter."""
    parameters = trainable(model)
    found = torch.autograd.grad(
        value, list(parameters.values()), retain_graph=True, allow_unused=True
    )
    result = {}
    for (name, parameter), derivative in zip(parameters.items(), found, strict=True):
        result[name] = torch.zeros_like(parameter) if derivative is None else derivative
    return result


# The score of one prediction and of one row -------------------------------------------------------


def log_probability(logits: Tensor, label: int) -> Tensor:
    """log softmax(logits)[label] of one prediction: logits (C,)."""
    return logits[label] - torch.log(torch.exp(logits).sum())


def row_log_probability(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Sum over the predictions of one row: logits (C,) or (T, C)."""
    if logits.dim() == 1:
        logits, labels, mask = logits[None], labels[None], mask[None]
    total = 0.0 * logits.sum()  # a row whose predictions are all masked still has a graph
    for position in range(len(logits)):
        if mask[position]:
            total = total + log_probability(logits[position], int(labels[position]))
    return total


def batch_norms(model: nn.Module) -> list[nn.BatchNorm1d | nn.BatchNorm2d]:
    """The layers through which a row's output depends on other rows."""
    known = nn.BatchNorm1d | nn.BatchNorm2d
    return [layer for layer in model.modules() if isinstance(layer, known) and layer.training]


def with_statistics_held(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy of the network in which the batch statistics of ``x`` are constants.

    Its BatchNorm layers are in eval mode and have, as running statistics, the mean and the
    (biased) variance of what they see of ``x`` in train mode. So it gives for every row, taken
    alone, what the network gives for that row within the batch.
    """
    if not batch_norms(model):
        return model
    held = copy.deepcopy(model)
    norms = batch_norms(held)
    seen: dict[nn.Module, Tensor] = {}

    def remember(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[layer] = inputs[0]

    hooks = [norm.register_forward_pre_hook(remember) for norm in norms]
    with torch.no_grad():
        in_the_batch = held(x)
    for hook in hooks:
        hook.remove()
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        for channel in range(norm.num_features):
            values = seen[norm][:, channel].reshape(-1)
            mean = values.sum() / len(values)
            norm.running_mean[channel] = mean
            norm.running_var[channel] = ((values - mean) ** 2).sum() / len(values)
        norm.eval()
    with torch.no_grad():
        for row in range(len(x)):
            torch.testing.assert_close(
                held(x[row : row + 1])[0], in_the_batch[row], rtol=1e-12, atol=1e-12
            )
    return held


# Estimates and definition of the Fisher diagonal --------------------------------------------------


def sampled_diagonal(model: nn.Module, x: Tensor, labels: Tensor, mask: Tensor) -> Values:
    """(sum of the scores of all predictions)^2 / their number."""
    logits = model(x)
    total = zeros(model)
    for row in range(len(x)):
        score = gradient(row_log_probability(logits[row], labels[row], mask[row]), model)
        for name in total:
            total[name] = total[name] + score[name]
    count = int(mask.sum())
    return {name: value**2 / count for name, value in total.items()}


def exact_diagonal(
    model: nn.Module, x: Tensor, labels: Tensor, mask: Tensor, pooled: Collection[str] = ()
) -> Values:
    """Sum over rows of (score of the row)^2 / the number of predictions, statistics held.

    For the parameters in ``pooled`` it is (sum over rows of the score)^2 instead.
    """
    held = with_statistics_held(model, x)
    total, squares = zeros(model), zeros(model)
    for row in range(len(x)):
        logits = held(x[row : row + 1])[0]
        score = gradient(row_log_probability(logits, labels[row], mask[row]), held)
        for name in total:
            total[name] = total[name] + score[name]
            squares[name] = squares[name] + score[name] ** 2
    count = int(mask.sum())
    return {name: (total[name] ** 2 if name in pooled else squares[name]) / count for name in total}


def diagonal(
    estimator: str,
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    mask: Tensor,
    pooled: Collection[str] = (),
) -> Values:
    """The estimate by name; "empirical" is that of "sampled", with other labels."""
    if estimator == "exact":
        return exact_diagonal(model, x, labels, mask, pooled)
    return sampled_diagonal(model, x, labels, mask)


Outcome = tuple[float, float, Tensor]  # a label, its probability, its log-probability
Outcomes = Callable[[Tensor], list[Outcome]]


def categorical_outcomes(logits: Tensor) -> list[Outcome]:
    """One prediction of logits (C,)."""
    outcomes = []
    for label in range(len(logits)):
        log_p = log_probability(logits, label)
        outcomes.append((float(label), math.exp(log_p.item()), log_p))
    return outcomes


def bernoulli_outcomes(logit: Tensor) -> list[Outcome]:
    """One prediction of a single logit."""
    outcomes = []
    for label, p in ((1.0, 1 / (1 + torch.exp(-logit))), (0.0, 1 / (1 + torch.exp(logit)))):
        outcomes.append((label, p.item(), torch.log(p)))
    return outcomes


def unit_normal_outcomes(mean: Tensor) -> list[Outcome]:
    """One prediction of a mean, with variance one.

    The score is linear in the label, so an estimate quadratic in scores has the same expectation
    under any labels of mean ``mean`` and variance one: these two will do.
    """
    return [
        (label, 0.5, -((label - mean) ** 2) / 2 - math.log(2 * math.pi) / 2)
        for label in (mean.item() - 1, mean.item() + 1)
    ]


def predictions(
    model: nn.Module, x: Tensor, event_dim: int, hold_statistics: bool
) -> list[tuple[Tensor, nn.Module]]:
    """The output for each prediction, with the network whose parameters it depends on."""
    held = with_statistics_held(model, x)
    outputs = model(x)
    result: list[tuple[Tensor, nn.Module]] = []
    for row in range(len(x)):
        output, network = outputs[row], model
        if hold_statistics:
            output, network = held(x[row : row + 1])[0], held
        event = output.shape[output.dim() - event_dim :]
        result.extend((prediction, network) for prediction in output.reshape(-1, *event))
    return result


def fisher_diagonal(
    model: nn.Module, x: Tensor, outcomes: Outcomes, event_dim: int, hold_statistics: bool
) -> Values:
    """By definition: mean over predictions of sum_y p(y) (d log p(y) / d theta)^2."""
    total = zeros(model)
    each = predictions(model, x, event_dim, hold_statistics)
    for output, network in each:
        for _, probability, log_p in outcomes(output):
            score = gradient(log_p, network)
            for name in total:
                total[name] = total[name] + probability * score[name] ** 2
    return {name: value / len(each) for name, value in total.items()}


# The rule -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What a parameter group may set."""

    lr: float
    retention: float = 0.999
    consolidation: float = 0.1
    damping: float = 1e-16
    ambient: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    bounded: bool = True


@dataclass
class Sgd:
    """theta - lr Omega m, with m = momentum m + (g + weight_decay theta) and m = d at first."""

    buffer: Values = field(default_factory=dict)

    def update(self, name: str, theta: Tensor, g: Tensor, omega: Tensor, o: Options) -> Tensor:
        d = g + o.weight_decay * theta
        self.buffer[name] = o.momentum * self.buffer[name] + d if name in self.buffer else d
        return theta - o.lr * omega * self.buffer[name]


@dataclass
class Adam:
    """theta + Omega (theta_new - theta), theta_new the step of Kingma and Ba's algorithm 1.

    With the usual eps a gradient that is zero but for rounding (of a key's bias, say) becomes a
    full step in a random direction, and no two computations agree.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-3
    first: Values = field(default_factory=dict)
    second: Values = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def update(self, name: str, theta: Tensor, g: Tensor, omega: Tensor, o: Options) -> Tensor:
        a, b = self.betas
        zero = torch.zeros_like(theta)
        self.steps[name] = t = self.steps.get(name, 0) + 1
        self.first[name] = a * self.first.get(name, zero) + (1 - a) * g
        self.second[name] = b * self.second.get(name, zero) + (1 - b) * g**2
        mean = self.first[name] / (1 - a**t)
        root = torch.sqrt(self.second[name] / (1 - b**t))
        new = theta - o.lr * mean / (root + self.eps)
        return theta + omega * (new - theta)


class Oracle:
    """The rule on a network of its own; ``options`` gives each trainable parameter its own."""

    def __init__(
        self,
        model: nn.Module,
        options: dict[str, Options],
        *,
        scope: str = "network",
        estimator: str = "sampled",
        every: int = 1,
        warmup: int = 0,
        pooled: Collection[str] = (),
        base: Sgd | Adam | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.scope = scope
        self.estimator = estimator
        first = list(range(warmup + 1))
        self.due = [*first, *range(warmup + every, 1000, every)]
        self.elapsed = {step: 1 if step in first else every for step in self.due}
        self.pooled = pooled
        self.base = base or Sgd()
        self.importance = zeros(model)
        self.observed: list[tuple[int, Values]] = []
        self.steps = 0

    def observe(self, x: Tensor, labels: Tensor, mask: Tensor) -> None:
        if self.steps in self.due:
            estimate = diagonal(self.estimator, self.model, x, labels, mask, self.pooled)
            self.observed.append((int(mask.sum()), estimate))

    def fold(self) -> None:
        """F <- alpha^k F + (1 - alpha^k) diag, k being the steps since importance was due."""
        if not self.observed:
            return
        predictions = sum(count for count, _ in self.observed)
        for name in self.importance:
            mean = sum(count * diag[name] for count, diag in self.observed) / predictions
            kept = self.options[name].retention ** self.elapsed[self.steps]
            self.importance[name] = kept * self.importance[name] + (1 - kept) * mean
        self.observed = []

    def mean_importance(self, names: Collection[str]) -> float:
        total, count = 0.0, 0
        for name in names:
            for value in self.importance[name].flatten().tolist():
                total += value
                count += 1
        return total / count

    def plasticity(self) -> Values:
        """Omega; mu is the mean over all trainable parameters, or over the tensor itself."""
        result = {}
        mu = self.mean_importance(self.importance)
        for name, importance in self.importance.items():
            o = self.options[name]
            if self.scope == "tensor":
                mu = self.mean_importance([name])
            c = math.atanh(o.consolidation) / (mu + o.damping)
            z = c * (importance + o.damping)
            result[name] = (1 - torch.tanh(z) if o.bounded else 1 - z) + o.ambient
        return result

    def step(self, losses: Sequence[Tensor]) -> None:
        """One step down the sum of the losses; a parameter they do not reach stays."""
        self.fold()
        parameters = trainable(self.model)
        gradients = torch.autograd.grad(
            sum(losses, torch.zeros(())), list(parameters.values()), allow_unused=True
        )
        omega = self.plasticity()
        for (name, theta), g in zip(parameters.items(), gradients, strict=True):
            if g is not None:
                with torch.no_grad():
                    theta.copy_(
                        self.base.update(name, theta.clone(), g, omega[name], self.options[name])
                    )
        self.steps += 1
