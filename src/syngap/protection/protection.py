"""Protect a model in one call: a gate along directions, and its former self as a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from syngap.messages import names_arguments
from syngap.optim import gate_changes
from syngap.optim.defaults import DEFAULTS
from syngap.optim.distributed import Group, find_group
from syngap.optim.errors import Notices
from syngap.optim.fisher import Estimator, Schedule
from syngap.optim.knowledge import Knowledge, Known, grow_knowledge, take_knowledge
from syngap.optim.moments import Rank, affordable_rank, are_on_gpu, basis_dtype
from syngap.optim.predictions import Predict, Progress, as_it_was
from syngap.optim.sharded import reshard
from syngap.optim.tensors import is_sharded
from syngap.optim.wrapped import WrappedSynGAP
from syngap.protection import anchors as known_inputs
from syngap.protection.captured import RUNS_PLAINLY
from syngap.protection.gradients import with_zero_gradient
from syngap.protection.hints import check_known, check_labels
from syngap.protection.participation import Participation
from syngap.protection.processes import raised_in_all, require_same, share_knowledge
from syngap.protection.refusals import (
    check_arguments,
    check_base,
    check_choices,
    check_classes,
    check_growth,
    check_knowledge,
    check_model,
    check_optimizer,
    check_share,
    explained_by,
    names_of,
    predicting,
    rotates,
)
from syngap.protection.report import Report, advice, compare, coverage
from syngap.protection.resuming import Optimizers
from syngap.protection.start import Start
from syngap.protection.teacher import Teacher

__all__ = ["Protection", "protect"]

CONSOLIDATION = 0.9  # with a teacher
CONSOLIDATION_ALONE = 0.999
AMBIENT = 0.01
DAMPING = 1e-16
ANCHORS = 16
SYMBOLS = {"tau": "consolidation", "epsilon": "ambient", "eps": "ambient"}
SYMBOLS |= dict.fromkeys(("alpha", "beta", "lam", "lamda", "lambda_", "weight"), "strength")


@names_arguments(SYMBOLS)
def protect(
    model: nn.Module,
    known: Any,
    *,
    gate: bool = True,
    teacher: bool = True,
    predict: Predict | None = None,
    consolidation: float | None = None,
    ambient: float = AMBIENT,
    rank: Rank | None = None,
    rotate: bool | None = None,
    batch_size: int = 16,
    anchors: int = ANCHORS,
    every: int | None = None,
    strength: float = 1.0,
    seed: int = 0,
    process_group: Group = "auto",
    progress: Progress | None = None,
) -> Protection:
    """Take what a model knows from inputs without labels, to keep it while it learns.

    The model, its parameters, buffers, modes and hooks stay as they are.

    Args:
        model: a trained model whose outputs are class logits; a wrapper of DDP is looked through.
        known: inputs like those that it knows: a tensor, a dict of tensors as a tokenizer returns,
            or a list of batches (a tuple is arguments, a dict keyword arguments, of which
            `attention_mask` marks padding). A few hundred do, without labels. `own_samples` makes
            some.
        gate: whether `optimizer` scales down updates along important directions.
        teacher: whether `loss` pulls the model to its former answers.
        predict: for a model with other outputs: computes logits or a distribution from a batch in
            place of `model(batch)`, in the same way at each call.
        consolidation: τ in (0, 1), how much updates shrink at mean importance. None is 0.9 with a
            teacher, whose `loss` does half of the work, and 0.999 without.
        ambient: ε in [0, 1), the share of an update that always remains.
        rank: "full" takes all directions of both sides of a weight. A number, or a share of all,
            takes the most important of its inputs. None chooses by memory.
        rotate: True lets the optimizer's own state (momentum, Adam's moments) live along directions
            too; it must work entry by entry, and needs complete bases. False filters its finished
            update. None is True for Adam and AdamW with complete bases, which learn faster so.
        batch_size: so many inputs at a time, to take importance; batches that are given stay whole.
        anchors: so many inputs a call of `loss`.
        every: `loss` is zero except at every k-th call, where it counts k times: 1 takes more time,
            and keeps a little more. None is 4 with gradients of more than 2 GiB, else 1 on a GPU
            and where former answers are stored whole, else 2.
        strength: what `loss` is multiplied with.
        seed: of the drawn labels and of the order of inputs in `loss`.
        process_group: the processes that train the model together, each of which calls this with
            the same arguments; "auto" is the model's group under DDP, else all, and None is none.
        progress: called after each batch with the number done and of all.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> protection = protect(model, torch.randn(64, 4))
        >>> optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        >>> for _ in range(5):
        ...     loss = protection.loss() + model(torch.randn(8, 4)).logsumexp(1).mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> protection.report().kl < 1
        True
    """
    group = find_group(process_group, model)
    with raised_in_all(group):
        check_choices({"gate": gate, "teacher": teacher}, rotate, seed, progress)
        if consolidation is None:
            consolidation = CONSOLIDATION if teacher else CONSOLIDATION_ALONE
        check_arguments(consolidation, ambient, strength, anchors, every, batch_size, rank)
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        check_model(model, gate)
        check_known(known)
        batches, taught = known_inputs.batches_of(known, batch_size, anchors)
        if predict is None:
            check_labels(model, batches[0])
        predict = predicting(model, predict, needs_kl=teacher)
    reshard(model)
    mark = known_inputs.fingerprint(taught, model.parameters())
    options: dict[str, Any] = {"consolidation": float(consolidation), "ambient": float(ambient)}
    same = options | {"gate": gate, "teacher": teacher, "rank": rank, "rotate": rotate}
    same |= {"known inputs or weights": mark, "batches": len(batches), "every": every}
    same |= {"strength": strength}
    require_same(same, group)
    # Forward passes of FSDP2 wait for all processes anyhow.
    is_whole = not any(is_sharded(param) for param in model.parameters())
    with raised_in_all(group if is_whole else None), explained_by(batches):
        protection = Protection(
            model,
            batches,
            taught,
            uses_gate=gate,
            uses_teacher=teacher,
            predict=predict,
            options=options | {"protection": mark},
            rank=rank,
            rotate=rotate,
            every=every,
            strength=strength,
            seed=seed,
            process_group=group,
            progress=progress,
        )
    share_knowledge(protection.known, group)
    protection.knowledge = Knowledge.of(protection.known, model)
    return protection


class Protection:
    """What `protect` returns: optimizer, the loss of the teacher, report, interpolation.

    Attributes:
        model: the model.
        known: what is known of its parameters, by parameter; empty without a gate.
        knowledge: the same, with their mean importance.
    """

    knowledge = Knowledge()

    def __init__(
        self,
        model: nn.Module,
        batches: list[Any],
        taught: list[Any],
        *,
        uses_gate: bool,
        uses_teacher: bool,
        predict: Predict,
        options: dict[str, Any],
        rank: Rank | None,
        rotate: bool | None,
        every: int | None,
        strength: float,
        seed: int,
        process_group: Group,
        progress: Progress | None,
    ) -> None:
        self.model, self._process_group = model, process_group
        self._options = options
        self._rotate, self._strength, self._seed = rotate, strength, seed
        self._uses_teacher, self._interpolated = uses_teacher, 1.0
        self._optimizers = Optimizers(options["protection"])
        self._participation = Participation()
        params: list[Tensor] = list(model.parameters())
        self._device = params[0].device
        self._start = Start(model)
        self.known: dict[Tensor, Known] = {}
        if uses_gate:
            trainable: list[Tensor] = [param for param in params if param.requires_grad]
            self.known = take_knowledge(
                model,
                [known_inputs.moved(batch, self._device) for batch in batches],
                rank=affordable_rank(trainable) if rank is None else rank,
                dtype=basis_dtype(trainable),
                mask_of=known_inputs.mask_of,
                predict=predict,
                generator=torch.Generator(self._device).manual_seed(seed),
                progress=progress,
            )
            check_knowledge(self.known, model)
        else:
            first = known_inputs.moved(batches[0], self._device)
            check_classes(model, first, predict, uses_teacher)
        self._teacher = Teacher(model, self._start, taught, predict)
        self._every = every or self._teacher.every
        self._notices, self._warns = Notices(), every is None and not self._teacher.stores

    def __repr__(self) -> str:
        """Return which parts protect which model."""
        parts = {"gate": bool(self.known), "teacher": self._uses_teacher}
        used = " and ".join(part for part in parts if parts[part]) or "interpolation alone"
        return f"<{type(self).__name__} of {type(self.model).__name__} by {used}; see report()>"

    # Training.

    def optimizer(self, base: Optimizer) -> Optimizer:
        """Return an optimizer that makes the updates of `base` through the gate.

        Learning rates, decay and momentum stay those of `base`, whose parameter groups are shared.
        Without a gate it is `base` itself, whose state then says how often `loss` was called.
        """
        check_base(base, bool(self.known))
        own_seed = self._seed if self._process_group is None else None
        record: dict[str, Any] = dict.fromkeys(("teacher_every", "teacher_strength"))
        if self._uses_teacher:
            record = {"teacher_every": self._every, "teacher_strength": float(self._strength)}
        record |= {"teacher_seed": own_seed, "drawn": self.calls}
        if self._uses_teacher:
            self._participation.remind(base, self._optimizers)
        self._participation.remind_of_start(base, self._optimizers, self._start, self.model)
        if not self.known:
            return self._optimizers.add_plain(base, record) if self._uses_teacher else base
        params = [param for group in base.param_groups for param in group["params"]]
        reshard(self.model)
        now: set[Tensor] = set(self.model.parameters())
        check_optimizer(params, self.known, now)
        options = {
            "retention": DEFAULTS.retention,  # for a loop that observes as well
            "damping": DAMPING,
            "scope": "network",
            "bounded": True,
            "rotated": rotates(self._rotate, base, self.known.values()),
        } | (self._options | record)
        is_whole = all(param in now for param in params)  # a loss may have parameters of its own
        named = self.model if is_whole else None
        estimator = Estimator("sampled", None, named, self._process_group)
        schedule, compact = Schedule(1, 0), are_on_gpu(params)
        made = WrappedSynGAP(base, estimator, schedule, compact, "raise", options)
        gate_changes.adopt(made.gate, self.knowledge)
        self._optimizers.add(made)
        self._participation.remind_of_steps(base, made)
        return made

    def loss(self) -> Tensor:
        """Return the KL from the model's former answers on a few known inputs, to be added.

        The model runs in eval mode, and under autocast where this is called so. Zero without a
        teacher, and at calls that `every` leaves out. On a GPU it may still be computed when this
        returns: use it before you change weights by hand. A call under torch.no_grad() does not
        count: the next one takes the same inputs.
        """
        number = self.calls
        self.calls = number + torch.is_grad_enabled()
        if self.known:
            self._participation.remind_of_gate(self.calls, self._optimizers)
        if not self._uses_teacher or (number + 1) % self._every:
            zero = torch.zeros((), device=self._device, requires_grad=torch.is_grad_enabled())
            alone = self._process_group is None or not self._uses_teacher
            return zero if alone else with_zero_gradient(zero, self.model)
        place = known_inputs.place_of(number // self._every, len(self._teacher.batches), self._seed)
        loss = self._teacher.loss(place, self._strength * self._every)
        if self._warns and self._every == 1 and self._teacher.runs_plainly:
            self._notices.warn("plain", RUNS_PLAINLY)
        return self._participation.watch(loss) if torch.is_grad_enabled() else loss

    @property
    def calls(self) -> int:
        """How often `loss` was called: where a resumed run goes on. An optimizer's state has it."""
        return self._optimizers.calls

    @calls.setter
    def calls(self, number: int) -> None:
        self._optimizers.calls = number

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
        names = names_of(self.model)
        check_growth(old, new, names, self._start.values, self.known)
        for optimizer in self._optimizers.gated():
            if any(old in set(group["params"]) for group in optimizer.param_groups):
                optimizer.grow(old, new)
        self._start.grow(names[new], old, new)
        known = self.known.pop(old, None)
        if known is not None:
            self.known[new] = grow_knowledge(known, old, new)
        self._teacher.may_grow = True

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse: a copy would ask the model that this was made of, not a copy of it."""
        raise TypeError("a Protection cannot be copied: copy the model, and protect() the copy")

    # Afterwards.

    @torch.no_grad()
    def report(self) -> Report:
        """Return what changed on the known inputs, and how the model is protected."""
        with as_it_was(self.model, None):
            kept = compare(self._teacher.comparisons(), self._teacher.width)
        reshard(self.model)
        steps = self._optimizers.steps
        taught = max(0, self.calls - self._every * self._participation.unused)
        used = (("gate", steps > 0), ("teacher", self._uses_teacher and taught > 0))
        parts = [name for name, is_used in used if is_used]
        if self._interpolated != 1.0:
            parts.append(f"interpolation ({self._interpolated:.0%} of the way kept)")
        moved = self._start.distance(self.model)
        made = (steps if self.known else None, taught if self._uses_teacher else None)
        return Report.of(
            kept,
            moved=moved,
            parts=tuple(parts),
            advice=tuple(advice(kept, moved, *made)),
            coverage=tuple(coverage(self.model, self.known) if self.known else ()),
        )

    @torch.no_grad()
    def interpolate(self, share: float) -> None:
        """Interpolate the weights with the start: start + share · (now - start), as in WiSE-FT.

        Args:
            share: in [0, 1], of the change that there is now; 1 changes nothing, 0 gives the start
                back, and 0.85 called twice keeps 72 %.
        """
        check_share(share)
        self._start.interpolate(self.model, share)
        self._interpolated *= share

    @contextmanager
    def interpolated(self, share: float) -> Iterator[None]:
        """Let the model have interpolated weights inside the block, to measure them.

        Afterwards it has the weights of before again, bit for bit.

        Args:
            share: as for `interpolate`.
        """
        before = self._interpolated
        with self._start.restored(self.model):
            self.interpolate(share)
            try:
                yield
            finally:
                self._interpolated = before
