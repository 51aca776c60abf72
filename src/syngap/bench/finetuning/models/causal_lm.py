"""A causal language model of transformers, from a folder of this machine."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from syngap.bench.errors import UserError
from syngap.bench.finetuning.models.language_model import LanguageModel, Making
from syngap.bench.finetuning.texts import Texts
from syngap.bench.options import Count
from syngap.bench.registry import import_or_refuse

__all__ = ["causal_lm"]


def causal_lm(
    making: Making[Texts], *, folder: str, gguf: str | None = None, context: Count = 256
) -> LanguageModel:
    """Return a model that others trained; nothing is downloaded.

    Args:
        making: seed, device, and where the folder is.
        folder: its name, with the model and its tokenizer.
        gguf: the name of the GGUF file in it, where that is what holds the model.
        context: tokens of a window.
    """
    transformers = import_or_refuse(
        "transformers", "model causal_lm", "pip install 'syngap[transformers]'"
    )
    if gguf:
        import_or_refuse("gguf", "model causal_lm", "pip install gguf")
    place = (making.data or Path()) / folder
    if not place.is_dir():
        raise UserError(f"folder: there is no folder {place}; --data says where models are")
    options: dict[str, Any] = {"local_files_only": True} | ({"gguf_file": gguf} if gguf else {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
    start = tokenizer.bos_token_id
    if start is None:
        start = model.config.bos_token_id
    if start is None:
        raise UserError(f"folder: the tokenizer in {place} has no token that begins a text (BOS)")

    @lru_cache(maxsize=32)  # runs of one process tokenize each text once
    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def logits(model: nn.Module, tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
        return found

    return LanguageModel(model.to(making.device), logits, encode, start, context)
