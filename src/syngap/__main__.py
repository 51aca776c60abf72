"""`python -m syngap` is `syngap`."""

import sys

from syngap.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
