"""What the page draws, as plain values rounded to what a reader can see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from syngap.experiments.folder import Run
from syngap.experiments.landscapes.surface import Landscape
from syngap.report.differences import half
from syngap.report.headline import against, rivals, strongest, subject, verdict
from syngap.report.layers import is_weight, layers, title
from syngap.report.paper import notes, quoted
from syngap.report.rows import MEASURES, Row, Spread, crowded, missing
from syngap.report.searches import Search, tabled
from syngap.report.series import Band, accuracy_curve, boundaries, matrix, plasticity_curve
from syngap.report.surfaces import digits, drawn
from syngap.report.sweeps import Sweep, sweeps, variants
from syngap.report.table import best, decimals

__all__ = ["data"]


def data(
    runs: Sequence[Run],
    rows: Sequence[Row],
    landscapes: Sequence[Landscape] = (),
    search: Search | None = None,
) -> dict[str, Any]:
    """Return the data of the page: `rows` are those of `runs`."""
    swept = sweeps(rows)
    finished = {row.name: [r for r in runs if r.row == row.name and r.done] for row in rows}
    ours = subject(rows)
    shared, own = _configurations(runs)
    return {
        "measures": [_measure(rows, name) for name in MEASURES],
        "subject": None if ours is None else ours.name,
        "against": [] if ours is None else [_against(ours, rival) for rival in rivals(rows)],
        "flattered": ours is not None and strongest(rows) is not None,
        "missing": missing(rows),
        "axis": _axis([run for run in runs if run.done], [row.name for row in rows if row.joint]),
        "rows": [_row(row, finished[row.name], own.get(row.name, "")) for row in rows],
        "sweeps": [_sweep(sweep) for sweep in swept],
        "variants": variants(swept),
        "search": None if search is None else tabled(search),
        "notes": [said for said in (crowded(rows), " ".join(_notes(rows))) if said],
        "shared": shared,
        "environment": _environment(runs),
        **drawn(landscapes),
    }


def _notes(rows: Sequence[Row]) -> list[str]:
    return notes(rows[0].experiment) if rows else []


def _measure(rows: Sequence[Row], name: str) -> dict[str, Any]:
    measure = MEASURES[name]
    return {
        "name": name,
        "heading": measure.heading,
        "better": measure.better,
        "says": measure.says,
        "decimals": decimals(rows, name),
        "best": sorted(best(rows, name)),
    }


def _against(ours: Row, rival: Row) -> dict[str, Any]:
    found = against(ours, rival)
    return {
        "rival": found.rival,
        "seeds": found.seeds,
        "accuracy": _interval(found.accuracy),
        "forgetting": _interval(found.forgetting),
        "ends": verdict(found.accuracy),
        "forgets": verdict(found.forgetting),
        "time": None if found.time is None else round(found.time, 3),
    }


def _interval(difference: Spread | None) -> list[float | None] | None:
    """Return a difference with half its 95 % interval in place of its sd."""
    return _spread(difference and Spread(difference.mean, half(difference)))


def _axis(finished: Sequence[Run], joint: Sequence[str]) -> dict[str, Any]:
    """Return where tasks end: in steps where rows agree, seed by seed, else in tasks."""
    recorded = [run for run in finished if run.record and run.row not in joint]
    by_seed = {run.seed: run for run in recorded}
    one_length = len({len(boundaries([run])) for run in recorded}) == 1
    if one_length and all(boundaries([r]) == boundaries([by_seed[r.seed]]) for r in recorded):
        return {"unit": "step", "ends": [round(end) for end in boundaries([*by_seed.values()])]}
    tasks = len(finished[0].accuracy[0]) if finished else 0
    return {"unit": "task", "ends": list(range(1, tasks + 1))}


def _row(row: Row, runs: Sequence[Run], config: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        "label": row.label,
        "joint": row.joint,
        "seeds": list(row.seeds),
        "few": row.few(),
        "values": {measure: _spread(row.spread(measure)) for measure in MEASURES},
        "config": config,
        "paper": {name: _spread(value) for name, value in quoted(row.experiment, row.name).items()},
    }
    if runs:
        found["R"] = [_band(band, 1) for band in matrix(runs)]
    if not row.joint and (curve := accuracy_curve(runs)):
        found["places"] = _rounded(curve.places, 4)
        found["lines"] = {name: _band(band, 1) for name, band in curve.lines.items()}
        if plasticity := plasticity_curve(runs):
            found["plasticity"] = {
                "places": _rounded(plasticity.places, 4),
                "lines": {name: _rounded(b.mean, 3) for name, b in plasticity.lines.items()},
            }
            found["layers"] = _layers(runs)
    return found


def _layers(runs: Sequence[Run]) -> dict[str, Any] | None:
    found = layers(runs)
    if found is None:
        return None
    importance = found.importance
    return {
        "names": found.names,
        "titles": [title(name) for name in found.names],
        "weight": [is_weight(name) for name in found.names],
        "importance": importance and [[digits(v, 3) for v in row] for row in importance],
        "plasticity": [_rounded(row, 3) for row in found.plasticity],
    }


def _sweep(sweep: Sweep) -> dict[str, Any]:
    return {
        "name": sweep.name,
        "values": sweep.values,
        "logarithmic": sweep.logarithmic,
        "missing": sweep.missing,
        "lines": [
            {
                "label": line.label,
                "method": line.method,
                "values": line.values,
                "rows": [row.name for row in line.rows],
            }
            for line in sweep.lines
        ],
    }


def _spread(value: Spread | None) -> list[float | None] | None:
    if value is None:
        return None
    return [round(value.mean, 4), None if value.sd is None else round(value.sd, 4)]


def _band(band: Band, digits: int) -> dict[str, Any]:
    sd = None if band.sd is None else _rounded(band.sd, digits)
    return {"mean": _rounded(band.mean, digits), "sd": sd}


def _rounded(values: Sequence[float], digits: int) -> list[float]:
    return [int(short) if (short := round(v, digits)) == int(short) else short for v in values]


def _configurations(runs: Sequence[Run]) -> tuple[str, dict[str, str]]:
    """Return as YAML what all runs share, and by row what is its own."""
    if not runs:
        return "", {}
    configs = [{k: v for k, v in r.config.items() if k not in ("row", "seed")} for r in runs]
    shared = {
        key: value
        for key, value in configs[0].items()
        if all(key in config and config[key] == value for config in configs)
    }
    own: dict[str, dict[str, list[int]]] = {}
    for run, config in zip(runs, configs, strict=True):
        text = _yaml({key: value for key, value in config.items() if key not in shared})
        own.setdefault(run.row, {}).setdefault(text, []).append(run.seed)
    return _yaml(shared), {row: _variants(texts) for row, texts in own.items()}


def _variants(texts: dict[str, list[int]]) -> str:
    if len(texts) == 1:
        return next(iter(texts))
    return "\n".join(f"# seed {', '.join(map(str, seeds))}\n{t}" for t, seeds in texts.items())


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True) if value else ""


def _environment(runs: Sequence[Run]) -> list[list[str]]:
    """Return what the runs say of where they ran: name, and value or values where they differ."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _flat(run.environment):
            found.setdefault(name, {})[value] = None
    return [[name, _few(list(values))] for name, values in found.items()]


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{name}.{key}")]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return [(name.strip("."), text)]


def _few(values: list[str], most: int = 3) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return " · ".join(values[:most]) + more
