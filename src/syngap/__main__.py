"""The command `syngap`, also as `python -m syngap`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; without the packages it needs, say how to install them."""
    try:
        from syngap.bench.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "syngap").partition(".")[0] == "syngap":
            raise  # a mistake of ours, not a missing package
        sys.stderr.write(
            f"syngap: the command needs {error.name}, which is not installed; "
            "pip install 'syngap[bench]' brings all it needs\n"
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
