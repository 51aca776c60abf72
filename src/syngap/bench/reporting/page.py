"""The page of an experiment: one HTML file that opens anywhere, offline."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from syngap import __version__
from syngap.bench.reporting.curves import Sweep, sweeps, variants
from syngap.bench.reporting.headline import (
    compare,
    conclusion,
    featured,
    remarks,
    rivals,
    strongest,
)
from syngap.bench.reporting.landscapes import landscape_data
from syngap.bench.reporting.paper import notes, quotes
from syngap.bench.reporting.rows import (
    MEASURES,
    Row,
    concurrency_note,
    finished_runs,
    omissions,
    rows,
)
from syngap.bench.reporting.searches import Search, read_search, search_data
from syngap.bench.reporting.series import (
    Band,
    accuracy_curve,
    boundaries,
    is_weight,
    layers,
    mean_matrix,
    plasticity_curve,
    tensor_title,
)
from syngap.bench.reporting.statistics import (
    Spread,
    finite,
    half_width,
    round_decimals,
    round_digits,
    verdict,
)
from syngap.bench.reporting.tables import best_rows, decimals, markdown
from syngap.bench.storage import write
from syngap.bench.store.folder_reader import Run
from syngap.bench.store.surface import Landscape

__all__ = ["embed_json", "page", "page_data", "write_page"]

_SCRIPT = ("tools", "table", "chart", "stream", "matrices", "surfaces", "setup")  # in one function

_MAIN = ("ACC", "FM", "seconds")  # the other columns are shown on request

_LANDSCAPES_ALONE = "Where the path from task to task leads, on the loss of the first."


def write_page(
    runs: Sequence[Run],
    path: Path,
    title: str,
    landscapes: Sequence[Landscape] = (),
    *,
    search_folder: Path | None = None,
    timestamp: datetime | None = None,
    opening: str = "",
    within: Path | None = None,
) -> None:
    """Write the page of `runs` to `path`.

    Args:
        runs: every run of the experiment, finished or not.
        path: the HTML file to write.
        title: the experiment's name.
        landscapes: that were computed for it; a page of landscapes alone is possible too.
        search_folder: the experiment's folder, where a search may be beside the runs.
        timestamp: the time that the page gives as its own; now by default.
        opening: HTML that the page begins with.
        within: the folder that the user named, where it is not the page's own.
    """
    text = page(
        runs, title, landscapes, search_folder=search_folder, timestamp=timestamp, opening=opening
    )
    write(path, text.encode(), within=within or path.parent)


def page(
    runs: Sequence[Run],
    title: str,
    landscapes: Sequence[Landscape] = (),
    *,
    search_folder: Path | None = None,
    timestamp: datetime | None = None,
    opening: str = "",
) -> str:
    """Return the page of `runs` as HTML."""
    found = rows(runs)
    search = None if search_folder is None else read_search(search_folder, found)
    moment = (timestamp or datetime.now(timezone.utc)).astimezone(timezone.utc)
    template, style = _asset("page.html"), _asset("page.css")
    script = _script()
    parts = {
        "opening": opening,
        "title": html.escape(title),
        "headline": html.escape(conclusion(found) if runs else _LANDSCAPES_ALONE),
        "remarks": html.escape(" ".join(remarks(found))),
        "table": html.escape(markdown(found)),
        "made": f"{moment:%Y-%m-%d %H:%M} UTC",
        "version": html.escape(__version__),
        # Nothing may be fetched, and nothing but these two may style or run.
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "style": style,
        "script": script,
        "data": embed_json(page_data(runs, found, landscapes, search)),
    }
    # In one pass, so that text that looks like a placeholder stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def embed_json(value: Any) -> str:
    r"""Return JSON in which no character can end the element that holds it.

    Examples:
        >>> embed_json("</script>")
        '"\\u003c/script\\u003e"'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def page_data(
    runs: Sequence[Run],
    rows: Sequence[Row],
    landscapes: Sequence[Landscape] = (),
    search: Search | None = None,
) -> dict[str, Any]:
    """Return what the page draws, as plain values rounded to what a reader can see.

    Args:
        runs: every run of the experiment.
        rows: those of `runs`.
        landscapes: that were computed for it.
        search: that chose its values.
    """
    found = sweeps(rows)
    ours = featured(rows)
    shared, own = _configurations(runs)
    return {
        "measures": [_measure(rows, name) for name in _shown(rows)],
        "subject": None if ours is None else ours.name,
        "against": [] if ours is None else [_comparison(ours, rival) for rival in rivals(rows)],
        "flattered": ours is not None and strongest(rows) is not None,
        "missing": omissions(rows),
        "axis": _axis([run for run in runs if run.done], [row.name for row in rows if row.joint]),
        "rows": [_row(row, finished_runs(runs, row), own.get(row.name, "")) for row in rows],
        "sweeps": [_sweep(sweep) for sweep in found],
        "variants": variants(found),
        "search": None if search is None else search_data(search),
        "notes": list(filter(None, (concurrency_note(rows), " ".join(_notes(rows))))),
        "shared": shared,
        "environment": _environment(runs),
        **landscape_data(landscapes),
    }


def _notes(rows: Sequence[Row]) -> list[str]:
    return notes(rows[0].experiment) if rows else []


def _shown(rows: Sequence[Row]) -> list[str]:
    """Return the measures that a row, or the paper, has a value of, and those that cards show."""
    quoted = {name for row in rows for name in quotes(row.experiment, row.name)}
    known = {name for name in MEASURES if any(row.spread(name) for row in rows)}
    return [name for name in MEASURES if name in known | quoted | {*_MAIN}]


def _measure(rows: Sequence[Row], name: str) -> dict[str, Any]:
    measure = MEASURES[name]
    return {
        "name": name,
        "main": name in _MAIN,
        "heading": measure.heading,
        "better": measure.better,
        "says": measure.definition,
        "decimals": decimals(rows, name),
        "best": sorted(best_rows(rows, name)),
    }


def _comparison(ours: Row, rival: Row) -> dict[str, Any]:
    found = compare(ours, rival)
    return {
        "rival": found.rival,
        "name": rival.name,
        "seeds": found.seeds,
        "accuracy": _interval(found.accuracy),
        "forgetting": _interval(found.forgetting),
        "ends": verdict(found.accuracy),
        "forgets": verdict(found.forgetting),
        "time": None if found.time is None else round(found.time, 3),
    }


def _interval(difference: Spread | None) -> list[float | None] | None:
    """Return a difference with half its 95 % interval in place of its sd."""
    return _spread(difference and Spread(difference.mean, half_width(difference)))


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
        "memory": row.has_memory,
        "seeds": list(row.seeds),
        "few": row.seed_note(),
        "values": {measure: _spread(row.spread(measure)) for measure in MEASURES},
        "config": config,
        "paper": {name: _spread(value) for name, value in quotes(row.experiment, row.name).items()},
    }
    if runs:
        found["R"] = [_band(band, 1) for band in mean_matrix(runs)]
    if not row.joint and (curve := accuracy_curve(runs)):
        found["places"] = _round_all(curve.places, 4)
        found["lines"] = {name: _band(band, 1) for name, band in curve.lines.items()}
        if plasticity := plasticity_curve(runs):
            found["plasticity"] = {
                "places": _round_all(plasticity.places, 4),
                "lines": {name: _round_all(b.mean, 3) for name, b in plasticity.lines.items()},
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
        "titles": [tensor_title(name) for name in found.names],
        "weight": [is_weight(name) for name in found.names],
        "importance": importance and [[round_digits(v, 3) for v in row] for row in importance],
        "plasticity": [_round_all(row, 3) for row in found.plasticity],
    }


def _sweep(sweep: Sweep) -> dict[str, Any]:
    return {
        "name": sweep.name,
        "values": sweep.values,
        "logarithmic": sweep.logarithmic,
        "missing": sweep.omissions,
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
    numbers = (finite(value.mean), finite(value.sd))
    return [None if number is None else round(number, 4) for number in numbers]


def _band(band: Band, decimals: int) -> dict[str, Any]:
    sd = None if band.sd is None else _round_all(band.sd, decimals)
    return {"mean": _round_all(band.mean, decimals), "sd": sd}


def _round_all(values: Sequence[float], decimals: int) -> list[float | None]:
    return [round_decimals(value, decimals) for value in values]


def _configurations(runs: Sequence[Run]) -> tuple[str, dict[str, str]]:
    """Return as YAML the configuration that all runs share, and row → the rest of its own."""
    if not runs:
        return "", {}
    entries = [run.config.entries for run in runs]
    configs = [{k: v for k, v in its.items() if k not in ("row", "seed")} for its in entries]
    shared = {
        key: value
        for key, value in configs[0].items()
        if all(key in config and config[key] == value for config in configs)
    }
    own: dict[str, dict[str, list[int]]] = {}
    for run, config in zip(runs, configs, strict=True):
        text = _yaml({key: value for key, value in config.items() if key not in shared})
        own.setdefault(run.row, {}).setdefault(text, []).append(run.seed)
    return _yaml(shared), {row: _by_seed(texts) for row, texts in own.items()}


def _by_seed(texts: dict[str, list[int]]) -> str:
    if len(texts) == 1:
        return next(iter(texts))
    return "\n".join(f"# seed {', '.join(map(str, seeds))}\n{t}" for t, seeds in texts.items())


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True) if value else ""


def _environment(runs: Sequence[Run]) -> list[list[str]]:
    """Return versions and hardware of the runs: name, and value or values where they differ."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _flatten(run.environment.as_mapping()):
            found.setdefault(name, {})[value] = None
    return [[name, _first_few(list(values))] for name, values in found.items()]


def _flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flatten(inner, f"{name}.{key}")]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return [(name.strip("."), text)]


def _first_few(values: list[str], most: int = 3) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return " · ".join(values[:most]) + more


def _script() -> str:
    parts = [_asset(f"script/{name}.js") for name in _SCRIPT]
    return "\n".join(['\n"use strict";\n(() => {', *parts, "})();\n"])


def _asset(name: str) -> str:
    return (files("syngap.bench.reporting") / "web" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
