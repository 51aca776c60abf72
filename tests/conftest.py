"""Settings shared by every test."""

import os

import torch
from hypothesis import settings

# Tests run in parallel processes, which would otherwise compete for the same cores.
torch.set_num_threads(1)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
