"""The numbers of the paper, quoted, with notes on what is odd about them.

Aguilar, Zainal and Kavehei, "Metaplasticity as adaptive gradient preconditioning for incremental
learning": mean ± sd over five runs, in percent; its ablations are given without a spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from syngap.bench.reporting.statistics import Spread

__all__ = ["EXPERIMENTS", "QUOTED_MEASURES", "notes", "quotes"]

QUOTED_MEASURES = ("ACC", "FM", "INT")  # the measures that it reports

_SETTING = (
    "The paper's numbers are quoted, mean ± sd of five runs. It gives no code, network, epochs, "
    "batch sizes, learning rates or values of α, τ, λ and ε, so its setting is not this one."
)
_NO_SPREAD = "Its ablations come without a spread."
_ODD_FM = "Its main table has ER's FM at 48.56, its ablation table has the same row at 54.23."
_ODD_JOINT = (
    "Its joint accuracy of 99.60 on CORe50 is far above every published figure with the official "
    "split by session (50 to 79), so its split was probably by frame."
)

_Table: TypeAlias = Mapping[
    str, tuple[tuple[float, float | None], ...]
]  # row → (mean, sd) by measure

_CIFAR100: _Table = {
    "joint": ((67.76, None),),
    "sgd": ((6.60, 1.50), (51.64, 1.26), (12.12, 2.32)),
    "sgdm": ((8.77, 0.07), (71.98, 1.85), (-5.90, 1.87)),
    "adam": ((7.59, 0.26), (72.61, 0.43), (-5.20, 0.35)),
    "ballistic": ((7.43, 0.75), (63.04, 1.19), (1.38, 0.63)),
    "er": ((17.60, 4.25), (48.56, 3.32), (5.23, 2.22)),
    "ewcpp": ((6.80, 0.87), (64.36, 1.60), (2.33, 2.43)),
    "syngap": ((27.28, 0.58), (37.87, 2.98), (6.91, 3.88)),
}
_CORE50: _Table = {
    "joint": ((99.60, None),),
    "sgd": ((58.97, 0.61), (41.56, 0.79), (1.88, 0.12)),
    "sgdm": ((58.41, 1.04), (43.37, 1.28), (1.08, 0.06)),
    "adam": ((58.02, 0.67), (47.24, 0.79), (-0.04, 0.05)),
    "ballistic": ((55.34, 1.18), (49.79, 1.28), (0.15, 0.04)),
    "er": ((67.22, 2.00), (33.72, 2.43), (3.02, 0.57)),
    "ewcpp": ((40.51, 1.69), (60.53, 0.51), (5.67, 1.18)),
    "syngap": ((68.65, 1.71), (30.85, 1.61), (4.09, 0.62)),
}
_ABLATION: _Table = {
    "syngap": ((27.28, None), (37.87, None), (6.91, None)),
    "unbounded": ((14.72, None), (49.46, None), (8.18, None)),
    "er": ((17.60, None), (54.23, None), (5.23, None)),
    "low_alpha": ((19.27, None), (46.32, None), (7.39, None)),
}

# Our experiment → the table of the paper with the same rows.
EXPERIMENTS: Mapping[str, _Table] = {
    "table1-cifar100-shared": _CIFAR100,
    "table1-cifar100-tuned": _CIFAR100,
    "table2-ablation": _ABLATION,
    "core50-nc": _CORE50,
}


def quotes(experiment: str, row: str) -> dict[str, Spread]:
    """Return measure → what the paper reports for this row of this experiment.

    Examples:
        >>> quotes("table1-cifar100-shared", "syngap")["ACC"]
        Spread(mean=27.28, sd=0.58, seeds=5)
        >>> quotes("table1-cifar100-shared", "er_lr0.01"), quotes("digits", "er")
        ({}, {})
    """
    pairs = zip(QUOTED_MEASURES, EXPERIMENTS.get(experiment, {}).get(row, ()), strict=False)
    return {measure: Spread(mean, sd, 5) for measure, (mean, sd) in pairs}


def notes(experiment: str) -> list[str]:
    """Return the sentences that belong wherever the paper's numbers stand beside ours."""
    if experiment not in EXPERIMENTS:
        return []
    table = EXPERIMENTS[experiment]
    odd = _ODD_JOINT if table is _CORE50 else _ODD_FM
    return [_SETTING, *([_NO_SPREAD] if table is _ABLATION else []), odd]
