"""One observation of importance, and the same by one autograd call a sample: plainly right."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from networks import dictated
from oracle import Values, gradient, trainable
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _BatchNorm

from syngap import SynGAP

# The optimizer's side -----------------------------------------------------------------------------


def observer(model: nn.Module, estimator: str = "exact", **options: Any) -> SynGAP:
    """An optimizer that stays where it is, and whose importance is what it observed last."""
    settings = {"lr": 0.0, "retention": 0.0, "damping": 0.0, "estimator": estimator, **options}
    params = settings.pop("params", None)
    return SynGAP(model.parameters() if params is None else params, model=model, **settings)


def labels_for(logits: Tensor, seed: int = 5) -> Tensor:
    """Any labels: what is computed for given labels must be right for all."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)


def labelled(logits: Tensor, labels: Tensor | None = None) -> Distribution:
    """The prediction whose drawn labels are known beforehand."""
    distribution = torch.distributions.Categorical(logits=logits)
    return dictated(distribution, labels_for(logits) if labels is None else labels)


def importance_of(optimizer: SynGAP) -> Values:
    importance = optimizer.importance()
    assert isinstance(importance, dict)
    return {name: value.clone() for name, value in importance.items()}


def observed(optimizer: SynGAP, logits: Tensor, labels: Tensor | None = None) -> Values:
    """The importance by name after one observation of these logits."""
    optimizer.observe(labelled(logits, labels))
    optimizer.step()
    return importance_of(optimizer)


# The plain side -----------------------------------------------------------------------------------


class HeldNorm(nn.Module):
    """BatchNorm whose statistics are given constants, a pair for each call of a forward pass."""

    def __init__(self, norm: _BatchNorm, statistics: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.affine, self.eps = norm.affine, norm.eps
        self.weight, self.bias = norm.weight, norm.bias
        self.statistics = statistics
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        def along(values: Tensor) -> Tensor:
            return values.reshape(1, -1, *[1] * (x.dim() - 2))

        mean, variance = self.statistics[self.calls]
        self.calls += 1
        normal = (x - along(mean)) / torch.sqrt(along(variance) + self.eps)
        if not self.affine:
            return normal
        return normal * along(self.weight) + along(self.bias)


def with_statistics_as_constants(model: nn.Module, x: Tensor) -> nn.Module:
    """The model for one more pass of x, in which no BatchNorm looks at its batch.

    Each that does is replaced, in a copy, by one that has what it sees of x built in.
    """

    def looks(module: nn.Module) -> bool:
        return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)

    if not any(looks(module) for module in model.modules()):
        return model
    held = copy.deepcopy(model)
    norms = {name: module for name, module in held.named_modules() if looks(module)}
    seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {norm: [] for norm in norms.values()}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        channels = args[0].transpose(0, 1).flatten(1)
        mean = channels.mean(1)
        seen[module].append((mean, ((channels - mean[:, None]) ** 2).mean(1)))

    hooks = [norm.register_forward_pre_hook(note) for norm in seen]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        held(x)
    for hook in hooks:
        hook.remove()
    for name, norm in norms.items():
        owner, _, attribute = name.rpartition(".")
        setattr(held.get_submodule(owner), attribute, HeldNorm(norm, seen[norm]))
    return held


def diagonal_by_loop(
    model: nn.Module, x: Tensor, labels: Tensor | None = None, pooled: Collection[str] = ()
) -> Values:
    """Σ over samples of score² / predictions; for ``pooled`` parameters (Σ score)² / predictions.

    A sample's score is the gradient of the log-probability of its labels, batch statistics taken
    as constants. So no sample's logits depend on another sample, and the rows of one forward pass
    will do; they also have the dropout of the model's own pass, where both were seeded alike.
    """
    held = with_statistics_as_constants(model, x)
    logits = held(x)
    labels = labels_for(logits) if labels is None else labels
    log_p = logits - torch.log(torch.exp(logits).sum(-1, keepdim=True))
    scores = [
        gradient(row.gather(-1, label.unsqueeze(-1)).sum(), held)
        for row, label in zip(log_p, labels, strict=True)
    ]
    result = {}
    for name in trainable(held):
        each = torch.stack([score[name] for score in scores])
        total = each.sum(0) ** 2 if name in pooled else (each**2).sum(0)
        result[name] = total / labels.numel()
    return result


def assert_near(found: Values, expected: Values, tolerance: float) -> None:
    """Each tensor is there, and everywhere within ``tolerance`` of its own largest value."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        largest = value.abs().max().item()
        error = (found[name].double() - value.double()).abs().max().item()
        assert error <= tolerance * largest, f"{name}: {error:.3g} off, the largest {largest:.3g}"
