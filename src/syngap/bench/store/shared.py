"""Tensors that several runs of an experiment use: the first run to need them makes them.

OUT/shared/DIGEST/tensors.safetensors   DIGEST is of all that the tensors depend on
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from syngap.bench.config.component import Value
from syngap.bench.errors import UserError
from syngap.bench.finetuning.models.language_model import Share, Shared
from syngap.bench.storage import make_folder, write
from syngap.bench.store.records import alone_in
from syngap.bench.training.checkpoint import pack, read_state

__all__ = ["share_in"]


def share_in(out: Path, depends_on: Mapping[str, Value]) -> Share:
    """Return what keeps tensors for all runs in `out`.

    Args:
        out: the folder of the experiment.
        depends_on: what tensors of other values may not be taken for.
    """

    def share(name: str, make: Callable[[], Mapping[str, Tensor]]) -> Shared:
        text = json.dumps({"name": name, **depends_on}, sort_keys=True)
        folder = out / "shared" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        path = folder / "tensors.safetensors"
        make_folder(folder, within=out)
        with alone_in(folder, wait=True, quiet=True):
            if not path.is_file():
                began = time.monotonic()
                tensors = {key: tensor.detach().cpu() for key, tensor in make().items()}
                seconds = time.monotonic() - began
                write(path, pack({"tensors": tensors, "seconds": seconds}), within=out)
        try:
            found = read_state(path)
            return Shared(found["tensors"], float(found["seconds"]))
        except UserError:
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}: damaged ({error}); remove it to make it again") from error

    return share
