"""The arguments that commands share: their types, names, help and checks."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from annotated_types import Ge, Le

from syngap.bench.options import Count, NonNegative, Says, check_value


class DataSet(str, Enum):
    """What `syngap data` can fetch."""

    cifar100 = "cifar100"
    core50 = "core50"


class EngineChoice(str, Enum):
    """Where runs are done."""

    local = "local"
    ray = "ray"


LISTS = ("SEEDS", "ROWS", "LOGGERS")  # the metavars of options that take several, with commas


Points = Annotated[int, Ge(2), Le(1001), Says("a whole number from 2 to 1001")]


def checked(kind: Any) -> Callable[[typer.CallbackParam, Any], Any]:
    """Return what checks an option by the rule for configurations: to be one of the type `kind`."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        return None if value is None else check_value(value, kind, param.opts[0])

    return check


Seeds = Annotated[
    str | None, typer.Option("--seeds", help="such as 0..4 or 0,3,7", metavar="SEEDS")
]
Methods = Annotated[
    str | None,
    typer.Option("--methods", help="rows of the experiment, such as er,syngap", metavar="ROWS"),
]
Workers = Annotated[
    str,
    typer.Option(
        "--workers",
        metavar="N",
        callback=checked(Literal["auto"] | Count),
        help="runs at a time; auto is as many as fit",
    ),
]
HungAfter = Annotated[
    float | None,
    typer.Option(
        "--hung-after",
        metavar="SECONDS",
        callback=checked(NonNegative),
        help="stop a run of which nothing is heard for so long; 1800 by default, 0 never",
    ),
]
Engine = Annotated[
    EngineChoice, typer.Option("--engine", help="processes of this machine, or a Ray cluster")
]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="of the Ray cluster; auto by default"),
]
Log = Annotated[
    str | None,
    typer.Option("--log", metavar="LOGGERS", help="also log to these: tensorboard,mlflow,wandb"),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="folder for the runs; runs/NAME by default")
]
Data = Annotated[Path | None, typer.Option("--data", help="folder the data are in")]
Fresh = Annotated[bool, typer.Option("--fresh", help="remove all earlier runs in the folder first")]
Results = Annotated[Path, typer.Option("--results", help="folder of results")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change the configuration, stream.epochs=2"),
]


Experiment = Annotated[
    str,
    typer.Argument(help="a YAML file, or an experiment that ships: `syngap doctor` lists them"),
]


def names_in(listed: str | None) -> list[str] | None:
    """Return the names in a list with commas, None where none was given."""
    return [name.strip() for name in listed.split(",")] if listed is not None else None


def seeds_in(listed: str | None) -> list[int] | None:
    """Return the seeds that "0..4" or "0,3,7" means, None where none were given."""
    from syngap.bench.config.values import seeds_of

    return seeds_of(listed) if listed is not None else None


def workers_in(given: str) -> int | None:
    """Return how many runs to do at a time, None for "auto"."""
    return None if given == "auto" else int(given)
