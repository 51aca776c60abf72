"""Protect a model in one call: a gate along directions, and its former self as a teacher."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.optimizer import Optimizer

from syngap.optim.checks import check_number
from syngap.optim.consolidation import Predict, Progress, call, in_eval_mode
from syngap.optim.defaults import DEFAULTS
from syngap.optim.errors import NotFiniteError
from syngap.optim.fisher import Estimator, Schedule
from syngap.optim.moments import Known, Rank, take_knowledge
from syngap.optim.notices import Notices
from syngap.optim.state_transfer import basis_in, grown, require_growth
from syngap.optim.wrapped import WrappedSynGAP
from syngap.protection import anchors as known_inputs
from syngap.protection.report import Coverage, Report
from syngap.protection.teacher import Answers, divergence, former_classes, take_answers

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
    batch_size: int = 16,
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
    _check_choices({"gate": gate, "teacher": teacher}, rotate, seed)
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    if not isinstance(model, nn.Module):
        raise TypeError(f"protect() takes a torch.nn.Module, got {type(model).__name__}")
    if not any(True for _ in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameters, so there is nothing to protect"
        )
    batches = known_inputs.batches_of(known, batch_size)
    is_cut = isinstance(known, (Tensor, Mapping))
    taught = known_inputs.cut([known] if is_cut else batches, anchors)
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


def _check_choices(switches: dict[str, Any], rotate: Any, seed: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    if rotate is not None and not isinstance(rotate, bool):
        raise ValueError(f"rotate must be True, False or None, got {rotate!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}")


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
        self._drawn, self._has_grown = 0, False
        params: list[Tensor] = list(model.parameters())
        self._device = params[0].device
        self._start = _copies(_floats(model))
        self.known: dict[Tensor, Known] = {}
        if uses_gate:
            trainable = [param for param in params if param.requires_grad]
            self.known = take_knowledge(
                model,
                [known_inputs.moved(batch, self._device) for batch in batches],
                rank=_affordable(trainable) if rank is None else rank,
                dtype=_basis_dtype(trainable),
                mask_of=known_inputs.mask_of,
                predict=predict,
                generator=torch.Generator(self._device).manual_seed(seed),
                progress=progress,
            )
            _check_knowledge(self.known, model)
        self._answers = list(self._take_answers())
        self._fingerprint = known_inputs.fingerprint(taught, params)

    # Training.

    def optimizer(self, base: Optimizer) -> Optimizer:
        """Return an optimizer that makes the updates of `base` through the gate.

        Learning rates, decay and momentum stay those of `base`, whose parameter groups are shared.
        Without a gate it is `base` itself.
        """
        if not isinstance(base, Optimizer):
            raise TypeError(
                "optimizer() takes an optimizer that holds parameters, such as "
                f"torch.optim.AdamW(model.parameters()), got {base!r}"
            )
        if not self.known:
            return base
        params = [param for group in base.param_groups for param in group["params"]]
        if not any(param in self.known for param in params):
            raise ValueError(
                "the optimizer holds no parameter that protect() saw: make it after the model is "
                "whole, and protect the model that it trains"
            )
        now = set(self.model.parameters())
        for param in params:
            if param in self.known and param not in now:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that the model "
                    "no longer has: make the optimizer anew, and call protection.grow(old, new) "
                    "for one that grew"
                )
        bases = [known.basis for known in self.known.values() if known.basis is not None]
        complete = all(basis.is_complete for basis in bases)
        rotate = self._rotate
        if rotate is None:
            rotate = complete and isinstance(base, (torch.optim.Adam, torch.optim.AdamW))
        elif rotate and not complete:
            raise ValueError('rotate=True needs complete bases: leave it out, or pass rank="full"')
        options = {
            "retention": DEFAULTS.retention,  # for a loop that observes as well
            "consolidation": self._options["consolidation"],
            "damping": DAMPING,
            "ambient": self._options["ambient"],
            "scope": "network",
            "bounded": True,
            "rotated": rotate,
            "protection": self._fingerprint,
            "drawn": self._drawn,
        }
        is_whole = all(param in now for param in params)  # a loss may have parameters of its own
        estimator = Estimator("sampled", None, self.model if is_whole else None, "auto")
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
        number = self._calls()
        self._drawn = number + 1
        if self._optimizer is not None:
            self._optimizer.param_groups[0]["drawn"] = self._drawn
        if not self._uses_teacher or (number + 1) % self._every:
            return torch.zeros((), device=self._device)
        place = self._place(number // self._every)
        with in_eval_mode(self.model), torch.enable_grad():
            prediction = self._predicted(self._taught[place])
        before = self._answers[place]
        return self._strength * divergence(before, prediction, may_grow=self._has_grown)

    def _calls(self) -> int:
        """Return how often `loss` was called; the optimizer's state has it, if there is one."""
        if self._optimizer is None:
            return self._drawn
        return int(self._optimizer.param_groups[0]["drawn"])

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

    def _take_answers(self) -> Iterable[Answers]:
        with in_eval_mode(self.model), torch.no_grad():
            for batch in self._taught:
                prediction = self._predicted(batch)
                yield take_answers(prediction, known_inputs.mask_of(batch, prediction))

    @torch.no_grad()
    def grow(self, old: Tensor, new: Tensor) -> None:
        """Let `new` take the place of `old`, a smaller parameter whose entries it begins with.

        For a head that gains rows, after it is in the model. What is known of the old entries
        stays; new ones are free to learn, and start where they are now. The optimizer, if there is
        one, grows too. `loss` and `report` from then on compare the former classes alone.

        Args:
            old: a parameter that the model had.
            new: the one that the model has in its place, at least as large in every dimension.

        Examples:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> protection = protect(model, torch.randn(64, 4))
            >>> optimizer = protection.optimizer(torch.optim.AdamW(model.parameters()))
            >>> old, new = model[2], nn.Linear(8, 3)
            >>> with torch.no_grad():
            ...     _ = new.weight[:2].copy_(old.weight), new.bias[:2].copy_(old.bias)
            >>> model[2] = new
            >>> protection.grow(old.weight, new.weight)
            >>> protection.grow(old.bias, new.bias)
            >>> bool(protection.loss() < 1e-6)
            True
        """
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            raise TypeError(
                "grow takes two parameters, such as old.weight and new.weight, got "
                f"{type(old).__name__} and {type(new).__name__}"
            )
        require_growth(old, new, [])
        names = _names(self.model)
        if new not in names:
            raise ValueError(
                f"new {tuple(new.shape)} is not a parameter of the model; put it there before "
                "grow()"
            )
        start = self._start.get(names[new])
        is_other = bool(self.known) and old.requires_grad and old not in self.known
        if start is None or start.shape != old.shape or old in names or is_other:
            raise ValueError(
                f"old {tuple(old.shape)} is not what the model had in place of {names[new]}: pass "
                "the parameter that was there, once"
            )
        if self._optimizer is not None:
            held = {each for group in self._optimizer.param_groups for each in group["params"]}
            if old in held:
                self._optimizer.grow(old, new)
        larger = new.detach().to("cpu", copy=True)
        larger[tuple(slice(size) for size in old.shape)] = start
        self._start[names[new]] = larger
        known = self.known.pop(old, None)
        if known is not None:
            self.known[new] = _grown_knowledge(known, old, new)
        self._has_grown = True

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
                kl += count * float(divergence(before, prediction, may_grow=self._has_grown))
                entropy += count * float(before.entropy())
                first = before.first()
                if first is None or not isinstance(prediction, Tensor):
                    has_classes = False
                    continue
                if self._has_grown:
                    former = former_classes(before, prediction)
                    assert isinstance(former, Tensor)
                    prediction = former
                hits = prediction.argmax(-1) == first.to(prediction.device)
                if before.mask is not None:
                    hits = hits & before.mask.to(hits.device)
                same += float(hits.sum())
        used = (("gate", bool(self.known)), ("teacher", self._uses_teacher and self._calls() > 0))
        parts = [name for name, is_used in used if is_used]
        if self._interpolated != 1.0:
            parts.append(f"interpolation ({self._interpolated:.0%} of the way kept)")
        total = max(1.0, total)
        return Report(
            kl=kl / total,
            loss_before=entropy / total,
            loss_now=(entropy + kl) / total,
            agreement=same / total if has_classes else None,
            moved=self._moved(),
            parts=tuple(parts),
            coverage=tuple(self._coverage()),
        )

    def _moved(self) -> float:
        """Return how far weights are from the start, by their norm; new ones do not count."""
        way = norm = 0.0
        for name, param in self.model.named_parameters():
            start = self._start.get(name)
            if start is not None and start.shape == param.shape:
                start = start.to(param.device)
                way += float((param - start).float().norm()) ** 2
                norm += float(start.float().norm()) ** 2
        return float((way / max(norm, 1e-30)) ** 0.5)

    def _coverage(self) -> Iterable[Coverage]:
        for name, param in self.model.named_parameters():
            known = self.known.get(param)
            if not param.requires_grad:
                yield Coverage(name, "frozen", param.numel())
                continue
            if known is None or not known.mean > 0:
                yield Coverage(name, "new", param.numel())
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
        values = _floats(self.model)
        shapes, before = (
            {name: tuple(value.shape) for name, value in each.items()}
            for each in (values, self._start)
        )
        if shapes != before:
            other = sorted(shapes.items() ^ before.items())[0]
            raise ValueError(
                f"the model has other parameters than at protect(), such as {other[0]} "
                f"{other[1]}: for one that grew, call protection.grow(old, new)"
            )
        for name, value in values.items():
            value.copy_(torch.lerp(self._start[name].to(value), value, share))
        self._interpolated *= share


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {param: name for name, param in model.named_parameters()}


def _floats(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and those buffers that are averages, by name."""
    buffers = model.named_buffers()
    return dict(model.named_parameters()) | {n: b for n, b in buffers if b.is_floating_point()}


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the memory of the CPU: they are needed once, after training."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _grown_knowledge(known: Known, old: Tensor, new: Tensor) -> Known:
    left, right = (None, None) if known.basis is None else (known.basis.left, known.basis.right)
    sides = {"left": left, "right": right}
    state = {name: side for name, side in sides.items() if side is not None}
    larger = grown({"importance": known.importance, "mean": known.mean, **state}, old, new)
    return Known(larger["importance"], larger["mean"], basis_in(larger), known.rows)


def _check_knowledge(known: dict[Tensor, Known], model: nn.Module) -> None:
    """Refuse an importance that is not finite, or zero everywhere; warn of too few inputs."""
    names = _names(model)
    means = torch.stack([one.mean.double().cpu() for one in known.values()])
    bad = [names[p] for p, mean in zip(known, means.tolist(), strict=True) if not mean < math.inf]
    if bad:
        raise NotFiniteError(
            f"the importance of {', '.join(bad[:3])} is not finite: look at the inputs, and in "
            "float16 load the model in bfloat16 or float32"
        )
    if not means.any():
        half = any(param.dtype.itemsize < 4 for param in known)
        raise ValueError(
            "the importance of every parameter is zero: "
            + (
                "gradients vanish in half precision, so load the model in float32"
                if half
                else "predictions do not depend on the parameters, or are certain; look at what "
                "the model predicts for known inputs"
            )
        )
    _warn_of_few(known, names, _inputs_sides(model))


def _inputs_sides(model: nn.Module) -> dict[Tensor, int | None]:
    """Return the side of weights that inputs are on, where their layer is known."""
    sides: dict[Tensor, int | None] = {}
    for kinds, side in (((nn.Embedding,), None), ((nn.Linear, nn.Conv1d, nn.Conv2d), 1)):
        sides |= {each.weight: side for each in model.modules() if isinstance(each, kinds)}
    return sides


def _warn_of_few(
    known: dict[Tensor, Known], names: dict[Tensor, str], sides: dict[Tensor, int | None]
) -> None:
    """Warn where a layer saw fewer rows than it has inputs: some directions have no importance."""
    few = []
    for param, one in known.items():
        if one.basis is None or not one.rows:
            continue
        given = (one.basis.left, one.basis.right)
        sizes = [None if side is None else side.shape[-2] for side in given]
        if param in sides:
            place = sides[param]
            inputs = None if place is None else sizes[place]  # an embedding has none
        else:
            inputs = min(size for size in sizes if size is not None)
        if inputs is not None and one.rows < inputs:
            few.append((one.rows / inputs, names[param], one.rows, inputs))
    if few:
        _, name, rows, inputs = min(few)
        more = f" ({len(few) - 1} more layers have too few as well)" if len(few) > 1 else ""
        Notices().warn(
            "few",
            f"known inputs gave {rows} rows (samples, or their tokens or places) to {name}, which "
            f"has {inputs} inputs{more}: directions that no row has are not protected, so pass "
            "more inputs",
        )


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
