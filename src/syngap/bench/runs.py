"""The runs in a folder as a value: their table, headline and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from rich.console import Console

from syngap.bench.config.reading import reading, yaml_in
from syngap.bench.storage import make_folder
from syngap.bench.store.folder_reader import Run, read_runs
from syngap.bench.store.layout import experiment_folders, holds_experiment
from syngap.bench.store.search_record import SEARCH
from syngap.bench.store.surface import Landscape, read_landscapes
from syngap.messages import count_of

if TYPE_CHECKING:
    from rich.table import Table

    from syngap.bench.reporting.finetuning.comparison import Comparison
    from syngap.bench.reporting.rows import Row
    from syngap.bench.reporting.searches import Search

__all__ = ["Runs", "TunedCheck", "check_results"]

KNOWN = "known_failures.yaml"


@dataclass(frozen=True)
class TunedCheck:
    """Whether tuned rows of an experiment end below untuned ones by more than chance.

    Args:
        experiment: the name of its folder.
        tuned: its tuned rows.
        below: tuned row that could be compared → what it ends below, nothing where it does not.
        known: row → why it is known to end below.
    """

    experiment: str
    tuned: Sequence[str]
    below: Mapping[str, Sequence[str]]
    known: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the rows that end below are those of which that is known."""
        return {row for row, texts in self.below.items() if texts} == {*self.known}

    def describe(self) -> list[str]:
        """Return what was found, in lines."""
        lines = []
        for row, texts in self.below.items():
            if texts:
                known = self.known.get(row)
                why = f"known: {known}" if known else "the search has failed for this row"
                lines.append(f"{self.experiment}: {row}: {'; '.join(texts)} ({why})")
        lines += [
            f"{self.experiment}: {row}: no longer below an untuned row; remove it from {KNOWN}"
            for row in self.known
            if not self.below.get(row)
        ]
        rows = f"{self.experiment}: {count_of(len(self.tuned), 'tuned row')}"
        return lines or [
            f"{rows}, {len(self.below)} with an untuned one to compare: none ends below by more "
            "than chance"
        ]


@dataclass(frozen=True)
class Runs:
    """The runs in a folder, as they are there when they are first looked at.

    Args:
        folder: that `run` wrote, or a packed result.
        failed: by name, why those that failed just now did.
    """

    folder: Path
    failed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list[Run]:
        """Every run, in the order of the experiment's methods and seeds."""
        alone = self.surfaces and not holds_experiment(self.folder)
        return [] if alone else read_runs(self.folder)

    @cached_property
    def surfaces(self) -> list[Landscape]:
        """The loss surfaces that were computed; a folder may hold nothing else."""
        return list(read_landscapes(self.folder))

    @property
    def is_finetuning(self) -> bool:
        """Whether they are of a fine-tuning experiment."""
        return any(run.is_finetuning for run in self.runs)

    @cached_property
    def comparison(self) -> Comparison:
        """What a fine-tuning experiment found, method by method."""
        from syngap.bench.reporting.finetuning.comparison import compare_methods

        return compare_methods(self.runs)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the table: a method with its options and all its seeds."""
        from syngap.bench.reporting.rows import rows

        return rows(self.runs)

    def table(self, width: int | None = None) -> Table:
        """Return the table, which terminals and notebooks can show.

        Args:
            width: characters that it may take; None is that of the terminal.
        """
        from syngap.bench.reporting.finetuning import comparison_table
        from syngap.bench.reporting.tables import table

        if self.is_finetuning:
            return comparison_table.table(self.comparison)
        return table(self.rows, width or Console().width)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        from syngap.bench.reporting.finetuning import comparison_table
        from syngap.bench.reporting.tables import markdown

        return (
            comparison_table.markdown(self.comparison)
            if self.is_finetuning
            else markdown(self.rows)
        )

    def headline(self) -> str:
        """Return what the table says, in a sentence or two."""
        from syngap.bench.reporting.finetuning import comparison_table
        from syngap.bench.reporting.headline import headline

        return (
            comparison_table.headline(self.comparison)
            if self.is_finetuning
            else headline(self.rows)
        )

    @property
    def title(self) -> str:
        """The experiment's name."""
        return (self.runs[0].config.experiment if self.runs else None) or self.folder.name

    def below_untuned(self, against: str | PathLike[str] | None = None) -> str:
        """Return which tuned rows end below untuned ones by more than chance, "" for none.

        Args:
            against: a folder of untuned runs; None looks for untuned rows beside the tuned ones,
                where the folder has the record of a search.
        """
        from syngap.bench.reporting.headline import below_untuned
        from syngap.bench.reporting.searches import read_search

        if self.is_finetuning or not self.runs:
            return ""
        search = read_search(self.folder, self.rows)
        if against is None:
            return search.warning if search else ""
        return below_untuned(self.rows, self._searched(search), Runs(Path(against)).rows)

    def check_tuned(self, others: Sequence[Runs] = (), *, named: bool = False) -> TunedCheck:
        """Compare tuned rows with untuned ones.

        Args:
            others: of which the untuned runs with the same stream and model count.
            named: `others` count whatever their stream, and rows of this table are tuned also
                where the folder has no record of a search.
        """
        from syngap.bench.config.experiment import complete_setting
        from syngap.bench.reporting.headline import compare_untuned
        from syngap.bench.reporting.searches import read_search

        search = read_search(self.folder, self.rows)
        if search is None and not named:
            return TunedCheck(self.folder.name, [], {})
        chosen = {row.name: list(row.spaces) for row in search.rows if row.used} if search else {}
        searched = self._searched(search) if named else chosen
        setting = complete_setting(self.runs[0].config.entries)
        untuned = [
            row
            for other in others
            if named or complete_setting(other.runs[0].config.entries) == setting
            for row in other.rows
        ]
        return TunedCheck(
            self.folder.name, list(searched), compare_untuned(self.rows, searched, untuned)
        )

    def _searched(self, search: Search | None) -> dict[str, list[str]]:
        """Return what was searched of every row, as far as that is recorded."""
        searched = {row.name: list[str]() for row in self.rows}
        return searched | ({row.name: list(row.spaces) for row in search.rows} if search else {})

    def report(
        self,
        page: str | PathLike[str] | None = None,
        *,
        opening: Runs | None = None,
        within: Path | None = None,
    ) -> Path:
        """Write the page and return where it is.

        Args:
            page: the HTML file, or a folder for it; index.html beside the runs by default.
            opening: fine-tuning runs that the page of a stream begins with.
            within: the folder that the user named, where it is one above the page's: no link below
                it is followed.
        """
        from syngap.bench.reporting.finetuning.comparison_page import (
            comparison_opening,
            write_comparison_page,
        )
        from syngap.bench.reporting.page import write_page

        place = self.folder if page is None else Path(page)
        if place.suffix != ".html":
            place = place / "index.html"
        within = within or place.parent
        make_folder(place.parent, within=within)
        if self.is_finetuning:
            write_comparison_page(self.runs, place, self.title, within=within)
        else:
            first = ""
            if opening is not None:
                link = relpath(opening.folder / "index.html", place.parent)
                first = comparison_opening(
                    opening.runs, opening.title, quote(Path(link).as_posix())
                )
            write_page(
                self.runs,
                place,
                self.title,
                self.surfaces,
                search_folder=self.folder,
                opening=first,
                within=within,
            )
        return place

    def _repr_markdown_(self) -> str:
        """Return what a notebook shows."""
        return self.markdown()


def check_results(folder: Path) -> list[TunedCheck]:
    """Check every experiment in a folder of results that has the record of a search.

    Untuned rows are those of experiments without one that have the same stream and model.

    Args:
        folder: of results; its known_failures.yaml names rows that are known to end below untuned
            ones, with the reason.
    """
    known = yaml_in(folder / KNOWN) if (folder / KNOWN).is_file() else {}
    with reading(folder / KNOWN):
        reasons = {
            name: {row: str(why) for row, why in rows.items()} for name, rows in known.items()
        }
    streams = [
        runs
        for path in experiment_folders(folder)
        if (runs := Runs(path)).runs and not runs.is_finetuning
    ]
    tuned = [runs for runs in streams if (runs.folder / "search" / SEARCH).is_file()]
    untuned = [runs for runs in streams if runs not in tuned]
    found = [
        replace(runs.check_tuned(untuned), known=reasons.pop(runs.folder.name, {}))
        for runs in tuned
    ]
    return found + [TunedCheck(name, [], {}, rows) for name, rows in reasons.items()]
