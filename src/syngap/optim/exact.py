"""Per-sample squared scores, by hooks on the forward pass that the training loop already made.

A forward hook notes each call of a known module on the autograd graph itself. `squared_scores`
walks that graph once, runs one backward pass of the labels' log-likelihood down to the first
modules (autograd computes no weight gradient there), and squares each sample's gradient as
the output gradients come by, one module at a time.

Train-mode BatchNorm makes every sample's score depend on every other. Here the statistics of the
batch are held constant in that backward pass: a sample's score is then its own, and the estimate
is the Fisher of the network as a function of its parameters with those statistics given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from syngap.optim.checks import is_compiled
from syngap.optim.per_sample import (
    Call,
    hold_statistics,
    is_readable,
    rule_of,
    uses_batch_statistics,
)
from syngap.optim.scores import SCALE, Prediction
from syngap.optim.tensors import wide

__all__ = ["CallRecorder", "squared_scores"]

_CASTS_AND_TRANSPOSES = {"TBackward0", "ToCopyBackward0"}


class CallRecorder:
    """A forward hook that notes the calls of known modules; it holds no tensor itself."""

    def __init__(self) -> None:
        self.enabled = True

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Hook every known module of `model` that is not hooked yet."""
        handles = []
        for module in model.modules():
            if is_compiled(module):
                raise ValueError(
                    "estimator='exact' cannot hook a compiled module; use estimator='sampled', or "
                    "train the model as it was before torch.compile"
                )
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    "estimator='exact' cannot hold the statistics of SyncBatchNorm constant; "
                    "use estimator='sampled'"
                )
            if rule_of(module) is not None and self not in module._forward_hooks.values():
                # Before other hooks, which may put something else in the place of the output.
                handles.append(module.register_forward_hook(self, prepend=True))
        return handles

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Leave a note on the node that made `output`."""
        if not (self.enabled and isinstance(output, Tensor) and output.grad_fn):
            return
        if not (args and isinstance(args[0], Tensor)):
            return
        entered = args[0].detach()
        used = {name: param for name, param in module._parameters.items() if param is not None}
        _notes(output.grad_fn)[self] = Call(
            module, used, entered, entered._version, output.output_nr, uses_batch_statistics(module)
        )


def squared_scores(
    prediction: Prediction, params: list[Tensor], recorder: CallRecorder
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return SCALE² Σ_n (∇ log p(y_n|x_n))² / count for each parameter, and who fell back.

    A parameter falls back where no single call of a known module accounts for all its uses: the
    module is unknown or was used twice, the weight is shared or used as a function's argument, or
    the module's input does not have the batch first. Those get the square of their summed score
    (see `scores`), which has the same expectation, from the same backward pass.
    """
    wanted = set(params)
    graph = _Graph(prediction.output, recorder)
    graph.refuse_unknown_batch_norm()
    covered = graph.covered(wanted, prediction.rows)
    fallback = [param for param in graph.leaves if param in wanted and param not in covered]

    if not covered and not fallback:
        return [None] * len(params), []

    nodes = {covered[param] for param in covered}
    lowest = graph.lowest(nodes)
    squares: dict[Tensor, Tensor] = {}

    def take(call: Call, grad: Tensor | None) -> None:
        rule = rule_of(call.module)
        assert rule is not None
        if grad is None:  # a function above let no gradient through
            return
        mine = {name: param for name, param in _read_by_rule(call).items() if param in covered}
        with torch.no_grad():
            for name, square in rule(call, wide(grad), set(mine)).items():
                squares[mine[name]] = square

    def take_arriving(call: Call, grads: tuple[Tensor | None, ...]) -> None:
        take(call, grads[call.output_nr])

    handles = []
    try:
        for node, call in graph.calls.items():
            if call.batch_statistics:
                handles.append(node.register_hook(hold_statistics(call)))
            if node in nodes and node not in lowest:
                handles.append(node.register_prehook(partial(take_arriving, call)))
        ends = [GradientEdge(node, graph.calls[node].output_nr) for node in lowest]
        # A lowest node is where the pass ends, so its gradient is returned and no hook runs.
        grads = torch.autograd.grad(
            prediction.output,
            cast(list[Tensor], [*ends, *fallback]),
            prediction.cotangent * SCALE,
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    for node, grad in zip(lowest, grads, strict=False):
        take(graph.calls[node], grad)
    for param, grad in zip(fallback, grads[len(lowest) :], strict=True):
        if grad is not None:
            squares[param] = wide(grad).square()
    graph.forget(recorder)
    return [squares.get(param) for param in params], fallback


class _Graph:
    """What lies below an output: the noted calls, the leaves and who uses them."""

    def __init__(self, output: Tensor, recorder: CallRecorder) -> None:
        self.calls: dict[Node, Call] = {}
        self.leaves: dict[Tensor, Node] = {}
        self._nodes = list(_children_first(get_gradient_edge(output).node))
        self._consumers: dict[Node, list[Node]] = defaultdict(list)
        for node in self._nodes:
            for child in _children(node):
                self._consumers[child].append(node)
            if (call := _notes(node).get(recorder)) is not None:
                self.calls[node] = call
            if (variable := getattr(node, "variable", None)) is not None:
                self.leaves[variable] = node

    def covered(self, wanted: set[Tensor], rows: int) -> dict[Tensor, Node]:
        """Map each parameter whose every use is one noted call to the node of that call."""
        claims: dict[Tensor, list[Node]] = defaultdict(list)
        for node, call in self.calls.items():
            for param in _read_by_rule(call).values():
                claims[param].append(node)
        return {
            param: nodes[0]
            for param, nodes in claims.items()
            if param in wanted
            and param in self.leaves
            and len(nodes) == 1
            and self._uses(param) == 1
            and is_readable(self.calls[nodes[0]], rows)
        }

    def _uses(self, leaf: Tensor) -> int:
        consumers = self._consumers[self.leaves[leaf]]
        while len(consumers) == 1 and consumers[0].name() in _CASTS_AND_TRANSPOSES:
            consumers = self._consumers[consumers[0]]
        return len(consumers)

    def lowest(self, nodes: set[Node]) -> list[Node]:
        """Those of `nodes` that have none of the others below them."""
        above: set[Node] = set()
        found = []
        for node in self._nodes:
            is_above = any(child in above or child in nodes for child in _children(node))
            if is_above:
                above.add(node)
            elif node in nodes:
                found.append(node)
        return found

    def refuse_unknown_batch_norm(self) -> None:
        """A subclass's or `functional.batch_norm` mixes samples, and nothing noted its statistics.

        Instance normalisation runs as one of a single row, and mixes none.
        """
        for node in self._nodes:
            if "BatchNorm" not in node.name() or node in self.calls:
                continue
            entered = getattr(node, "_saved_input", None)
            if getattr(node, "_saved_training", True) and (entered is None or len(entered) > 1):
                raise RuntimeError(
                    f"estimator='exact' met {node.name()} in train mode outside a BatchNorm module "
                    "it knows, and cannot hold its statistics constant; use estimator='sampled'"
                )

    def forget(self, recorder: CallRecorder) -> None:
        # The caller's loss keeps the graph, and with it the noted inputs, until the next step.
        for node in self.calls:
            del _notes(node)[recorder]


def _notes(node: Node) -> dict[object, Call]:
    """The dictionary that autograd keeps for a node as long as the node lives."""
    return cast(dict[object, Call], node.metadata)


def _read_by_rule(call: Call) -> dict[str, Tensor]:
    """The parameters that the rules know; pruning, for one, leaves others in their place."""
    return {name: call.params[name] for name in ("weight", "bias") if name in call.params}


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(root: Node) -> Iterator[Node]:
    seen = {root}
    stack = [(root, iter(_children(root)))]
    while stack:
        node, children = stack[-1]
        child = next((child for child in children if child not in seen), None)
        if child is None:
            stack.pop()
            yield node
        else:
            seen.add(child)
            stack.append((child, iter(_children(child))))
