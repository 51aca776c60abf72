"""What must hold whatever the input is, and how it is noticed where it does not."""

from __future__ import annotations

import faulthandler
import io
import os
import resource
import signal
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fuzz.trees import Tree, snapshot, write
from syngap.bench import cli
from syngap.bench.errors import UserError

SECONDS = 10.0  # for a step: a hundred times what a valid input takes
STUCK = 120.0  # seconds, for all steps of an input
MEMORY = 1 << 31  # bytes more than valid inputs need


class Hang(BaseException):
    """An input took longer than it may."""


class Broken(Exception):
    """A promise other than that of a clear error was broken."""


@dataclass(frozen=True)
class Step:
    """One thing to do with an input.

    Args:
        name: what it is called.
        does: what to do, given the folder of the input.
        may_change: from a path below the sandbox to whether this step may write it.
        raises: what else than a UserError is a clear answer.
        seconds: that it may take; SECONDS unless said.
    """

    name: str
    does: Callable[[Path], object]
    may_change: Callable[[str], bool] = lambda path: False
    raises: tuple[type[Exception], ...] = ()
    seconds: float | None = None

    @property
    def clear(self) -> tuple[type[Exception], ...]:
        """The errors that are a clear answer."""
        return (UserError, *self.raises)


@dataclass(frozen=True)
class Finding:
    """What went wrong, and where: the last line of syngap and the last line of all."""

    step: str
    kind: str
    where: str
    message: str

    @property
    def key(self) -> str:
        """The same for the same fault."""
        return f"{self.kind} at {self.where}"


class Sandbox:
    """A folder for one input at a time, with something beside it that nothing may touch."""

    def __init__(self, root: Path) -> None:
        self.root, self.place, self.outside = root, root / "input", root / "outside"
        self.outside.mkdir(parents=True)
        (self.outside / "canary").write_text("untouched")
        (self.outside / "canary.json").write_text('{"secret": 1}')
        (root / "cache").mkdir()
        (root / "home").mkdir()
        os.environ.pop("SYNGAP_DATA", None)
        os.environ.update(
            HOME=str(root / "home"), XDG_CACHE_HOME=str(root / "cache"), COLUMNS="100"
        )

    def tried(self, tree: Tree, steps: Sequence[Step]) -> tuple[Finding | None, list[str]]:
        """Do the steps with `tree`; return what went wrong, and what was said otherwise."""
        write(tree, self.place, self.outside)
        os.chdir(self.place)
        said = []
        for step in steps:
            before = snapshot(self.root)
            try:
                with limited(step.seconds or SECONDS), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    step.does(self.place)
                said.append(f"{step.name}: done")
            except Hang as error:
                return _finding(step, error), said
            except step.clear as error:
                message = str(error)
                if isinstance(error, UserError) and (wrong := unclear(message)):
                    return Finding(step.name, "unclear", _where(error), wrong), said
                said.append(f"{step.name}: {message}")
            except Exception as error:
                return _finding(step, error), said
            after = snapshot(self.root)
            changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
            names = [os.path.relpath(path, self.root) for path in changed]
            if wrong_ones := sorted(name for name in names if not step.may_change(name)):
                return Finding(step.name, "changed", step.name, ", ".join(wrong_ones[:3])), said
        return None, said


def called(*arguments: str) -> str:
    """Run the command line in this process; return what it printed.

    Raises:
        UserError: where it refused, with what it said.
        Broken: where it did so in another way than by one line and exit code 2, or wrote what a
            terminal would act upon.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(arguments)
    for text in (out.getvalue(), err.getvalue()):
        if control := [char for char in text if _acts(char) and char != "\n"]:
            raise Broken(f"{control[0]!a} reached the terminal")
    last = err.getvalue().rstrip("\n").rpartition("\n")[2]
    if code == 2:
        if not last.startswith("syngap: ") or len(last) < 12:
            raise Broken(f"exit code 2 with {last!a}")
        raise UserError(last)
    if code not in (0, 1):
        raise Broken(f"exit code {code}")
    return out.getvalue()


def unclear(message: str) -> str:
    """Return what is wrong with a message, "" where it is one line that a terminal can show."""
    if not message.strip():
        return "nothing is said"
    acting = [char for char in message if _acts(char)]
    if len(message) > 3000:
        return f"{len(message)} characters"
    return f"{acting[0]!a} in {ascii(message)[:200]}" if acting else ""


def _acts(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cs") or char in "\u202a\u202b\u202d\u202e\u2028"


def _finding(step: Step, error: BaseException) -> Finding:
    message = " ".join("".join(traceback.format_exception(error)).split("\n")[-12:])
    return Finding(step.name, type(error).__name__, _where(error), message[-1500:])


def _where(error: BaseException) -> str:
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [
        _line(frame, number) for frame, number in frames if "syngap" in frame.f_code.co_filename
    ]
    last = _line(*frames[-1]) if frames else "nowhere"
    return ours[-1] if ours and ours[-1] == last else f"{ours[-1] if ours else '-'} in {last}"


def _line(frame: FrameType, number: int) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{number} {frame.f_code.co_name}"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang where what is inside takes longer."""

    def stop(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_memory() -> None:
    """Let this process take no more than MEMORY beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def end_if_stuck() -> None:
    """End this process, saying where it was, should the next input hang where no signal is seen."""
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(STUCK, exit=True, file=2)
