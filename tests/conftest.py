"""Settings and fixtures shared by every test."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Tests run in parallel processes, which would otherwise compete for the same cores.
torch.set_num_threads(1)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real datasets, where a machine keeps them beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs real datasets in ../shared/data beside the repository")
    return folder
