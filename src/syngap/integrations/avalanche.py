"""SynGAP in Avalanche 0.6: a plugin for any supervised strategy, and a strategy with replay.

Before each experience Avalanche adapts the model, whose classifier may grow, and then the optimizer
(`make_optimizer`). In the course of that it drops the state of parameters that were replaced, and
the first time of all: the plugin notes what there is beforehand and puts it back. Evaluation adapts
the model too, and leaves the optimizer with parameters of the past: the plugin lets it follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

from packaging.version import Version
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.optim import GatedOptimizer, SynGAP

# Before it is imported: an old one beside today's packages fails at that, and does not say why.
if Version(version("avalanche-lib")) < Version("0.6"):
    raise ImportError(
        f"syngap.integrations.avalanche needs Avalanche 0.6 or later, found "
        f"{version('avalanche-lib')}: pip install 'avalanche-lib>=0.6'"
    )

from avalanche.training.plugins import ReplayPlugin, SupervisedPlugin
from avalanche.training.templates import SupervisedTemplate

__all__ = ["SynGAPPlugin", "SynGAPReplay"]

Predict: TypeAlias = Callable[[Any], Tensor | Distribution]
States: TypeAlias = dict[Tensor, dict[str, Any]]


class _Noted(NamedTuple):
    """What an optimizer knew of a model's parameters."""

    params: dict[str, Tensor]
    state: States  # the optimizer's own dictionary, which a reset replaces
    states: list[States]  # copies of it and of those behind the gate


class SynGAPPlugin(SupervisedPlugin):
    """Lets the strategy's SynGAP optimizer observe each batch, and keep what it knows.

    Importance stays with its parameter through `make_optimizer`, also where the parameter grew: old
    entries keep theirs, new ones are free. `strategy.train(..., reset_optimizer_state=True)` resets
    momentum, and importance stays. With the optimizer, importance is in Avalanche's checkpoints.

    Args:
        predict: returns what is to be observed, logits or a distribution, from the strategy before
            its backward pass; None is `strategy.mb_output`.

    Examples:
        >>> from avalanche.training.supervised import Naive
        >>> model = nn.Linear(4, 3)
        >>> strategy = Naive(
        ...     model=model,
        ...     optimizer=SynGAP(model.parameters(), lr=0.3),
        ...     plugins=[SynGAPPlugin()],
        ... )
        >>> for experience in benchmark.train_stream:  # doctest: +SKIP
        ...     strategy.train(experience)
    """

    def __init__(self, predict: Predict | None = None) -> None:
        super().__init__()
        self.predict = predict or _output
        self._noted: _Noted | None = None

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Observe the batch, replayed samples and all."""
        _optimizer_of(strategy).observe(self.predict(strategy), targets=strategy.mb_y)

    # Around what adapts the model and its optimizer.

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Note what the optimizer knows: the last call before the model is adapted."""
        self._note(strategy)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Put it back."""
        self._put_back(strategy)

    def before_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Note what the optimizer knows, as evaluation adapts the model too."""
        self._note(strategy)

    def after_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Let the optimizer follow the model, and put back what it knew."""
        strategy.make_optimizer()
        self._put_back(strategy)

    def _note(self, strategy: Any) -> None:
        optimizer = _optimizer_of(strategy)
        params = strategy.optimized_param_id or dict(strategy.model.named_parameters())
        self._noted = _Noted(params, optimizer.state, optimizer.snapshot())
        if strategy.optimized_param_id is None:
            # Let Avalanche note the names too. Left to itself it does so later, resets the state,
            # and takes a head that grew in an evaluation for one more head.
            strategy.make_optimizer()

    def _put_back(self, strategy: Any) -> None:
        assert self._noted is not None
        (params, state, before), self._noted = self._noted, None
        optimizer = _optimizer_of(strategy)
        now = dict(strategy.model.named_parameters())
        replaced = [(old, now[name]) for name, old in params.items() if name in now]
        optimizer.inherit(before, replaced, momentum=optimizer.state is state)
        names = {param: name for name, param in now.items()}
        for group in optimizer.param_groups:
            if "param_names" in group:  # Avalanche adds parameters, and leaves this list as it is
                added = group["params"][len(group["param_names"]) :]
                group["param_names"] += [names[param] for param in added]


class SynGAPReplay(SupervisedTemplate):
    """Experience replay with SynGAP, in one line.

    It is `Replay` of Avalanche with a SynGAP optimizer and the plugin. To put the gate before
    another optimizer, or to combine it with another strategy, write that out:

        Replay(model=model, optimizer=SynGAP.wrap(AdamW(...)), plugins=[SynGAPPlugin()], ...)

    Args:
        model: the model, which may grow.
        lr: η ≥ 0.
        mem_size: how many samples are kept for replay.
        gate: further options of `SynGAP`, such as `{"consolidation": 0.5}`.
        plugins: further plugins.
        **kwargs: what SupervisedTemplate takes, such as `train_mb_size` and `device`.

    Examples:
        >>> strategy = SynGAPReplay(model=nn.Linear(4, 3), lr=0.3, mem_size=50, train_mb_size=10)
        >>> for experience in benchmark.train_stream:  # doctest: +SKIP
        ...     strategy.train(experience)
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        lr: float | Tensor,
        mem_size: int = 200,
        gate: Mapping[str, Any] | None = None,
        plugins: Sequence[SupervisedPlugin] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model=model,
            optimizer=SynGAP(model.parameters(), lr, **{"model": model, **(gate or {})}),
            plugins=[SynGAPPlugin(), ReplayPlugin(mem_size), *(plugins or [])],
            **kwargs,
        )


def _optimizer_of(strategy: Any) -> GatedOptimizer:
    optimizer = strategy.optimizer
    if not isinstance(optimizer, GatedOptimizer):
        raise TypeError(
            f"SynGAPPlugin needs a strategy whose optimizer is SynGAP(model.parameters(), lr=...) "
            f"or SynGAP.wrap(...), got {type(optimizer).__name__}"
        )
    return optimizer


def _output(strategy: Any) -> Tensor | Distribution:
    output = strategy.mb_output
    if not isinstance(output, Tensor | Distribution):
        raise TypeError(
            f"SynGAP observes logits or a distribution, and {type(strategy.model).__name__} "
            f"returned a {type(output).__name__}: take them out of it by "
            "SynGAPPlugin(predict=lambda strategy: strategy.mb_output[...])"
        )
    return output
