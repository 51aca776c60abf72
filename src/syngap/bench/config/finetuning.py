"""An experiment that compares fine-tuning methods: read from YAML, completed, checked.

    name: finetune-demo
    texts: {name: python, new: rot13}
    model: {name: byte, width: 64, layers: 2, heads: 2, context: 64, pretrain: 300}
    anchors: {source: own, count: 32}
    training: {steps: 60, batch: 8}
    methods: {adamw: {lr: [0.001, 0.003]}, ewc: {lr: 0.003, strength: [10.0, 100.0]}}
    seeds: [0, 1]

`texts` in place of `stream` says that it is one, of language models; `pairs` is one of encoders and
`images` one of classifiers. An option with a list of values is tried with each
of them; a method's trials are all combinations, and every method has as many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Le, MinLen

from syngap.bench.config.component import Component, Value
from syngap.bench.config.experiment import Experiment
from syngap.bench.config.reading import FORMAT, check_format
from syngap.bench.config.run_config import RunConfig
from syngap.bench.config.values import (
    EXPERIMENT,
    METHODS,
    mapping_of,
    method_and_options,
    name_of,
    options_of,
    part_of,
    seeds_in,
)
from syngap.bench.errors import UserError
from syngap.bench.finetuning import methods
from syngap.bench.finetuning.model_tasks import TASKS, ModelTask, task_in
from syngap.bench.finetuning.setting import Anchors, Precision
from syngap.bench.options import (
    Count,
    Natural,
    NonNegative,
    Says,
    Share,
    check_value,
    checked,
    defaults,
    named,
    shown,
    signature,
)
from syngap.messages import nearest

__all__ = [
    "AnyExperiment",
    "AnyRunConfig",
    "FinetuningExperiment",
    "FinetuningRun",
    "FinetuningTraining",
    "check_equal_trials",
    "parse_experiment",
]

Shares: TypeAlias = Annotated[
    tuple[Share, ...], MinLen(1), Says("a list of numbers between 0 and 1")
]
_KEYS = ("model", "anchors", "training", "methods", "seeds")


@dataclass(frozen=True, kw_only=True)
class FinetuningTraining:
    """The options of `training`.

    Args:
        steps: of every trial.
        batch: windows, pairs or images a step.
        warmup: steps in which the learning rate rises.
        evaluations: how many, evenly spread over the steps.
        shares: of the way from the start to the trained weights, at which each is evaluated
            (WiSE-FT); 1 is the weights as trained.
        windows: of each half of a test text; pairs, or at most so many images.
        device: "auto" is the GPU where there is one.
        precision: "fp32", or "bf16" for the forward pass.
        threads: CPU threads of a run, on which its last bits depend.
        deterministic: on a GPU, take kernels that add in the same order each time.
        compiled: let torch.compile compile the blocks of the model, for each shape by itself:
            batches of encoders have many.
        checkpoint_seconds: at least so long between checkpoints.
    """

    steps: Count = 400
    batch: Count = 32
    warmup: Natural = 20
    evaluations: Count = 4
    shares: Shares = (1.0, 0.85, 0.7, 0.5)
    windows: Count = 128
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision = "fp32"
    threads: Annotated[int, Ge(1), Le(1024), Says("a whole number from 1 to 1024")] = 1
    deterministic: bool = False
    compiled: bool = False
    checkpoint_seconds: NonNegative = 60.0

    def __post_init__(self) -> None:
        if self.shares[0] != 1 or sorted(set(self.shares), reverse=True) != list(self.shares):
            raise UserError(
                f"training.shares: got {shown(self.shares)}, expected 1 and then smaller numbers"
            )

    def as_mapping(self) -> dict[str, Value]:
        """Return the options as files hold them."""
        return {**asdict(self), "shares": list(self.shares)}

    def on_device(self, device: str) -> FinetuningTraining:
        """Return the same options with another device."""
        return FinetuningTraining(**{**asdict(self), "device": device})


@dataclass(frozen=True)
class FinetuningRun:
    """One trial of a method with one seed.

    Args:
        experiment: its name.
        family: the row of the table that the trial belongs to.
        row: the trial: the family, and the values that are its own.
        seed: of everything that is random.
        task: "texts", "pairs" or "images".
        source: what is learned and kept.
        model: what is tuned.
        anchors: by which methods remember what it knows.
        training: how long, and how it is evaluated.
        method: with the options of this trial.
    """

    experiment: str
    family: str
    row: str
    seed: int
    task: str
    source: Component
    model: Component
    anchors: Anchors
    training: FinetuningTraining
    method: Component

    @property
    def name(self) -> str:
        """ROW-SEED, the name of the run's folder."""
        return f"{self.row}-{self.seed}"

    def on_device(self, device: str) -> FinetuningRun:
        """Return the same run on another device."""
        return replace(self, training=self.training.on_device(device))

    def as_mapping(self) -> dict[str, Value]:
        """Return what config.yaml holds."""
        return {
            "format": FORMAT,
            "experiment": self.experiment,
            "family": self.family,
            "row": self.row,
            "seed": self.seed,
            self.task: self.source.as_mapping(),
            "model": self.model.as_mapping(),
            "anchors": asdict(self.anchors),
            "training": self.training.as_mapping(),
            "method": self.method.as_mapping(),
        }

    def complete(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a run's folder says, with newer options at their defaults."""
        task = TASKS[self.task]
        added = {
            self.task: defaults(task.sources.get(self.source.name)),
            "model": defaults(task.models.get(self.model.name)),
            "anchors": asdict(Anchors()),
            "training": FinetuningTraining().as_mapping(),
            "method": defaults(methods.registry.get(self.method.name)),
        }
        complete = {**recorded, "format": FORMAT}
        for part, options in added.items():
            if isinstance(complete.get(part), dict):
                complete[part] = {**options, **complete[part]}
        return complete


@dataclass(frozen=True)
class FinetuningExperiment:
    """A complete, checked experiment; a list among a method's options is tried value by value."""

    name: str
    task: str
    source: Component
    model: Component
    anchors: Anchors
    training: FinetuningTraining
    methods: dict[str, Component]
    seeds: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def from_mapping(cls, raw: Any) -> FinetuningExperiment:
        """Return the experiment that a YAML file describes; UserError where it cannot be one."""
        raw = mapping_of(raw, "the configuration", EXPERIMENT)
        check_format(raw, "the configuration")
        task = task_in(raw) or TASKS["texts"]
        keys = ("name", task.key, *_KEYS)
        for key in raw:
            if key not in (*keys, "format"):
                hint = nearest(str(key), keys) or f"; there are {', '.join(keys)}"
                raise UserError(f"{named(key)}: unknown option{hint}")
        for key in (task.key, "model", "methods"):
            if not raw.get(key):
                raise UserError(
                    f"{key}: missing; a configuration needs {task.key}, model and methods"
                )
        rows = mapping_of(raw["methods"], "methods", METHODS)
        return cls(
            name=name_of(raw.get("name", "experiment"), "name"),
            task=task.key,
            source=_part(raw[task.key], task.key, task.sources),
            model=_part(raw["model"], "model", task.models),
            anchors=_anchors(raw.get("anchors"), task),
            training=_options(FinetuningTraining, raw.get("training"), "training"),
            methods={name_of(row, "methods"): _method(row, rows[row], task) for row in rows},
            seeds=seeds_in(raw.get("seeds", [0])),
        )

    def select(
        self, rows: Sequence[str] | None, seeds: Sequence[int] | None
    ) -> FinetuningExperiment:
        """Return the part of the experiment with these rows and seeds; None is all.

        Rows that are compared must have as many trials; those that are left out need not.
        """
        for row in rows or ():
            if row not in self.methods:
                hint = nearest(row, self.methods) or f"; there are {', '.join(self.methods)}"
                if row in methods.registry.names():
                    hint = f"; the experiment has no such row: --set methods.{row}={{}} adds it"
                raise UserError(f"methods: unknown {shown(row)}{hint}")
        chosen = {row: self.methods[row] for row in self.methods if rows is None or row in rows}
        check_equal_trials(chosen)
        return replace(self, methods=chosen, seeds=list(seeds) if seeds is not None else self.seeds)

    def as_mapping(self) -> dict[str, Any]:
        """Return what `from_mapping` makes the same experiment of."""
        return {
            "format": FORMAT,
            "name": self.name,
            self.task: self.source.as_mapping(),
            "model": self.model.as_mapping(),
            "anchors": asdict(self.anchors),
            "training": self.training.as_mapping(),
            "methods": {
                row: {"method": method.name, **method.options}
                for row, method in self.methods.items()
            },
            "seeds": self.seeds,
        }

    def runs(self) -> list[FinetuningRun]:
        """Return the configuration of every run, rows within seeds."""
        return [
            FinetuningRun(
                self.name,
                family,
                row,
                seed,
                self.task,
                self.source,
                self.model,
                self.anchors,
                self.training,
                method,
            )
            for seed in self.seeds
            for family, whole in self.methods.items()
            for row, method in trials(family, whole).items()
        ]


AnyExperiment: TypeAlias = Experiment | FinetuningExperiment
AnyRunConfig: TypeAlias = RunConfig | FinetuningRun


def parse_experiment(raw: Any) -> AnyExperiment:
    """Return the experiment that a YAML file describes, of whichever kind it is."""
    is_finetuning = isinstance(raw, dict) and task_in(raw) is not None
    return (FinetuningExperiment if is_finetuning else Experiment).from_mapping(raw)


def trials(family: str, method: Component) -> dict[str, Component]:
    """Return a method's trials by name: all combinations of the values of its lists.

    Examples:
        >>> found = trials("ewc", Component("ewc", {"lr": [0.1, 0.3], "strength": 1.0}))
        >>> list(found), found["ewc.lr0.3"].options
        (['ewc.lr0.1', 'ewc.lr0.3'], {'lr': 0.3, 'strength': 1.0})
    """
    axes = {name: value for name, value in method.options.items() if isinstance(value, list)}
    found = {}
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        row = ".".join([family, *(f"{name}{_short(value)}" for name, value in chosen.items())])
        found[row] = method.with_options(chosen)
    return found


def _short(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _part(raw: Any, path: str, registry: Any) -> Component:
    return part_of(raw, path, registry.names(), lambda name: signature(registry.get(name)))


def _options(kind: Any, raw: Any, path: str) -> Any:
    return kind(**checked(options_of(raw, path, "{device: cpu}"), signature(kind), path))


def _anchors(raw: Any, task: ModelTask) -> Anchors:
    options = {
        "source": task.anchors[0],
        **options_of(raw, "anchors", f"{{source: {task.anchors[0]}}}"),
    }
    anchors: Anchors = _options(Anchors, options, "anchors")
    if anchors.source not in task.anchors:
        raise UserError(
            f"anchors.source: got {shown(anchors.source)}, and with {task.key} there is "
            f"{' or '.join(map(shown, task.anchors))}"
        )
    return anchors


def _method(row: Any, raw: Any, task: ModelTask) -> Component:
    """Return the method of a row, complete, each value of a list checked by itself."""
    name, kind, raw = method_and_options(row, raw, methods.registry)
    allowed = signature(kind)
    if reason := getattr(kind, "refused", {}).get(task.key):
        raise UserError(f"methods.{row}: {reason}; leave it out where there are {task.key}")
    lists = {option: values for option, values in raw.items() if isinstance(values, list)}
    first = {option: values[0] for option, values in lists.items() if values}
    options = checked({**raw, **first}, allowed, f"methods.{row}")
    for option, values in lists.items():
        path = f"methods.{row}.{option}"
        found = [check_value(value, allowed[option][0], path) for value in values]
        if len({_short(value) for value in found}) < len(found):
            raise UserError(f"{path}: got {shown(values)}, expected different values")
        name_of(f"x{''.join(map(_short, found))}"[:99], path)
        options[option] = found
    return Component(name, options)


def check_equal_trials(rows: Mapping[str, Component]) -> None:
    """Refuse rows with different numbers of trials: more trials are an advantage."""
    counts = {row: len(trials(row, method)) for row, method in rows.items()}
    first = next(iter(counts))
    for row, count in counts.items():
        if count != counts[first]:
            raise UserError(
                f"methods.{row}: number of trials is {count}, but {counts[first]} for {first}. "
                "A comparison needs as many trials for each method. Give both as many values "
                f"(--set methods.{row}.lr=[0.001, 0.003, 0.01]), or choose rows with --methods"
            )
