"""The base class of methods: a constructor, a loss, and hooks around the step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from syngap.bench.methods.learner import Learner
from syngap.bench.methods.states import restore, snapshot
from syngap.bench.streams.stream import Batch, Presentation

__all__ = ["Method"]


class Method:
    """A learning method: it sees batches in their order and never a task boundary.

    A subclass sets `optimizer` in its constructor, whose keyword-only arguments are its options,
    and returns in `loss` what the optimizer minimizes. Every attribute (tensors, numbers,
    generators, lists and dictionaries of them, anything with a `state_dict`) is part of a
    checkpoint without further work.

    Examples:
        A method in one file:

        >>> import torch
        >>> from syngap.bench.options import Positive
        >>> class Plain(Method):
        ...     def __init__(self, learner: Learner, *, lr: Positive = 0.1) -> None:
        ...         super().__init__(learner)
        ...         self.optimizer = torch.optim.SGD(learner.parameters(), lr=lr)
        >>> method = Plain(Learner(torch.nn.Linear(2, 3), lambda x, generator: x))
        >>> method.step(Batch(torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
    """

    optimizer: Optimizer
    sees: Presentation = "one task after another"

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch; gradients are zero when it is called."""
        return cross_entropy(self.learner.predict(batch.x), batch.y)

    def objective(self, batch: Batch) -> Tensor:
        """Return the loss plus the terms that shared options add."""
        return self.loss(batch)

    def step(self, batch: Batch) -> None:
        """Learn from one batch, then call `after_step`."""
        self.learn(batch)
        self.after_step()

    def learn(self, batch: Batch) -> None:
        """Learn from one batch. On a GPU this may be captured once and replayed from then on."""
        self.optimizer.zero_grad()
        self.backward(self.objective(batch))
        self.adjust()
        self.optimizer.step()
        self.learner.follow(batch.y)
        self.remember(batch)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss; raise if it or they are not finite.

        A method with a `learn` of its own calls this before it changes anything.
        """
        self.learner.guard.check_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.learner.guard.check_gradients(self.learner.parameters)

    def adjust(self) -> None:
        """Change the gradients before the optimizer's step."""

    def undo(self) -> None:
        """Discard what an unfinished `learn` left behind."""
        self.optimizer.zero_grad()

    def after_step(self) -> None:
        """Count steps and do periodic work; never captured in a CUDA graph."""

    def remember(self, batch: Batch) -> None:
        """Store what the method needs of the batch that it just learned."""

    def phase(self) -> Hashable:
        """Return a key of what the next `learn` does, if steps differ."""
        return None

    def must_run_eagerly(self) -> bool:
        """Return whether the next `learn` must not be captured or replayed."""
        return False

    def count_replay(self) -> None:
        """Count a `learn` that a CUDA graph replayed, as `learn` itself would."""

    def finite_tensors(self) -> Iterable[Tensor]:
        """Yield the tensors that must stay finite: network and optimizer state."""
        yield from self.learner.finite_tensors()
        for state in self.optimizer.state_dict()["state"].values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def summary(self) -> dict[str, float]:
        """Return numbers to log about the method itself."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state: every attribute, by its name."""
        return {name: snapshot(value, name) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a method made with the same options."""
        if set(state) != set(vars(self)):
            odd = sorted(set(state) ^ set(vars(self)))
            raise ValueError(f"a state of another method: {', '.join(odd)} on one side only")
        for name, value in vars(self).items():
            setattr(self, name, restore(value, state[name], self.learner.device))
