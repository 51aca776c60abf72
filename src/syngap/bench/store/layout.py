"""The names of the files of an experiment and of a run: nothing outside `store` knows them.

OUT/experiment.yaml          the whole experiment
OUT/ROW-SEED/                a run
    config.yaml              its configuration, complete
    environment.json         versions, hardware, command
    status.json              running, done or failed; steps; seconds of training
    accuracy.csv             R: after each task, the accuracy on every task, in percent
    metrics.jsonl            every evaluation during training, a line each
    checkpoint/              where to go on from: safetensors, no pickle
    error.txt                of a run that failed: where
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "ACCURACY",
    "CHECKPOINTS",
    "CONFIG",
    "ENVIRONMENT",
    "ERROR",
    "EXPERIMENT",
    "METRICS",
    "STATUS",
    "experiment_folders",
    "holds_experiment",
    "run_folders",
]

EXPERIMENT = "experiment.yaml"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
STATUS = "status.json"
ACCURACY = "accuracy.csv"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoint"
ERROR = "error.txt"


def holds_experiment(folder: Path) -> bool:
    """Return whether `folder` is that of an experiment."""
    return (folder / EXPERIMENT).is_file()


def experiment_folders(folder: Path) -> list[Path]:
    """Return the folders of experiments in `folder`, in the order of their names."""
    return sorted(path.parent for path in folder.glob(f"*/{EXPERIMENT}"))


def run_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` that have a configuration, in the order of their names."""
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
