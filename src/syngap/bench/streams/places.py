"""Where data sets are on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import platformdirs

from syngap.bench.errors import UserError

__all__ = ["check_plain", "find", "find_path", "home"]

VARIABLE = "SYNGAP_DATA"


def home() -> Path:
    """Return the default folder of data sets."""
    if variable := os.environ.get(VARIABLE):
        return Path(variable).expanduser()
    return _cache()


def find(data: Path | None, names: Sequence[str], how: str) -> Path:
    """Return the first of `names` in the folder `data`, else in SYNGAP_DATA, else in the cache.

    Each of the three may also be what is looked for itself.

    Args:
        data: the folder that the user named, or None.
        names: what the data set's folder or archive is called, the best first.
        how: the command that would fetch it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (Path(folder) / "coil100").mkdir()
        ...     find(Path(folder), ["coil100"], "syngap data coil100").name
        'coil100'
    """
    if data is not None:
        data = _check_exists(data)
    looked = []
    for root, called in _roots(data):
        itself = root.resolve()  # by its own name, whatever link or "." led there
        places = [itself] if itself.name in names else [root / name for name in names]
        for place in places:
            if _is_there(place):
                return place
        looked.append(f"{root} ({called})")
    raise UserError(
        f"found no {' or '.join(names)} in {', '.join(looked)}; "
        f'fetch it with "{how}" or name its folder with --data'
    )


def find_path(data: Path | None, path: str) -> Path:
    """Return the path that the option `path` names: absolute, or inside the folder `data`.

    Without `data` it is looked for in SYNGAP_DATA, where that is set, and in the current folder.
    """
    wanted = Path(path).expanduser()
    variable = os.environ.get(VARIABLE)
    roots = [_check_exists(data)] if data else [Path(r).expanduser() for r in (variable, ".") if r]
    places = [wanted] if wanted.is_absolute() else [root / wanted for root in roots]
    for place in places:
        if _is_there(place):
            return place
    raise UserError(
        f"stream.path: there is no {' and no '.join(str(place.absolute()) for place in places)}; "
        "give an absolute path, or one inside the folder that --data names"
    )


def check_plain(path: Path) -> None:
    """Refuse a pipe or a device, which would block for ever."""
    if _is_there(path) and not path.is_file():
        raise UserError(f"{path}: is not a plain file")


def _roots(data: Path | None) -> Iterator[tuple[Path, str]]:
    if data is not None:
        yield data, "--data"
    if variable := os.environ.get(VARIABLE):
        yield Path(variable).expanduser(), VARIABLE
    yield _cache(), "the default"


def _check_exists(data: Path) -> Path:
    data = data.expanduser()
    if not _is_there(data):
        raise UserError(f'--data: there is no folder "{data}"')
    return data


def _is_there(path: Path) -> bool:
    """Return whether something is at `path`; nothing is where no name can be so long."""
    try:
        return path.exists()
    except OSError:
        return False


def _cache() -> Path:

    return platformdirs.user_cache_path("syngap")
