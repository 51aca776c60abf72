"""The page of a fine-tuning experiment: one HTML file that opens anywhere, offline."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path

import yaml

from syngap import __version__
from syngap.bench.finetuning.model_tasks import TASKS
from syngap.bench.reporting.finetuning.comparison import Comparison, compare_methods
from syngap.bench.reporting.finetuning.comparison_table import (
    before_and_after,
    headline,
    notes,
    short_notes,
    story,
    whole_table,
)
from syngap.bench.reporting.finetuning.frontiers import drawn_outcomes, frontier_figure
from syngap.bench.storage import write
from syngap.bench.store.outcome import Run

__all__ = ["comparison_opening", "comparison_page", "write_comparison_page"]


def write_comparison_page(
    runs: Sequence[Run], path: Path, title: str, *, within: Path | None = None
) -> None:
    """Write the page of `runs` to `path`.

    Args:
        runs: every run of the experiment.
        path: the HTML file to write.
        title: the experiment's name.
        within: the folder that the user named, where it is not the page's own.
    """
    write(path, comparison_page(runs, title).encode(), within=within or path.parent)


def comparison_page(runs: Sequence[Run], title: str, *, timestamp: datetime | None = None) -> str:
    """Return the page as HTML.

    Args:
        runs: every run of the experiment.
        title: the experiment's name.
        timestamp: the time that the page gives as its own; now by default.
    """
    found = compare_methods(runs)
    style = _asset("page.css")
    moment = (timestamp or datetime.now(timezone.utc)).astimezone(timezone.utc)
    parts = {
        "title": html.escape(title),
        "headline": html.escape(headline(found)),
        "story": html.escape(story(found)),
        "before_and_after": _rows(*before_and_after(found)),
        "short": html.escape(short_notes(found)),
        "table": _rows(*whole_table(found)),
        "notes": "".join(f"<p class='note'>{html.escape(note)}</p>" for note in notes(found)),
        "figures": _figures(found),
        "left_out": html.escape(_left_out(found)),
        "trials": _trials(runs),
        "setup": html.escape(_setup(runs[0])),
        "made": f"{moment:%Y-%m-%d %H:%M} UTC",
        "version": html.escape(__version__),
        # Nothing may be fetched, nothing may run, and nothing but this may style.
        "style_hash": f"sha256-{_base64(hashlib.sha256(style.encode()).digest())}",
        "style": style,
    }
    # In one pass, so that text that looks like a placeholder stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("finetuning.html"))


def comparison_opening(runs: Sequence[Run], title: str, link: str) -> str:
    """Return HTML for a page of something else to begin with: the verdict and the losses.

    Args:
        runs: every run of the experiment.
        title: the experiment's name.
        link: to the page of these runs, relative to the other one.
    """
    found = compare_methods(runs)
    return f"""<section class="opening">
  <h1>{html.escape(title)}</h1>
  <p>{html.escape(story(found))}</p>
  <p class="headline">{html.escape(headline(found))}</p>
  <div class="scroll" role="region" aria-label="Test losses before and after" tabindex="0">{
        _rows(*before_and_after(found))
    }</div>
  <p class="note">{html.escape(short_notes(found))} <a href="{
        html.escape(link)
    }">The frontiers and all trials</a></p>
</section>
"""


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _asset(name: str) -> str:
    return (files("syngap.bench.reporting") / "web" / name).read_text(encoding="utf-8")


def _rows(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope='col'>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        f"<tr><th scope='row'>{html.escape(first)}</th>"
        + "".join(f"<td>{html.escape(text)}</td>" for text in rest)
        + "</tr>"
        for first, *rest in lines
    )
    return f"<table class='plain'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _left_out(found: Comparison) -> str:
    """Return which rows the figures do not have, as a sentence, or nothing."""
    drawn = drawn_outcomes(found)
    names = [outcome.label for outcome in found.outcomes if outcome not in drawn]
    return f" In the table alone: {', '.join(names)}." if names else ""


def _figures(found: Comparison) -> str:
    """Return a figure for each kind of old data, as images that are part of the page."""
    images = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frontiers.svg"
        for kind in found.old:
            frontier_figure(found, path, kind)
            said = html.escape(f"Forgetting of {kind} against learning. {headline(found)}")
            source = f"data:image/svg+xml;base64,{_base64(path.read_bytes())}"
            images.append(f"<img class='drawing' alt='{said}' src='{source}'>")
    return "\n".join(images)


def _trials(runs: Sequence[Run]) -> str:
    """Return every trial at its last evaluation, weights as trained."""
    lines = []
    for run in runs:
        last = next((point for point in reversed(run.points) if point.share == 1), None)
        if last is None:
            lines.append([run.row, str(run.seed), run.status.state or "not begun", "–", "–", "–"])
            continue
        old = ", ".join(f"{kind} {sum(halves) / 2:.3f}" for kind, halves in last.old.items())
        new = f"{sum(last.new) / 2:.3f}"
        seconds = f"{last.seconds:.1f}"
        lines.append([run.row, str(run.seed), run.status.state, new, old, seconds])
    return _rows(["trial", "seed", "state", "new loss", "old losses", "s"], lines)


def _setup(run: Run) -> str:
    """Return what all runs have in common, as YAML, and what they ran on."""
    shared = {
        part: run.config.entries[part]
        for part in (*TASKS, "model", "anchors", "training")
        if part in run.config.entries
    }
    environment = dict(run.environment.entries)
    return yaml.safe_dump({**shared, "environment": environment}, sort_keys=False)
