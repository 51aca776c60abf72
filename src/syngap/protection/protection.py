"""Protect a model in one call: a gate along directions, and its former self as a teacher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.optimizer import Optimizer

from syngap.optim.checks import check_number
from syngap.optim.consolidation import Predict, Progress, call, in_eval_mode
from syngap.optim.fisher import Estimator, Schedule
from syngap.optim.knowledge import Known, take_knowledge
from syngap.optim.moments import Rank
from syngap.optim.wrapped import WrappedSynGAP
from syngap.protection import anchors as known_inputs
from syngap.protection.report import Coverage, Report
from syngap.protection.teacher import Answers, divergence, take_answers

__all__ = ["Protection", "protect"]

CONSOLIDATION = 0.999
AMBIENT = 0.01
DAMPING = 1e-16
_FULL_BYTES = 8.0  # a parameter: complete bases that need more give way to some directions
_SHARE = 0.25  # of the inputs' directions, where complete bases are too large


def protect(
    model: nn.Module,
    known: Any,
    *,
    gate: bool = True,
    teacher: bool = True,
    predict: Predict | None = None,
    consolidation: float = CONSOLIDATION,
    ambient: float = AMBIENT,
    rank: Rank | None = None,
    rotate: bool | None = None,
    batch_size: int = 8,
    anchors: int = 8,
    every: int = 1,
    strength: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Protection:
    """Take what a model knows from inputs without labels, to keep it while it learns.

    The model, its parameters, buffers, modes and hooks stay as they are.

    Args:
        model: a model that was trained; a wrapper of DDP is looked through.
        known: inputs like those that it knows: a tensor, a dict of tensors as a tokenizer returns,
            or a list of batches (a tuple is arguments, a dict keyword arguments, of which
            `attention_mask` marks padding). A few hundred do. `own_samples` makes some.
        gate: whether `optimizer` scales down updates along important directions.
        teacher: whether `loss` pulls the model to its former answers.
        predict: computes logits or a distribution from a batch in place of `model(batch)`.
        consolidation: τ in (0, 1), how much updates shrink at mean importance.
        ambient: ε ≥ 0, the share of an update that always remains.
        rank: "full" takes all directions of both sides of a weight. A number, or a share of all,
            takes the most important of its inputs. None chooses by memory.
        rotate: True lets the optimizer's own state (momentum, Adam's moments) live along directions
            too; it must work entry by entry, and needs complete bases. False filters its finished
            update. None is True for Adam and AdamW with complete bases.
        batch_size: so many inputs at a time, to take importance; batches that are given stay whole.
        anchors: so many inputs a call of `loss`.
        every: `loss` is zero but at every k-th call.
        strength: what `loss` is multiplied with.
        seed: of the drawn labels and of the order of inputs in `loss`.
        progress: called after each batch with the number done and of all.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> protection = protect(model, torch.randn(64, 4))
        >>> optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        >>> for _ in range(5):
        ...     loss = model(torch.randn(8, 4)).logsumexp(1).mean() + protection.loss()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> protection.report().kl < 1
        True
    """
    _check(consolidation, ambient, strength, anchors, every, batch_size, rank)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    batches = known_inputs.batches_of(known, batch_size)
    taught = known_inputs.cut(batches, anchors)
    return Protection(
        model,
        batches,
        taught,
        uses_gate=gate,
        uses_teacher=teacher,
        predict=predict,
        options={"consolidation": float(consolidation), "ambient": float(ambient)},
        rank=rank,
        rotate=rotate,
        every=every,
        strength=strength,
        seed=seed,
        progress=progress,
    )


def _check(
    consolidation: float,
    ambient: float,
    strength: float,
    anchors: int,
    every: int,
    batch_size: int,
    rank: Rank | None,
) -> None:
    check_number("consolidation", consolidation, "in (0, 1)", lambda value: 0 < value < 1)
    check_number("ambient", ambient, "in [0, 1)", lambda value: 0 <= value < 1)
    check_number("strength", strength, "above 0", lambda value: 0 < value < 1e30)
    for name, value in (("anchors", anchors), ("every", every), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number ≥ 1, got {value!r}")
    is_share = isinstance(rank, float) and 0 < rank <= 1
    is_count = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
    if not (rank in (None, "full") or is_share or is_count):
        raise ValueError(
            f'rank must be "full", a whole number ≥ 1 or a share in (0, 1], got {rank!r}'
        )


class Protection:
    """What `protect` returns: the optimizer, the teacher's loss, the report, the way back.

    Attributes:
        model: the model.
        known: what is known of its parameters, by parameter; empty without a gate.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: list[Any],
        taught: list[Any],
        *,
        uses_gate: bool,
        uses_teacher: bool,
        predict: Predict | None,
        options: dict[str, float],
        rank: Rank | None,
        rotate: bool | None,
        every: int,
        strength: float,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.model = model
        self._predict, self._taught, self._options = predict, taught, options
        self._rotate, self._every, self._strength, self._seed = rotate, every, strength, seed
        self._uses_teacher, self._interpolated = uses_teacher, 1.0
        self._optimizer: WrappedSynGAP | None = None
        self._drawn = 0
        params = list(model.parameters())
        self._device = params[0].device if params else torch.device("cpu")
        self._start = _copies([*params, *_float_buffers(model)])
        self.known: dict[Tensor, Known] = {}
        self._answers: list[Answers] = []
        if uses_gate:
            trainable: list[Tensor] = [param for param in params if param.requires_grad]
            self.known = take_knowledge(
                model,
                [known_inputs.moved(batch, self._device) for batch in batches],
                rank=_affordable(trainable) if rank is None else rank,
                dtype=_basis_dtype(trainable),
                mask_of=known_inputs.mask_of,
                predict=predict,
                generator=torch.Generator(self._device).manual_seed(seed),
                progress=progress,
                look=lambda number, prediction: self._keep_answers(batches[number], prediction),
            )
        if len(self._answers) < len(taught):  # no gate, or predictions that cannot be cut
            self._answers = list(self._take_answers())
        self._fingerprint = known_inputs.fingerprint(taught, params)

    # Training.

    def optimizer(self, base: Optimizer) -> Optimizer:
        """Return an optimizer that makes the updates of `base` through the gate.

        Learning rates, decay and momentum stay those of `base`, whose parameter groups are shared.
        Without a gate it is `base` itself.
        """
        if not self.known:
            return base
        if not isinstance(base, Optimizer):
            raise TypeError(
                "optimizer() takes an optimizer that holds parameters, such as "
                f"torch.optim.AdamW(model.parameters()), got {base!r}"
            )
        params = [param for group in base.param_groups for param in group["params"]]
        if not any(param in self.known for param in params):
            raise ValueError(
                "the optimizer holds no parameter that protect() saw: make it after the model is "
                "whole, and protect the model that it trains"
            )
        bases = [known.basis for known in self.known.values() if known.basis is not None]
        complete = all(basis.is_complete for basis in bases)
        rotate = self._rotate
        if rotate is None:
            rotate = complete and isinstance(base, (torch.optim.Adam, torch.optim.AdamW))
        elif rotate and not complete:
            raise ValueError('rotate=True needs complete bases: leave it out, or pass rank="full"')
        options = {
            "retention": 0.0,
            "consolidation": self._options["consolidation"],
            "damping": DAMPING,
            "ambient": self._options["ambient"],
            "scope": "network",
            "bounded": True,
            "rotated": rotate,
            "protection": self._fingerprint,
            "drawn": self._drawn,
        }
        estimator = Estimator("sampled", None, self.model, "auto")
        compact = all(param.is_cuda and param.dtype != torch.float64 for param in params)
        made = WrappedSynGAP(base, estimator, Schedule(1, 0), compact, "raise", options)
        made.gate.adopt(self.known)
        self._optimizer = made
        return made

    def loss(self) -> Tensor:
        """Return the KL from the model's former answers on a few known inputs, to be added.

        The model runs in eval mode, and under autocast where this is called so. Zero without a
        teacher, and at calls that `every` leaves out.
        """
        group = None if self._optimizer is None else self._optimizer.param_groups[0]
        number = self._drawn if group is None else int(group["drawn"])
        self._drawn = number + 1
        if group is not None:
            group["drawn"] = self._drawn
        if not self._uses_teacher or (number + 1) % self._every:
            return torch.zeros((), device=self._device)
        place = self._place(number // self._every)
        with in_eval_mode(self.model), torch.enable_grad():
            prediction = self._predicted(self._taught[place])
        return self._strength * divergence(self._answers[place], prediction)

    def _place(self, number: int) -> int:
        """Return which inputs the n-th call takes: all in an order of their own, again and again.

        It follows from the number alone, so that a resumed run goes on as the first would have.
        """
        rounds, place = divmod(number, len(self._taught))
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * rounds)
        return int(torch.randperm(len(self._taught), generator=generator)[place])

    def _predicted(self, batch: Any) -> Tensor | Distribution:
        batch = known_inputs.moved(batch, next(self.model.parameters()).device)
        return self._predict(batch) if self._predict else call(self.model, batch)

    def _keep_answers(self, batch: Any, prediction: Tensor | Distribution) -> None:
        """Take the answers of the parts that a batch is cut into from its prediction."""
        if not isinstance(prediction, Tensor) or known_inputs.length(batch) != len(prediction):
            return
        done = 0
        while done < len(prediction):
            part = self._taught[len(self._answers)]
            rows = prediction[done : done + (known_inputs.length(part) or len(prediction))]
            self._answers.append(take_answers(rows, known_inputs.mask_of(part, rows)))
            done += len(rows)

    def _take_answers(self) -> Iterable[Answers]:
        with in_eval_mode(self.model), torch.no_grad():
            for batch in self._taught:
                prediction = self._predicted(batch)
                yield take_answers(prediction, known_inputs.mask_of(batch, prediction))

    # Afterwards.

    @torch.no_grad()
    def report(self) -> Report:
        """Return what changed on the known inputs, and how the model is protected."""
        total = kl = entropy = same = 0.0
        has_classes = True
        with in_eval_mode(self.model):
            for batch, before in zip(self._taught, self._answers, strict=True):
                prediction, count = self._predicted(batch), before.count
                total += count
                kl += count * float(divergence(before, prediction))
                entropy += count * float(before.entropy())
                first = before.first()
                if first is None or not isinstance(prediction, Tensor):
                    has_classes = False
                    continue
                hits = prediction.argmax(-1) == first.to(prediction.device)
                same += float(hits.sum() if before.mask is None else (hits & before.mask).sum())
        now = [param.detach() for param in self.model.parameters()]
        steps = [(p - s.to(p)).float().norm() for p, s in zip(now, self._start, strict=False)]
        norm = torch.stack([s.float().norm() for s in self._start[: len(now)]]).norm()
        used = (("gate", bool(self.known)), ("teacher", self._uses_teacher and self._drawn > 0))
        parts = [name for name, is_used in used if is_used]
        if self._interpolated != 1.0:
            parts.append(f"interpolation ({self._interpolated:.0%} of the way kept)")
        total = max(1.0, total)
        return Report(
            kl=kl / total,
            loss_before=entropy / total,
            loss_now=(entropy + kl) / total,
            agreement=same / total if has_classes else None,
            moved=float(torch.stack(steps).norm().cpu() / norm.cpu().clamp(min=1e-30)),
            parts=tuple(parts),
            coverage=tuple(self._coverage()),
        )

    def _coverage(self) -> Iterable[Coverage]:
        for name, param in self.model.named_parameters():
            known = self.known.get(param)
            if known is None:
                how = "new" if param.requires_grad else "frozen"
                yield Coverage(name, how, param.numel())
                continue
            if known.basis is None:
                yield Coverage(name, "entries", param.numel())
                continue
            left, right = (
                None if side is None else int(side.shape[-1])
                for side in (known.basis.left, known.basis.right)
            )
            yield Coverage(name, "directions", param.numel(), (left, right))

    @torch.no_grad()
    def interpolate(self, share: float) -> None:
        """Bring the weights part of the way back: start + share · (now - start), as in WiSE-FT.

        Args:
            share: in [0, 1]; 1 changes nothing, 0 gives the start back.
        """
        check_number("share", share, "in [0, 1]", lambda value: 0 <= value <= 1)
        values = [*self.model.parameters(), *_float_buffers(self.model)]
        if [value.shape for value in values] != [start.shape for start in self._start]:
            raise ValueError(
                "the model has other parameters than at protect(): for one that grew, call "
                "protection.grow(old, new)"
            )
        for value, start in zip(values, self._start, strict=True):
            value.copy_(torch.lerp(start.to(value), value, share))
        self._interpolated *= share


def _float_buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies in the memory of the CPU: they are needed once, after training."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _basis_dtype(params: list[Tensor]) -> torch.dtype | None:
    """Return what directions are kept in: on a GPU bfloat16, a third of a per cent off."""
    on_gpu = all(param.is_cuda and param.dtype != torch.float64 for param in params)
    return torch.bfloat16 if params and on_gpu else None


def _affordable(params: list[Tensor]) -> Rank:
    """Return "full" where complete bases are small beside what training needs anyway."""
    size = 2 if _basis_dtype(params) is not None else 4
    matrices = [param.flatten(1).shape for param in params if param.dim() >= 2]
    numbers = sum(side**2 for shape in matrices for side in shape if side <= 8192)
    total = sum(param.numel() for param in params)
    return "full" if size * numbers <= _FULL_BYTES * total else _SHARE
