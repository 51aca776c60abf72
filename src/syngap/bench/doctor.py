"""The checks of `syngap doctor`: what is installed, what is missing, how to get it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import syngap
from syngap.bench import methods, models, streams
from syngap.bench.config.experiment import shipped
from syngap.bench.errors import UserError
from syngap.bench.finetuning.methods import registry as finetuning_methods
from syngap.bench.runner import loggers
from syngap.bench.store.environment import processor
from syngap.bench.streams import cifar100, places
from syngap.messages import count_of

__all__ = ["findings"]

_REQUIREMENTS = (
    "pydantic",
    "typer",
    "rich",
    "PyYAML",
    "safetensors",
    "pillow",
    "numpy",
    "scikit-learn",
    "matplotlib",
    "platformdirs",
    "requests",
    "annotated-types",
)
_EXTRAS = {
    "ray": ("ray", "to run on many machines: syngap run --engine ray"),
    "tensorboard": ("tensorboard", "to log there: syngap run --log tensorboard"),
    "mlflow": ("mlflow", "to log there: syngap run --log mlflow"),
    "wandb": ("wandb", "to log there: syngap run --log wandb"),
    "lightning": ("lightning", "the callback for it: syngap.integrations.lightning"),
    "transformers": ("transformers", "the Trainer for it: syngap.integrations.transformers"),
    "avalanche": ("avalanche-lib", "the plugin for it: syngap.integrations.avalanche"),
    "dev": ("pytest", "to run the tests and checks of a checkout"),
    "docs": ("mkdocs-material", "to build the documentation"),
    "peers": ("backpack-for-pytorch", "to compare speed with other packages"),
}


def findings() -> Iterator[str]:
    """Yield the lines of `syngap doctor`."""
    yield f"syngap {syngap.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"torch {torch.__version__}, {processor()}, {count_of(os.cpu_count() or 1, 'core')}"
    yield f"device: {_gpus() or 'no GPU that torch can use; runs go to the CPU'}"
    for name in _REQUIREMENTS:
        if _version(name) is None:
            yield f"{name}: missing; pip install --upgrade 'syngap[bench]' brings it"
    yield ", ".join(f"{name} {_version(name)}" for name in _REQUIREMENTS if _version(name))
    yield _data("cifar100", cifar100.NAMES)
    yield _data("core50", ("core50_128x128", "core50_32x32"))
    for folder in (Path.cwd(), places.home()):
        yield f"free disk at {folder}: {_free(folder):.1f} GB"
    yield f"experiments: {', '.join(shipped())}"
    yield f"fine-tuning experiments: {', '.join(shipped('finetuning'))}"
    yield f"fine-tuning methods: {', '.join(finetuning_methods.names())}"
    yield f"streams: {', '.join(streams.registry.names())}"
    yield f"models: {', '.join(models.registry.names())}"
    yield f"methods: {', '.join(methods.registry.names())}"
    yield f"loggers: {', '.join(loggers.registry.names())}"
    for extra, (name, adds) in _EXTRAS.items():
        state = "installed" if _version(name) else f"not installed; pip install 'syngap[{extra}]'"
        yield f"extra {extra} ({adds}): {state}"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return ""
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _data(name: str, folders: Sequence[str]) -> str:
    try:
        return f"{name}: {places.find(None, folders, '')}"
    except UserError:
        return f"{name}: not found; `syngap data {name}` fetches it, --data names its folder"


def _free(folder: Path) -> float:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 1e9


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
