"""Where the checkout is that the tests are part of."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
