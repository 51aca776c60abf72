"""The machines of a Ray cluster: which of them can do a run, and why others cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import syngap
from syngap.bench.errors import UserError
from syngap.bench.registry import import_extra

__all__ = ["Machines", "Request", "complaint_of", "first_line", "fitting_runs", "reason_of"]

_FIRST_ANSWER = 180.0  # seconds for a machine's first one: torch may come over a network


@dataclass(frozen=True)
class Request:
    """What a worker has to know besides the job: all that is a matter of the asking process.

    Args:
        mark: a file in the experiment's folder, by which a machine shows that it shares it.
        version: of syngap there.
        needs: resources of a run, by the names that Ray gives them.
        workers: runs at a time in the whole cluster, None for as many as fit.
        command: that of the asking process.
        here: its working folder.
        data: its SYNGAP_DATA, "" where there is none.
    """

    mark: Path
    version: str
    needs: Mapping[str, float]
    workers: int | None
    command: Sequence[str]
    here: Path
    data: str


class Machines:
    """The machines of the cluster, as far as runs can be done there.

    Args:
        ray: the package.
        request: what is asked of each machine.
        say: is called with one that is left out.
    """

    def __init__(self, ray: Any, request: Request, say: Callable[[str], None]) -> None:
        self._ray, self._request, self._say = ray, request, say
        self.left_out: list[Mapping[str, Any]] = []

    def check(self) -> None:
        """Refuse a cluster whose machines have no room for a run, or do not share the folder."""
        if not self._fit():
            wanted = " and ".join(
                f"{count:g} {name}" for name, count in self._request.needs.items()
            )
            raise UserError(f"--engine ray: no machine of the cluster has the {wanted} of a run")
        for node, complaint in self._complaints():
            raise UserError(f"--engine ray: {node['NodeManagerHostname']}: {complaint}")

    def leave_out(self) -> bool:
        """Leave out those that came later and can do no run; return whether there were any."""
        found = list(self._complaints())
        for node, complaint in found:
            self.left_out.append(node)
            self._say(f"{node['NodeManagerHostname']}: {complaint}. It gets no more runs")
        if found and not self._fit():
            raise UserError("--engine ray: no machine is left that can do a run; --resume goes on")
        return bool(found)

    def strategy(self) -> Any:
        """Return how Ray is to place a run: on any machine but those left out."""
        if not self.left_out:
            return "DEFAULT"
        strategies = import_extra("ray.util.scheduling_strategies", "ray")
        out = [node["NodeID"] for node in self.left_out]
        labels = self.left_out[0]["Labels"].items()
        label = next(name for name, value in labels if value == out[0])  # versions differ
        return strategies.NodeLabelSchedulingStrategy(hard={label: strategies.NotIn(*out)})

    def _fit(self) -> list[Mapping[str, Any]]:
        """Return the machines that have room for a run."""
        out = [node["NodeID"] for node in self.left_out]
        return [
            node
            for node in self._ray.nodes()
            if node["Alive"]
            and node["NodeID"] not in out
            and fitting_runs(node["Resources"], self._request.needs)
        ]

    def _complaints(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Ask all of them at once; give those on which no run can be done, and why."""
        at = import_extra("ray.util.scheduling_strategies", "ray").NodeAffinitySchedulingStrategy
        look = self._ray.remote(num_cpus=0, max_retries=0)(complaint_of)
        asking = [
            (
                node,
                look.options(scheduling_strategy=at(node["NodeID"], soft=False)).remote(
                    self._request.mark, self._request.version
                ),
            )
            for node in self._fit()
        ]
        deadline = time.monotonic() + _FIRST_ANSWER
        for node, reference in asking:
            try:
                left = max(0.0, deadline - time.monotonic())
                complaint = self._ray.get(reference, timeout=left)
            except self._ray.exceptions.GetTimeoutError:
                self._ray.cancel(reference, force=True)
                complaint = (
                    f"did not answer in {_FIRST_ANSWER:g} seconds; "
                    "a worker was to start there and import syngap"
                )
            except self._ray.exceptions.RayError as error:
                complaint = reason_of(error)
            if complaint:
                yield node, complaint


def complaint_of(mark: Path, version: str) -> str:
    """Return why a run cannot be done on this machine, "" where it can be."""
    if syngap.__version__ != version:
        return f"has syngap {syngap.__version__}, not {version}"
    if not mark.is_file():
        return f"does not see {mark.parent}; --out must be a folder that all machines share"
    return ""


def fitting_runs(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many runs a machine has room for.

    Examples:
        >>> fitting_runs({"CPU": 16.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 0.3333})
        6
    """
    return min(int(resources.get(name, 0) / count) for name, count in needs.items())


def reason_of(error: BaseException) -> str:
    """Return what an error of Ray says, in the words of its cause where it has one."""
    return first_line(getattr(error, "cause", None) or error)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
