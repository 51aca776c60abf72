"""What a method is: a constructor, a loss, and where it must its own step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from syngap.bench.methods.learner import Learner
from syngap.bench.methods.states import restored, snapshot
from syngap.bench.streams.stream import Batch, Presentation

__all__ = ["Method"]


class Method:
    """Learns from batches as they come; of tasks it is never told.

    A subclass sets `optimizer` in its constructor, whose keyword-only arguments are its options,
    and says in `loss` what is to become small. Whatever it keeps as an attribute (tensors, numbers,
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
        """Return what is to become small; gradients are zero when it is called."""
        return cross_entropy(self.learner.predict(batch.x), batch.y)

    def objective(self, batch: Batch) -> Tensor:
        """Return the loss, and what options that methods share add to it."""
        return self.loss(batch)

    def step(self, batch: Batch) -> None:
        """Learn from one batch, then do what comes between two."""
        self.learn(batch)
        self.between()

    def learn(self, batch: Batch) -> None:
        """Learn from one batch. On a GPU this may be captured once and replayed from then on."""
        self.optimizer.zero_grad()
        self.backward(self.objective(batch))
        self.adjust()
        self.optimizer.step()
        self.learner.follow()
        self.remember(batch)

    def backward(self, loss: Tensor) -> None:
        """Leave the gradients of a loss, and stop where they or it are not finite.

        A method with a `learn` of its own calls this before it changes anything.
        """
        self.learner.guard.saw(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.learner.guard.saw_gradients(self.learner.parameters)

    def adjust(self) -> None:
        """Change the gradients, where a method does, before the optimizer's step."""

    def undo(self) -> None:
        """Forget what a `learn` began that did not come to its step."""
        self.optimizer.zero_grad()

    def between(self) -> None:
        """Do what is done now and then, and count; always run as it stands."""

    def remember(self, batch: Batch) -> None:
        """Keep what is worth keeping of a batch that was just learned."""

    def phase(self) -> Hashable:
        """Return what the next `learn` does, where that is not the same at every step."""
        return None

    def replayed(self) -> None:
        """Count, as `learn` would have counted: it was replayed."""

    def lasting(self) -> Iterable[Tensor]:
        """Return what must stay finite: the network, and what the optimizer keeps of it."""
        yield from self.learner.lasting()
        for state in self.optimizer.state_dict()["state"].values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def summary(self) -> dict[str, float]:
        """Return numbers to log about the method itself."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return all that learning changes: every attribute, by its name."""
        return {name: snapshot(value, name) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, in a method made with the same options."""
        if set(state) != set(vars(self)):
            odd = sorted(set(state) ^ set(vars(self)))
            raise ValueError(f"a state of another method: {', '.join(odd)} on one side only")
        for name, value in vars(self).items():
            setattr(self, name, restored(value, state[name], self.learner.device))
