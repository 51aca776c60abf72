"""An experiment: read from YAML, completed by defaults, checked. An error names the option.

    name: digits
    stream: {name: digits, epochs: 2, batch: 8}
    model: {name: mlp, hidden: [100]}
    training: {evaluate_every: 10}
    methods: {er: {lr: 0.3, buffer: 50}, er_slow: {method: er, lr: 0.03, buffer: 50}}
    seeds: [0, 1, 2]

A key of `methods` names a row of the table and is the method's name, unless `method` says another.
What `search` may hold is in search.py; runs do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from syngap.bench import methods, models, streams
from syngap.bench.config.added_rows import check_rows, complete_rows
from syngap.bench.config.component import Component
from syngap.bench.config.reading import FORMAT, BoundedLoader, check_format, text_in
from syngap.bench.config.run_config import RunConfig, Training
from syngap.bench.config.search import Search
from syngap.bench.config.values import (
    EXPERIMENT,
    METHODS,
    mapping_of,
    method_of,
    name_of,
    options_of,
    part_of,
    seeds_in,
    seeds_of,
)
from syngap.bench.errors import UserError
from syngap.bench.finetuning.methods import registry as finetuning_methods
from syngap.bench.finetuning.model_tasks import TASKS, task_in
from syngap.bench.options import checked, defaults, named, shown, signature
from syngap.bench.streams import Stream
from syngap.messages import nearest

__all__ = [
    "FORMAT",
    "Experiment",
    "Training",
    "complete_method",
    "complete_run",
    "is_shipped",
    "parse_yaml",
    "read",
    "seeds_of",
    "shipped",
    "with_earlier_defaults",
    "with_settings",
]

_KEYS = ("name", "stream", "model", "training", "methods", "seeds", "search")


@dataclass(frozen=True)
class Experiment:
    """A complete, checked experiment: every option of everything is there."""

    name: str
    stream: Component
    model: Component
    training: Training
    methods: dict[str, Component]
    seeds: list[int] = field(default_factory=lambda: [0])
    search: Search | None = None

    def __post_init__(self) -> None:
        seeds_in(self.seeds)

    @classmethod
    def from_mapping(cls, raw: Any) -> Experiment:
        """Return the experiment that a YAML file describes; UserError where it cannot be one."""
        raw = mapping_of(raw, "the configuration", EXPERIMENT)
        check_format(raw, "the configuration")
        for key in raw:
            if key not in (*_KEYS, "format"):
                hint = nearest(str(key), _KEYS) or f"; there are {', '.join(_KEYS)}"
                raise UserError(f"{named(key)}: unknown option{hint}")
        for key in ("stream", "model", "methods"):
            if not raw.get(key):
                raise UserError(
                    f"{key}: missing; a configuration needs stream, model and methods, such as "
                    f"{EXPERIMENT}"
                )
        rows = mapping_of(raw["methods"], "methods", METHODS)
        experiment = cls(
            name=name_of(raw.get("name", "experiment"), "name"),
            stream=part_of(raw["stream"], "stream", streams.registry.names(), streams.options),
            model=part_of(
                raw["model"],
                "model",
                models.registry.names(),
                lambda name: signature(models.registry.get(name)),
            ),
            training=Training(
                **checked(
                    options_of(raw.get("training"), "training", "{device: cpu}"),
                    signature(Training),
                    "training",
                )
            ),
            methods={
                name_of(row, "methods"): method_of(row, options) for row, options in rows.items()
            },
            seeds=seeds_in(raw.get("seeds", [0])),
        )
        if raw.get("search") is None:
            return experiment
        search = Search.from_mapping(
            raw["search"],
            stream=experiment.stream,
            methods=experiment.methods,
            seeds=experiment.seeds,
        )
        return replace(experiment, search=search)

    def select(self, rows: Sequence[str] | None, seeds: Sequence[int] | None) -> Experiment:
        """Return the part of the experiment with these rows and seeds; None is all."""
        for row in rows or ():
            if row not in self.methods:
                hint = (
                    nearest(row.lower(), self.methods) or f"; there are {', '.join(self.methods)}"
                )
                if row in methods.registry.names():
                    hint = f"; the experiment has no such row: --set methods.{row}={{}} adds it"
                raise UserError(f"methods: unknown {shown(row)}{hint}")
        if self.search and (shared := self.search.shared(seeds or ())):
            raise UserError(
                f"--seeds: {shared} of the experiment's search, which would flatter the result; "
                "give others"
            )
        chosen = {row: self.methods[row] for row in self.methods if rows is None or row in rows}
        return replace(
            self,
            methods=chosen,
            seeds=list(seeds) if seeds is not None else self.seeds,
            search=self.search.of(chosen) if self.search else None,
        )

    def as_mapping(self) -> dict[str, Any]:
        """Return what `from_mapping` makes the same experiment of."""
        rows = {
            row: {"method": method.name, **method.options} for row, method in self.methods.items()
        }
        mapping = {
            "format": FORMAT,
            "name": self.name,
            "stream": self.stream.as_mapping(),
            "model": self.model.as_mapping(),
            "training": self.training.as_mapping(),
            "methods": rows,
            "seeds": self.seeds,
        }
        return {**mapping, "search": self.search.as_mapping()} if self.search else mapping

    def runs(self) -> list[RunConfig]:
        """Return the configuration of every run, rows within seeds.

        So whatever else the machine is busy with falls on all rows, and their times compare.
        """
        return [
            RunConfig(self.name, row, seed, self.stream, self.model, self.training, method)
            for seed in self.seeds
            for row, method in self.methods.items()
        ]


def with_earlier_defaults(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier version wrote, with the defaults that it had.

    Last batches were short, steps were not captured, `cnn` had no norms, and importance that was
    refreshed seldom was so from the first step on.
    """
    then = dict(written)
    if task_in(written):  # fine-tuning: it had no other defaults yet
        return then
    if isinstance(model := written.get("model"), dict) and model.get("name") == "cnn":
        then["model"] = {"norm": "none", **model}
    for part, name, value in (("stream", "remainder", "short"), ("training", "captured", False)):
        if isinstance(options := written.get(part), dict):
            then[part] = {name: value, **options}
    rows = written.get("methods")
    if isinstance(rows, dict):
        then["methods"] = {
            row: _with_earlier_warmup(options, "method", row) for row, options in rows.items()
        }
    if "method" in written:
        then["method"] = _with_earlier_warmup(written["method"], "name")
    return then


def _with_earlier_warmup(options: Any, key: str, row: str = "") -> Any:
    """Add `warmup: 0` to a method that has such an option; others may have an `every`, too."""
    if isinstance(options, dict) and options.get("every", 1) != 1:
        method = options.get(key, row)
        if isinstance(method, str) and "warmup" in complete_method({"name": method}):
            return {"warmup": 0, **options}
    return options


def complete_run(run: Mapping[str, Any], like: RunConfig) -> dict[str, Any]:
    """Return the configuration `run` with the options that are newer than it, at their defaults.

    So a new option, whose default leaves everything as it was, makes no earlier run useless.

    Args:
        run: what a run's folder says.
        like: a run of this version with the same stream, model and method.
    """
    added = {
        "stream": defaults(streams.registry.get(like.stream.name)) | defaults(Stream),
        "model": defaults(models.registry.get(like.model.name)),
        "training": defaults(Training),
        "method": defaults(methods.registry.get(like.method.name)),
    }
    complete = {**with_earlier_defaults(run), "format": FORMAT}
    for part, options in added.items():
        if isinstance(complete.get(part), dict):
            complete[part] = {**options, **complete[part]}
    return complete


def complete_setting(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stream and the model of a run, with newer options at their defaults.

    Runs with the same ones can be compared. A stream or model whose package is not installed here
    keeps its options.
    """
    then = with_earlier_defaults({part: run.get(part) or {} for part in ("stream", "model")})
    for part, known in (("stream", streams.registry), ("model", models.registry)):
        try:
            added = defaults(known.get(str(then[part].get("name"))))
        except UserError:
            added = {}
        then[part] = {**added, **(defaults(Stream) if part == "stream" else {}), **then[part]}
    return then


def complete_method(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's options, `name` among them, with newer options at their defaults.

    A method whose package is not installed here keeps its options. The order is that of `options`,
    so that a label does not depend on what is installed.
    """
    try:
        known = defaults(methods.registry.get(options["name"]))
    except UserError:
        known = {}
    return {**options, **{name: value for name, value in known.items() if name not in options}}


def read(name_or_file: str) -> dict[str, Any]:
    """Return the raw configuration from a YAML file, or of an experiment that ships."""
    path = Path(name_or_file)
    if path.suffix in (".yaml", ".yml"):
        try:
            text = text_in(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({_reason(error)})") from error
    else:
        text = _shipped_text(name_or_file)
    return mapping_of(parse_yaml(text, str(path)), str(path), EXPERIMENT)


def shipped(kind: Literal["stream", "finetuning"] = "stream") -> list[str]:
    """Return the names of the experiments of a kind that come with the package."""
    entries = _shipped_folder(kind).iterdir()
    return sorted(entry.name[:-5] for entry in entries if entry.name.endswith(".yaml"))


def is_shipped(name: str) -> bool:
    """Return whether an experiment of this name comes with the package."""
    return name in (*shipped("stream"), *shipped("finetuning"))


def _shipped_folder(kind: Literal["stream", "finetuning"]) -> Any:
    folder = files("syngap.bench.config") / "shipped"
    return folder if kind == "stream" else folder / kind


def _shipped_text(name: str) -> str:
    kinds: tuple[Literal["stream"], Literal["finetuning"]] = ("stream", "finetuning")
    for kind in kinds:
        if name in shipped(kind):
            return str((_shipped_folder(kind) / f"{name}.yaml").read_text(encoding="utf-8"))
    if name and Path(name).exists():
        kind_of = "folder" if Path(name).is_dir() else "file"
        raise UserError(
            f"{shown(name)}: is a {kind_of}; expected a .yaml file, or the name of an experiment "
            "that ships, which syngap doctor lists"
        )
    known = [name for kind in kinds for name in shipped(kind)]
    hint = nearest(name, known) or f"; there are {', '.join(known)}, or give a .yaml file"
    raise UserError(f"unknown experiment {shown(name)}{hint}")


def with_settings(
    raw: Mapping[str, Any],
    settings: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return `raw` with every "a.b.c=value" of `settings` put in; values are YAML.

    Args:
        raw: what a YAML file holds.
        settings: the changes.
        say: gets a line for each row that they add: where its options come from.

    Examples:
        >>> with_settings({"methods": {"er": None}}, ["methods.er.lr=0.3"])
        {'methods': {'er': {'lr': 0.3}}}
    """
    changed = dict(raw)
    rows_set: list[str] = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not all(path.split(".")):
            raise UserError(
                f"--set: got {shown(setting)}, expected key=value, such as stream.epochs=2"
            )
        *parents, last = path.split(".")
        if parents[:1] == ["methods"]:
            rows_set.append([*parents, last][1])
        place = changed
        for depth, key in enumerate(parents):
            inner = place.get(key)
            if depth == 0 and key in ("stream", *TASKS, "model") and isinstance(inner, str):
                inner = {"name": inner}
            inner_key = named([*parents, last][depth + 1])
            place[key] = dict(
                options_of(inner, named(".".join(parents[: depth + 1])), f"{{{inner_key}: …}}")
            )
            place = place[key]
        place[last] = parse_yaml(text, f"--set {named(path)}")
    if "methods" in changed:
        registry = finetuning_methods if task_in(raw) else methods.registry
        rows = mapping_of(changed["methods"], "methods", METHODS)
        before = raw.get("methods")
        check_rows(rows, before, registry.names())

        def options_of_method(name: str) -> Collection[str]:
            return signature(registry.get(name)) if name in registry.names() else ()

        changed["methods"] = complete_rows(rows, before, rows_set, say, options_of_method)
    return changed


def parse_yaml(text: str, where: str) -> Any:
    """Return the YAML in `text`; UserError where it is none."""
    try:
        return yaml.load(text, _Strict)  # a safe loader
    except Exception as error:  # "!!timestamp x" and its like raise anything
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise UserError(f"{where}{line}: not YAML ({' '.join(str(problem).split())})") from error


class _Strict(BoundedLoader):
    """YAML in which a key that stands twice is a mistake, not a value that is lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is there twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return node


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
