"""The command line: each command parses its arguments, calls the Python API, and prints."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from syngap import __version__
from syngap.bench.cli import machine, reports, running
from syngap.bench.cli.arguments import LISTS, Command
from syngap.bench.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="syngap",
    help="Train models that forget less, and compare methods. Begin with: syngap demo",
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
    app.command(cls=Command)(_function)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
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
    """Run the command line; return the exit code: 2 for a mistake of the user."""
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
        words = list(sys.argv[1:] if arguments is None else arguments)
        message = error.format_message()  # the parser's own complaints
        extra = re.search(r"extra arguments?(?:\(s\))? \((.+)\)", message)
        if extra is None:
            return _refused(message)
        hint = _list_hint(getattr(error, "ctx", None), words, len(extra[1].split()))
        return _refused(hint or f"unexpected argument: {extra[1]}; --help shows what is allowed")


def _list_hint(context: Any, words: Sequence[str], extra: int) -> str:
    """Return how a list is written, where one has spaces in place of commas.

    Args:
        context: of the command that the parser was at.
        words: of the command line.
        extra: how many of them the parser had no use for.
    """
    params = context.command.params if context else ()
    lists = {name for param in params if param.metavar in LISTS for name in param.opts}
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        listed = [*([value] if equals else []), *words[place + 1 :]][: extra + 1]
        if option in lists and len(listed) > 1 and not listed[1].startswith("-"):
            names = [name.strip(",") for name in listed if not name.startswith("-")]
            return (
                f"{option}: got {' '.join(listed)}, expected commas in place of spaces: "
                f"{option} {','.join(names)}"
            )
    return ""


def _refused(message: str, code: int = 2) -> int:
    line = " ".join(message.split())
    if line:
        sys.stderr.write(f"syngap: {line}\n")
    return code
