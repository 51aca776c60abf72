"""A folder of results: experiments in folders of their own, with the searches beside their runs.

DIR/NAME/experiment.yaml     an experiment; its runs are packed beside it
DIR/NAME/search/             what `syngap tune` wrote, where the experiment's values were searched
    search.yaml              spaces, sampler, what was widened, chosen values
    trials.csv               every trial, a line each
"""

from __future__ import annotations

from pathlib import Path

from syngap.bench.errors import UserError
from syngap.bench.reporting.headline import best_row
from syngap.bench.reporting.rows import Row, rows
from syngap.bench.reporting.searches import SEARCH, Search, read_search
from syngap.bench.store.folder_reader import Run, read_runs
from syngap.bench.store.layout import experiment_folders, holds_experiment
from syngap.messages import nearest

__all__ = ["Results", "holds_experiments"]


def holds_experiments(folder: Path) -> bool:
    """Return whether `folder` is not an experiment itself but the parent of some."""
    return not holds_experiment(folder) and bool(experiment_folders(folder))


class Results:
    """The experiments in `folder` by name, each read once.

    Args:
        folder: holds a folder for each, with the name of the experiment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, list[Run]] = {}
        self._rows: dict[str, list[Row]] = {}

    @property
    def place(self) -> str:
        """The folder as a relative path; of an absolute path, its last name."""
        return self.folder.name if self.folder.is_absolute() else self.folder.as_posix()

    def names(self) -> list[str]:
        """Return the experiments that are there, in the order of their names."""
        return [path.name for path in experiment_folders(self.folder)]

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

    def row(self, name: str, row: str, *, finished: bool = True) -> Row:
        """Return one row.

        Args:
            name: of the experiment.
            row: its name. Or "best:er", the row of that method with the highest ACC, and "best", of
                all but joint training: chosen by the numbers that are then shown, so optimistic.
                Or "validated", the row with the highest ACC in the search, which is not.
            finished: whether it must have a finished seed.
        """
        done = [found for found in self.rows(name) if found.seeds or not finished]
        if row == "validated":
            row = self._validated(name)
        kind, _, method = row.partition(":")
        if kind == "best":
            best = best_row(
                [each for each in done if each.method == method or (not method and not each.joint)]
            )
            if best is None:
                raise UserError(f'{self.folder / name}: no finished row of the method "{method}"')
            return best
        for found in done:
            if found.name == row:
                return found
        known = [found.name for found in done]
        hint = nearest(row, known) or f"; there are {', '.join(known) or 'none'}"
        raise UserError(f'{self.folder / name}: no finished row "{row}"{hint}')

    def search(self, name: str) -> Search | None:
        """Return the search that chose the values of an experiment, None where there was none."""
        if not (self.folder / name / SEARCH).exists():
            return None
        return read_search(self.folder / name, self.rows(name))

    def _validated(self, name: str) -> str:
        """Return the row that the search of an experiment scored highest, joint training apart."""
        joint = {row.name for row in self.rows(name) if row.joint}
        search = self.search(name)
        scores = {
            row.name: row.accuracy
            for row in (search.rows if search else ())
            if row.accuracy is not None and row.name not in joint
        }
        if not scores:
            raise UserError(f"{self.folder / name}: no search there that has chosen a row")
        return max(scores, key=lambda row: scores[row])

    def search_place(self, name: str) -> str:
        """Return the folder of an experiment's search, as a document names it."""
        return f"{self.place}/{name}/{SEARCH}"
