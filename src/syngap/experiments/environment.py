"""What a run ran on."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import syngap
from syngap.errors import UserError

__all__ = ["chosen_device", "environment", "processor"]


def chosen_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" stands for here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError('training.device: got "cuda", but torch finds no GPU here; "auto" or "cpu"')
    return torch.device(name)


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware, and the command by which the run was asked for."""
    on_gpu = device.type == "cuda"
    return {
        "syngap": syngap.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "command": shlex.join(["syngap", *sys.argv[1:]]),
    }


def processor() -> str:
    """Return the CPU's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
