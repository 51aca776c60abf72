"""A sentence encoder of transformers, such as all-MiniLM-L6-v2, from a folder of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from syngap.bench.errors import UserError
from syngap.bench.finetuning.models.language_model import Making
from syngap.bench.finetuning.texts import Texts
from syngap.bench.options import Count, Positive
from syngap.bench.registry import import_or_refuse

__all__ = ["SCALE", "Encoder", "sentence_encoder"]

SCALE = 0.05  # √384 · 0.05 ≈ 1: the noise of an embedding is as long as the embedding


@dataclass(frozen=True)
class Encoder:
    """An encoder of texts before tuning.

    Args:
        model: takes tokens (N, T).
        embed: from the model and tokens to embeddings (N, width) of length 1.
        encode: from texts to their tokens (N, T), padded to one length.
        context: how many tokens of a text it sees.
        scale: standard deviation of an embedding, taken as the mean of a normal distribution. The
            KL to the former self is then half the squared distance over its square.
    """

    model: nn.Module
    embed: Callable[[nn.Module, Tensor], Tensor]
    encode: Callable[[Sequence[str]], Tensor]
    context: int
    scale: float = SCALE


def sentence_encoder(
    making: Making[Texts], *, folder: str, context: Count = 64, scale: Positive = SCALE
) -> Encoder:
    """Return an encoder that others trained: the mean over tokens, at length 1.

    Nothing is downloaded.

    Args:
        making: device, and where the folder is.
        folder: its name, with the model and its tokenizer.
        context: tokens of a text at most.
        scale: standard deviation of an embedding, for `protect` and other methods with anchors.
    """
    transformers = import_or_refuse(
        "transformers", "model sentence_encoder", "pip install 'syngap[transformers]'"
    )
    place = (making.data or Path()) / folder
    if not place.is_dir():
        raise UserError(f"folder: there is no folder {place}; --data says where models are")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(
        place, dtype=torch.float32, local_files_only=True
    )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # for another task: embeddings do not depend on it
    padding = tokenizer.pad_token_id
    if padding is None:
        raise UserError(f"folder: the tokenizer in {place} has no token for padding")

    @lru_cache(maxsize=32)  # runs of one process tokenize each text once
    def tokens_of(texts: tuple[str, ...]) -> Tensor:
        found = tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=context,
            return_tensors="pt",
        )
        tokens: Tensor = found["input_ids"]
        return tokens

    def embed(model: nn.Module, tokens: Tensor) -> Tensor:
        mask = tokens != padding
        tokens = tokens[:, : int(mask.sum(1).max())]  # without what is padding in every row
        mask = mask[:, : tokens.shape[1]]
        states: Tensor = model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        return normalize((states * weights).sum(1) / weights.sum(1), dim=1)

    return Encoder(
        model.to(making.device), embed, lambda texts: tokens_of(tuple(texts)), context, scale
    )
