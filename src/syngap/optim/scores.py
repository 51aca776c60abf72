"""Labels drawn from a prediction, and their scores: the gradients of log p(y|x).

The Fisher information of a prediction p(y | x) is E[(∇ log p(y|x))²] with y drawn from the
prediction itself. Scores ∇ log p then have mean zero and are independent across predictions, so

    (Σ_n ∇ log p(y_n | x_n))² / N

is unbiased for the mean of the per-sample squares, also where train-mode BatchNorm couples the
samples. With true labels in place of drawn ones neither property holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from syngap.messages import count_of
from syngap.optim.errors import NotFiniteError
from syngap.optim.tensors import wide

__all__ = [
    "SCALE",
    "Prediction",
    "how_to_predict",
    "read_prediction",
    "require_classes_last",
    "require_graph",
    "sample_labels",
    "score_sums",
    "suspect_probabilities",
]

# Half precision, anywhere between the parameters and the output, flushes small gradients to zero. A
# power of two lifts them and is taken out again, exactly, where the scores are squared.
SCALE = 1024.0
_IGNORED = -100  # the label that torch's cross_entropy leaves out

# Names of autograd's nodes: those that leave the order of dimensions alone, those that work on
# images, and those after which it is what a layer or the user made it.
_FEW = 16
_SINGLE = (
    "; for a single logit pass torch.distributions.Bernoulli(logits=...), for regression "
    "Normal(output, scale)"
)
_KEEP_ORDER = (
    "Add",
    "BackwardHookFunction",
    "Cat",
    "Clamp",
    "Clone",
    "ConstantPad",
    "Div",
    "Mul",
    "Neg",
    "Relu",
    "Slice",
    "Sub",
    "Tanh",
    "ToCopy",
    "_DDPSink",
)
_ON_IMAGES = ("Convolution", "BatchNorm", "PixelShuffle", "Pool2D", "Pool3D", "Upsample")
_ORDERED = (
    "AddmmBackward0",
    "BmmBackward0",
    "MmBackward0",
    "PermuteBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "ViewBackward0",
    "ReshapeAliasBackward0",
)


_LAST = (
    "and they have to be in the last one: pass logits.movedim(1, -1), to protect() by predict=. If "
    "the last one has the classes, pass logits.flatten(0, -2)"
)


@dataclass
class Prediction:
    """A differentiable output and the cotangent that pulls back to Σ ∇ log p(y) / sqrt(count)."""

    output: Tensor
    cotangent: Tensor
    count: int | Tensor

    @property
    def rows(self) -> int:
        """Length of the batch dimension."""
        return self.output.shape[0]

    def pooled(self, count: Tensor) -> Prediction:
        """Return the same prediction as a part of a larger batch of `count` predictions."""
        share = (torch.as_tensor(self.count, device=count.device) / count).sqrt()
        return Prediction(self.output, self.cotangent * share.to(self.cotangent.dtype), count)


def sample_labels(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one label for each row of `logits` from its softmax.

    The largest of logit plus Gumbel noise is such a draw. Unlike `torch.multinomial` it never
    waits for the device, so it can be captured in a CUDA graph, and it takes any leading shape.

    Examples:
        >>> certain = torch.tensor([[0.0, 100.0], [100.0, 0.0]])
        >>> sample_labels(certain, torch.Generator().manual_seed(0)).tolist()
        [1, 0]
    """
    scores = wide(logits.detach())
    noise = torch.empty_like(scores).exponential_(generator=generator).log_()
    return noise.neg_().add_(scores).argmax(dim=-1)  # logits of a vocabulary are large


def read_prediction(
    prediction: Tensor | Distribution,
    *,
    targets: Tensor | None = None,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    check: bool = True,
) -> Prediction:
    """Check a prediction and pick its labels: `targets` where given, else drawn from itself.

    Args:
        prediction: logits (N, C) or (N, ..., C), or a distribution over a batch.
        targets: true labels; -100 marks positions to leave out.
        mask: False marks positions to leave out.
        generator: source of the drawn labels (logits only: distributions draw by themselves).
        check: look at the values, which on an accelerator waits for them.
    """
    if isinstance(prediction, Distribution):
        return _read_distribution(prediction, targets, mask, check)
    if not isinstance(prediction, Tensor):
        raise TypeError(
            "importance is taken from logits (a Tensor) or a torch.distributions.Distribution, "
            f"got {type(prediction).__name__}; {how_to_predict(prediction)}"
        )
    return _read_logits(prediction, targets, mask, generator, check)


def score_sums(prediction: Prediction, params: list[Tensor]) -> list[Tensor | None]:
    """Return SCALE · Σ ∇ log p(y) / sqrt(count) for each parameter, None where it took no part.

    One backward pass that keeps the graph for the loss and leaves `.grad` alone.
    """
    return list(
        torch.autograd.grad(
            prediction.output,
            params,
            prediction.cotangent * SCALE,
            retain_graph=True,
            allow_unused=True,
        )
    )


def _read_logits(
    logits: Tensor,
    targets: Tensor | None,
    mask: Tensor | None,
    generator: torch.Generator | None,
    check: bool,
) -> Prediction:
    if not logits.is_floating_point() or logits.dim() < 2 or logits.numel() == 0:
        raise ValueError(
            "logits must be floating point of shape (N, C) or (N, ..., C) with N ≥ 1, "
            f"got {logits.dtype} {tuple(logits.shape)}{_SINGLE if logits.dim() == 1 else ''}"
        )
    if logits.shape[-1] < 2:
        raise ValueError(
            "logits need at least two classes in the last dimension, "
            f"got {tuple(logits.shape)}{_SINGLE}"
        )
    require_graph(logits)
    _require_mask(mask, logits.shape[:-1])
    # The largest logit of a row is finite unless one is NaN or +inf or all are -inf; single -inf
    # are how classes are ruled out.
    if check and not logits.detach().amax(dim=-1).isfinite().all():
        raise NotFiniteError(
            f"logits must be finite, or -inf for classes ruled out, got {_count_bad(logits)}"
        )
    if targets is None:
        labels = sample_labels(logits, generator)
    else:
        labels, mask = _read_targets(logits, targets, mask, check)

    probabilities = wide(logits.detach()).softmax(dim=-1)
    labels = labels.unsqueeze(-1)
    missed = 1.0 - probabilities.gather(-1, labels)
    scores = probabilities.neg_().scatter_(-1, labels, missed)  # hit - probabilities, in place
    cotangent, count = _normalise(scores, logits.shape[:-1], mask, check)
    return Prediction(logits, cotangent.to(logits.dtype), count)


def _read_targets(
    logits: Tensor, targets: Tensor, mask: Tensor | None, check: bool
) -> tuple[Tensor, Tensor]:
    if targets.shape != logits.shape[:-1] or targets.is_floating_point():
        raise ValueError(
            f"targets must be integer labels of shape {tuple(logits.shape[:-1])}, "
            f"got {targets.dtype} {tuple(targets.shape)}"
        )
    used = targets != _IGNORED
    labels = targets.masked_fill(~used, 0).long()
    if check and (labels.min() < 0 or labels.max() >= logits.shape[-1]):
        raise ValueError(
            f"targets must lie in [0, {logits.shape[-1]}) or be {_IGNORED}, "
            f"got {targets.min().item()} to {targets.max().item()}"
        )
    return labels, used if mask is None else used & mask


def _read_distribution(
    distribution: Distribution, targets: Tensor | None, mask: Tensor | None, check: bool
) -> Prediction:
    with torch.enable_grad():
        values = distribution.sample() if targets is None else targets
        log_prob = distribution.log_prob(values)
    if targets is not None and log_prob.shape != distribution.batch_shape:
        shape = tuple(distribution.batch_shape + distribution.event_shape)
        raise ValueError(f"targets must have shape {shape}, got {tuple(targets.shape)}")
    if log_prob.dim() < 1 or log_prob.numel() == 0:
        raise ValueError(
            f"the distribution needs a batch dimension, got batch_shape {tuple(log_prob.shape)}"
        )
    require_graph(log_prob)
    _require_mask(mask, log_prob.shape)
    if check and not torch.isfinite(log_prob).all():
        raise NotFiniteError(f"log-probabilities must be finite, got {_count_bad(log_prob)}")
    ones = torch.ones_like(log_prob).unsqueeze(-1)
    cotangent, count = _normalise(ones, log_prob.shape, mask, check)
    return Prediction(log_prob, cotangent.squeeze(-1), count)


def _normalise(
    cotangent: Tensor, positions: torch.Size, mask: Tensor | None, check: bool
) -> tuple[Tensor, int | Tensor]:
    """Drop masked positions and scale so that squares of sums are means over predictions."""
    if mask is None:
        count = positions.numel()
        return cotangent.mul_(count**-0.5), count
    cotangent.mul_(mask.unsqueeze(-1))
    if not check:
        kept = mask.sum()
        return cotangent.mul_(kept.clamp(min=1).to(cotangent.dtype).rsqrt()), kept
    count = int(mask.sum())
    return cotangent.mul_(max(count, 1) ** -0.5), count


def require_classes_last(
    logits: Tensor,
    targets: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    warn: Callable[[str, str], None],
) -> None:
    """Refuse logits whose classes are certainly in dimension 1, as `cross_entropy` takes them.

    They are where targets or mask fit without dimension 1 alone, and where images come straight
    from a convolution or lie in memory with dimension 1 innermost. Where they are likely there,
    `warn` is called with a topic and a message.
    """
    shape = tuple(logits.shape)
    if logits.dim() < 3:
        return
    others = {tuple(tensor.shape) for tensor in (targets, mask) if isinstance(tensor, Tensor)}
    tells = (shape[:-1] in others, shape[:1] + shape[2:] in others)
    if tells == (False, True) or (
        tells != (True, False)
        and logits.dim() > 3
        and (_is_from_image(logits) or _has_channels_last(logits))
    ):
        raise ValueError(f"logits of shape {shape} have their classes in dimension 1, {_LAST}")
    if not others and _suspect_classes_first(logits):
        warn(
            "classes first",
            f"logits of shape {shape} look like images, or a series, with the classes in "
            f"dimension 1, {_LAST}",
        )


def _suspect_classes_first(logits: Tensor) -> bool:
    """Return whether classes are likely in dimension 1, and not certainly.

    Three dimensions from a convolution are channels and time. Four or more, of which the last two
    are equal, are a square image, unless a layer or the user has just put them into their order.
    """
    if logits.dim() < 3:
        return False
    if logits.dim() == 3:
        return _is_from_image(logits)
    shape = logits.shape
    if shape[-1] != shape[-2] or shape[1] == shape[-1] or not logits.is_contiguous():
        return False
    return not any(name in _ORDERED for name in _makers(logits))


def _is_from_image(logits: Tensor) -> bool:
    """Whether it comes from an operation on images, which have their channels in dimension 1."""
    return any(word in name for name in _makers(logits) for word in _ON_IMAGES)


def _has_channels_last(logits: Tensor) -> bool:
    """Whether it is in torch's memory format for images with dimension 1 innermost."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = formats.get(logits.dim(), torch.contiguous_format)
    return not logits.is_contiguous() and logits.is_contiguous(memory_format=order)


def _makers(output: Tensor) -> list[str]:
    """Return the operations that gave an output its dimensions, by the names of their nodes."""
    found, waiting, looked = [], [output.grad_fn], 0
    while waiting and looked < _FEW:
        node, looked = waiting.pop(), looked + 1
        if node is None:
            continue
        if node.name().startswith(_KEEP_ORDER):
            waiting += [before for before, _ in node.next_functions]
        else:
            found.append(node.name())
    return found


def suspect_probabilities(logits: Tensor) -> bool:
    """Return whether rows are positive and sum to one, as what comes out of a softmax does."""
    rows = logits.detach()
    return bool(rows.numel() and (rows >= 0).all() and (rows.sum(-1) - 1).abs().max() < 1e-3)


def how_to_predict(output: object) -> str:
    """Return what to pass where a model returns something else than a prediction."""
    if isinstance(output, (tuple, list)):
        places = [place for place, each in enumerate(output) if isinstance(each, Tensor)]
        # With labels a model returns its loss first, a single number.
        place = next((place for place in places if output[place].dim()), 0)
        return f"pass predict=lambda batch: model(batch)[{place}], and inputs without labels"
    return "pass predict=, a function that makes one of them from a batch"


def require_graph(output: Tensor) -> None:
    """Refuse what no gradient can be taken of."""
    if not output.requires_grad:
        raise RuntimeError(
            "importance needs a prediction that still has its graph, got one that requires no "
            "gradient: compute it outside torch.no_grad(), and take it before any detach()"
        )


def _require_mask(mask: Tensor | None, positions: torch.Size) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != positions):
        raise ValueError(
            f"mask must be boolean of shape {tuple(positions)}, got {mask.dtype} "
            f"{tuple(mask.shape)}; an integer mask becomes boolean by .bool()"
        )


def _count_bad(values: Tensor) -> str:
    bad = values.numel() - int(torch.isfinite(values).sum())
    return f"{bad} NaN or infinite of {count_of(values.numel(), 'value')}"
