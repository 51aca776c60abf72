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

from syngap import __version__
from syngap.experiments.folder import Run
from syngap.experiments.landscapes.surface import Landscape
from syngap.report.data import data
from syngap.report.headline import headline
from syngap.report.rows import rows
from syngap.report.searches import read_search
from syngap.report.table import markdown
from syngap.storage import write

__all__ = ["page", "write_page"]

_SCRIPT = (  # in this order: each one idea, all in one function
    "tools",
    "looks",
    "choices",
    "cells",
    "sorting",
    "against",
    "table",
    "search",
    "axes",
    "chart",
    "sweeps",
    "stream",
    "matrices",
    "layers",
    "surfaces",
    "setup",
    "start",
)

_ALONE = "Where the path from task to task leads, on the loss of the first."


def write_page(
    runs: Sequence[Run],
    path: Path,
    title: str,
    landscapes: Sequence[Landscape] = (),
    *,
    searched: Path | None = None,
    made: datetime | None = None,
    within: Path | None = None,
) -> None:
    """Write the page of `runs` to `path`.

    Args:
        runs: every run of the experiment, finished or not.
        path: the HTML file to write.
        title: what the experiment is called.
        landscapes: that were computed for it; they alone make a page too.
        searched: the experiment's folder, for what a search beside the runs has chosen.
        made: the time that the page gives as its own; now unless said.
        within: the folder that the user named, where it is not the page's own.
    """
    text = page(runs, title, landscapes, searched=searched, made=made)
    write(path, text.encode(), within=within or path.parent)


def page(
    runs: Sequence[Run],
    title: str,
    landscapes: Sequence[Landscape] = (),
    *,
    searched: Path | None = None,
    made: datetime | None = None,
) -> str:
    """Return the page of `runs` as HTML."""
    found = rows(runs)
    search = None if searched is None else read_search(searched, found)
    moment = (made or datetime.now(timezone.utc)).astimezone(timezone.utc)
    template, style = _asset("page.html"), _asset("page.css")
    script = _script()
    parts = {
        "title": html.escape(title),
        "headline": html.escape(headline(found, numbers=False) if runs else _ALONE),
        "table": html.escape(markdown(found)),
        "made": f"{moment:%Y-%m-%d %H:%M} UTC",
        "version": html.escape(__version__),
        # Nothing may be fetched, and nothing but these two may style or run.
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "style": style,
        "script": script,
        "data": embedded(data(runs, found, landscapes, search)),
    }
    # In one pass, so that text that looks like a placeholder stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def embedded(value: Any) -> str:
    r"""Return JSON in which no character can end the element that holds it.

    Examples:
        >>> embedded("</script>")
        '"\\u003c/script\\u003e"'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _script() -> str:
    parts = [_asset(f"script/{name}.js") for name in _SCRIPT]
    return "\n".join(['\n"use strict";\n(() => {', *parts, "})();\n"])


def _asset(name: str) -> str:
    return (files("syngap.report") / "web" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
