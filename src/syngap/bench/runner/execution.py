"""Does the runs of plans, on this machine or a Ray cluster, with progress and loggers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from rich.console import Console

from syngap.bench.config.finetuning import AnyExperiment
from syngap.bench.errors import UserError
from syngap.bench.runner import local
from syngap.bench.runner.plan import AnyJob, Plan
from syngap.bench.runner.progress import Display
from syngap.messages import count_of

if TYPE_CHECKING:
    from syngap.bench.runner.cluster import Cluster

__all__ = ["EngineName", "Execution", "Interrupted"]

EngineName: TypeAlias = Literal["local", "ray"]
_T = TypeVar("_T")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during runs: the same call goes on with them, in `plan.out`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(f"stopped; the runs in {plan.out} can be resumed")
        self.plan = plan


class Execution:
    """Does the runs of plans; used as a context.

    Args:
        workers: how many at a time; None is as many as fit.
        engine: "local" uses processes of this machine, "ray" a cluster.
        address: of the Ray cluster.
        log: names of loggers that follow the runs.
        hung_after: seconds without news after which a local run has failed; 0 is never.
        console: where progress and messages are shown.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        engine: EngineName = "local",
        address: str | None = None,
        log: Sequence[str] = (),
        hung_after: float | None = None,
        console: Console | None = None,
    ) -> None:
        if engine == "local" and address is not None:
            raise UserError("--address: is that of a Ray cluster; give --engine ray with it")
        if engine == "ray" and hung_after is not None:
            raise UserError(
                "--hung-after: is for the processes of this machine, not for --engine ray"
            )
        self._workers, self._engine, self._address = workers, engine, address
        self._log, self._hung_after = log, hung_after
        self._console = console or Console(stderr=True)
        self._cluster: Cluster | None = None
        self._exits = ExitStack()

    def __enter__(self) -> Execution:
        if self._engine == "ray":
            from syngap.bench.runner.cluster import connect

            self._cluster = self._exits.enter_context(connect(self._address or "auto", self.say))
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def say(self, line: str) -> None:
        """Show a message above the progress."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def device(self, experiment: AnyExperiment) -> str | None:
        """Return the kind of device that runs will have on the cluster, None for this machine's."""
        return self._cluster.device(experiment.training.device) if self._cluster else None

    def run(self, plan: Plan) -> dict[str, str]:
        """Do the runs of a plan; return why those that failed did, by their names."""
        total = count_of(len(plan.done) + len(plan.jobs), "run")
        if there := len(plan.done) - len(plan.recorded):
            self.say(
                f"{there} of {total} already done, in {plan.out}; --fresh would run them again"
            )
        if plan.recorded:
            self.say(f"{len(plan.recorded)} of {total} recorded in {plan.recorded[0].path.parent}")
        if not plan.jobs and not plan.recorded:
            with self._logged(plan):
                return {}
        with self.begin(plan, plan.begin(self.say)):
            return self.work(plan, plan.jobs)

    @contextmanager
    def begin(self, plan: Plan, folder: AbstractContextManager[_T]) -> Iterator[_T]:
        """Work in a plan's folder alone, loggers following; `Interrupted` on Ctrl-C and SIGTERM.

        Args:
            plan: whose folder.
            folder: holds the folder while the work goes on; what it gives is passed on.
        """
        for note in plan.notes:
            self.say(note)
        logged = self._logged(plan)  # first: a logger that cannot be made is a mistake to report
        alone = self._cluster.alone(plan.out) if self._cluster else nullcontext()
        try:
            with alone, folder as value, _sigterm_interrupts(), logged:
                yield value
        except KeyboardInterrupt:
            raise Interrupted(plan) from None

    def work(
        self,
        plan: Plan,
        jobs: Sequence[AnyJob],
        *,
        to_come: Sequence[AnyJob] | None = None,
        following: Callable[[local.Event], Sequence[AnyJob]] = lambda ended: (),
    ) -> dict[str, str]:
        """Do `jobs` and those that follow from them; return why those that failed did.

        Args:
            plan: of which they are.
            jobs: to begin with.
            to_come: all of which progress is shown; `jobs` where nothing follows.
            following: from the end of a run to the runs that come after it.
        """
        display = Display(self._console, list(jobs if to_come is None else to_come), plan.steps)

        def show(event: local.Event) -> None:
            if event.kind == "step" and event.message:
                self.say(event.message)
            else:
                display(event)

        with display:
            if self._cluster:
                self._cluster.run(jobs, self._workers, show, following)
            elif jobs:
                patience = {} if self._hung_after is None else {"hung_after": self._hung_after}
                workers = self._workers or local.default_workers(jobs)
                local.run_local(jobs, workers, show, following, **patience)
        return display.failed

    def _logged(self, plan: Plan) -> AbstractContextManager[object]:
        """Return a context in which the loggers follow the plan's runs."""
        if not self._log:
            return nullcontext()
        from syngap.bench.runner.loggers import Following

        return Following(plan.out, self._log, say=self.say)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM, which batch systems send, end runs as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
