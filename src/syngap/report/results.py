"""A folder of results: several experiments, each in a folder of its own, each read once."""

from __future__ import annotations

from pathlib import Path

from syngap.errors import UserError, nearest
from syngap.experiments.folder import Run, read_runs
from syngap.report.rows import Row, rows
from syngap.report.searches import Search, read_search

__all__ = ["Results", "holds_experiments"]


def holds_experiments(folder: Path) -> bool:
    """Return whether `folder` is not an experiment itself but the parent of some."""
    return not (folder / "experiment.yaml").is_file() and any(folder.glob("*/experiment.yaml"))


class Results:
    """The experiments in `folder` by name.

    Args:
        folder: holds a folder for each, with the name of the experiment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, list[Run]] = {}
        self._rows: dict[str, list[Row]] = {}

    @property
    def place(self) -> str:
        """The folder as it was given; of one that begins at this machine's root, the last name."""
        return self.folder.name if self.folder.is_absolute() else self.folder.as_posix()

    def names(self) -> list[str]:
        """Return the experiments that are there, in the order of their names."""
        return sorted(path.parent.name for path in self.folder.glob("*/experiment.yaml"))

    def runs(self, name: str) -> list[Run]:
        """Return every run of an experiment."""
        if name not in self._runs:
            if not self.folder.is_dir():
                raise UserError(f"{self.folder}: no such folder; --results gives another")
            known = self.names()
            if name not in known:
                hint = nearest(name, known) or f"; there are {', '.join(known) or 'none'}"
                raise UserError(f'{self.folder}: no experiment "{name}"{hint}')
            self._runs[name] = read_runs(self.folder / name)
        return self._runs[name]

    def rows(self, name: str) -> list[Row]:
        """Return the rows of an experiment's table."""
        if name not in self._rows:
            self._rows[name] = rows(self.runs(name))
        return self._rows[name]

    def search(self, name: str) -> Search | None:
        """Return the search that chose the values of an experiment, None where there was none."""
        return read_search(self.folder / name, self.rows(name))

    def row(self, name: str, row: str, *, finished: bool = True) -> Row:
        """Return one row.

        Args:
            name: of the experiment.
            row: its name, or "best:er" for the row of that method with the highest ACC: chosen
                by the very numbers that are then shown, which flatters it.
            finished: whether it must have a finished seed.
        """
        done = [found for found in self.rows(name) if found.seeds or not finished]
        if row.startswith("best:"):
            method = row.removeprefix("best:")
            same = [found for found in done if found.method == method and found.seeds]
            if not same:
                raise UserError(f'{self.folder / name}: no finished row of the method "{method}"')
            return max(same, key=lambda found: sum(found.values["ACC"].values()) / len(found.seeds))
        for found in done:
            if found.name == row:
                return found
        known = [found.name for found in done]
        hint = nearest(row, known) or f"; there are {', '.join(known) or 'none'}"
        raise UserError(f'{self.folder / name}: no finished row "{row}"{hint}')
