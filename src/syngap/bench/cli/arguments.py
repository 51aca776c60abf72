"""The arguments that commands share: their types, names, help and checks."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from annotated_types import Ge, Le
from typer.core import TyperCommand, TyperOption

from syngap.bench.errors import UserError
from syngap.bench.options import Count, NonNegative, Says, check_value, shown
from syngap.messages import count_of


class DataSet(str, Enum):
    """What `syngap data` can fetch."""

    cifar100 = "cifar100"
    core50 = "core50"


class EngineChoice(str, Enum):
    """Where runs are done."""

    local = "local"
    ray = "ray"


LISTS = ("SEEDS", "ROWS", "LOGGERS")  # the metavars of options that take several, with commas


class Command(TyperCommand):
    """A command that refuses an option with one value that is there twice: the last would win."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, and before that once with every value of each option."""
        collecting = copy(self)
        collecting.params = [copy(param) for param in self.params]
        options = [param for param in collecting.params if isinstance(param, TyperOption)]
        single = [one for one in options if not (one.is_flag or one.multiple or one.count)]
        for param in single:
            param.multiple = True
        found, _, _ = collecting.make_parser(ctx).parse_args(list(args))
        for param in single:
            if len(values := found.get(param.name, [])) > 1:
                times = "twice" if len(values) == 2 else count_of(len(values), "time")
                names = dict.fromkeys(each.strip() for each in ",".join(values).split(","))
                once = f"{param.opts[0]} {','.join(names)}" if param.metavar in LISTS else "it once"
                texts = ", ".join(map(shown, values))
                raise UserError(f"{param.opts[0]}: given {times} ({texts}); write {once}")
        return super().parse_args(ctx, args)


Points = Annotated[int, Ge(2), Le(1001), Says("a whole number from 2 to 1001")]


def checked(kind: Any) -> Callable[[typer.CallbackParam, Any], Any]:
    """Return what checks an option by the rule for configurations: to be one of the type `kind`."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        return None if value is None else check_value(value, kind, param.opts[0])

    return check


Seeds = Annotated[
    str | None,
    typer.Option("--seeds", help="random seeds, such as 0..4 or 0,3,7", metavar="SEEDS"),
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods", help="use only these methods, such as er,syngap; default: all", metavar="ROWS"
    ),
]
Workers = Annotated[
    str,
    typer.Option(
        "--workers",
        metavar="N",
        callback=checked(Literal["auto"] | Count),
        help="how many runs at the same time; auto: as many as the machine can do",
    ),
]
HungAfter = Annotated[
    float | None,
    typer.Option(
        "--hung-after",
        metavar="SECONDS",
        callback=checked(NonNegative),
        help="stop a run after this time without progress; default: 1800; 0: never",
    ),
]
Engine = Annotated[
    EngineChoice, typer.Option("--engine", help="where to run: this machine, or a Ray cluster")
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="HOST:PORT", help="address of the Ray cluster; default: auto"
    ),
]
Log = Annotated[
    str | None,
    typer.Option(
        "--log", metavar="LOGGERS", help="also log to these, such as tensorboard,mlflow,wandb"
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="write the runs to this folder; default: runs/NAME")
]
Data = Annotated[Path | None, typer.Option("--data", help="read data sets from this folder")]
Fresh = Annotated[bool, typer.Option("--fresh", help="first delete the earlier runs in the folder")]
Against = Annotated[
    Path | None,
    typer.Option(
        "--against", help="folder of untuned runs, to name tuned rows that are less accurate"
    ),
]
Results = Annotated[Path, typer.Option("--results", help="folder with recorded results")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="change an option, such as stream.epochs=2; repeatable"
    ),
]


Experiment = Annotated[
    str,
    typer.Argument(help="a YAML file, or a name from the list that `syngap doctor` prints"),
]


def names_in(listed: str | None, option: str) -> list[str] | None:
    """Return the names in a list with commas, None where there is no list.

    Examples:
        >>> names_in("er, syngap", "--methods")
        ['er', 'syngap']
        >>> names_in("er syngap", "--methods")
        Traceback (most recent call last):
        syngap.bench.errors.UserError: --methods: got "er syngap", expected commas in place ...
    """
    if listed is None:
        return None
    names = [name.strip() for name in listed.split(",")]
    if any(len(name.split()) > 1 for name in names):
        written = ",".join(listed.replace(",", " ").split())
        raise UserError(
            f"{option}: got {shown(listed)}, expected commas in place of spaces: {option} {written}"
        )
    return names


def seeds_in(listed: str | None) -> list[int] | None:
    """Return the seeds that "0..4" or "0,3,7" means, None where there are none."""
    from syngap.bench.config.values import seeds_of

    return seeds_of(listed, "--seeds") if listed is not None else None


def workers_in(count: str) -> int | None:
    """Return how many runs to do at a time, None for "auto"."""
    return None if count == "auto" else int(count)
