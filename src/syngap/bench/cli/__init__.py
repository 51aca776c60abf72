"""The command line: each command parses its arguments, calls the Python API, and prints."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from syngap import __version__
from syngap.bench.cli import machine, reports, running
from syngap.bench.cli.arguments import LISTS
from syngap.bench.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="syngap",
    help="Learning from streams and forgetting less: compare methods, see tables and a page.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for _function in (
    running.demo,
    running.run,
    running.tune,
    reports.report,
    reports.fill,
    reports.keep,
    running.reproduce,
    running.landscape,
    machine.data,
    machine.doctor,
):
    app.command()(_function)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="say the version and end")] = False,
) -> None:
    if version:
        typer.echo(f"syngap {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 2 where what was asked for cannot be done."""
    command = _command()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # arrows in a terminal that has none
    try:
        code: Any = command.main(
            list(sys.argv[1:] if arguments is None else arguments),
            prog_name="syngap",
            standalone_mode=False,
        )
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _refused(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _refused("stopped", 130)
    except BrokenPipeError:  # `syngap report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # no room, no permission
        said = ": ".join(str(part) for part in (error.filename, error.strerror) if part)
        return _refused(said or repr(error))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        given = list(sys.argv[1:] if arguments is None else arguments)
        message = error.format_message()  # the parser's own complaints
        context = getattr(error, "ctx", None) if "extra argument" in message else None
        return _refused(message + _list_hint(context, given))


def _list_hint(context: Any, given: Sequence[str]) -> str:
    """Return how a list is written, where one was given with a space in place of a comma."""
    params = context.command.params if context else ()
    lists = {name for param in params if param.metavar in LISTS for name in param.opts}
    for place, word in enumerate(given):
        option, equals, value = word.partition("=")
        words = [*([value] if equals else []), *given[place + 1 :]][:2]
        if option in lists and len(words) == 2 and not words[1].startswith("-"):
            return f"; a list has commas and no spaces: {option} {words[0].strip(',')},{words[1]}"
    return ""


def _refused(message: str, code: int = 2) -> int:
    line = " ".join(message.split())
    if line:
        sys.stderr.write(f"syngap: {line}\n")
    return code
