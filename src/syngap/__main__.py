"""`python -m syngap` is `syngap`."""

import sys

from syngap.cli import main

if __name__ == "__main__":
    sys.exit(main())
