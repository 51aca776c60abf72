"""Where do the steps of ER and SynGAP go on a CPU? The operations that take most, one thread."""

from __future__ import annotations

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells when it starts and stops

import torch
from cases import CASES
from loop import ours
from measure import table
from torch.profiler import ProfilerActivity, profile

TOP = 8


def rows(case_name: str, method: str) -> list[list[str]]:
    case = CASES["cpu"][case_name]
    turn = ours(case, method)
    turn()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        turn()
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in events)
    return [
        [
            event.key,
            f"{event.self_cpu_time_total / case.steps:.0f}",
            f"{event.self_cpu_time_total / whole:.0%}",
            f"{event.count / case.steps:.0f}",
        ]
        for event in events[:TOP]
    ]


def main() -> None:
    torch.set_num_threads(1)
    print(__doc__)
    for name in list(CASES["cpu"])[1:]:
        for method in ("er", "syngap"):
            head = ["operation", "µs a step", "of all", "calls a step"]
            table(f"{name}, {method}:", head, rows(name, method))


if __name__ == "__main__":
    main()
