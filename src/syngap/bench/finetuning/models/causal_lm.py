"""A causal language model of transformers, from a folder of this machine.

transformers parses a GGUF file three times: for the tokenizer, the configuration and the weights.
That takes half a minute with SmolLM2 and two minutes with the vocabulary of Gemma. Here it is
parsed once, and what was read is kept in a folder that loads in a second. Some versions of
transformers make a wrong tokenizer of a GGUF file (5.17 of Gemma's): a tokenizer.json beside the
file is taken in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from syngap.bench.errors import UserError
from syngap.bench.finetuning.models.language_model import LanguageModel, Making
from syngap.bench.finetuning.texts import Texts
from syngap.bench.options import Count
from syngap.bench.registry import import_or_refuse

__all__ = ["causal_lm", "write_tokenizer"]

_LONG = 100_000  # characters of a text whose tokens are kept for all runs


def causal_lm(
    making: Making[Texts], *, folder: str, gguf: str | None = None, context: Count = 256
) -> LanguageModel:
    """Return a model that others trained; nothing is downloaded.

    Args:
        making: seed, device, and where the folder is.
        folder: its name, with the model and its tokenizer.
        gguf: the name of the GGUF file in it, where that is what holds the model; its tokenizer
            too, where the folder has no tokenizer.json.
        context: tokens of a window.
    """
    import_or_refuse("transformers", "model causal_lm", "pip install 'syngap[transformers]'")
    if gguf:
        import_or_refuse("gguf", "model causal_lm", "pip install gguf")
    place = (making.data or Path()) / folder
    if not place.is_dir():
        raise UserError(f"folder: there is no folder {place}; --data says where models are")
    tokenizer, model = _load(making, place, gguf)
    start = tokenizer.bos_token_id
    if start is None:
        start = model.config.bos_token_id
    if start is None:
        raise UserError(f"folder: the tokenizer in {place} has no token that begins a text (BOS)")

    def tokens_of(text: str) -> Mapping[str, Tensor]:
        found = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return {"tokens": torch.tensor(found)}

    @lru_cache(maxsize=32)  # runs of one process read each text once
    def encode(text: str) -> Tensor:
        if len(text) < _LONG:
            return tokens_of(text)["tokens"]
        name = f"tokens-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        return making.share(name, lambda: tokens_of(text), any_seed=True).tensors["tokens"]

    def logits(model: nn.Module, tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
        return found

    return LanguageModel(model.to(making.device), logits, encode, start, context)


def _load(making: Making[Texts], place: Path, gguf: str | None) -> tuple[Any, Any]:
    """Return the tokenizer and the model; a GGUF file is read once for all runs."""
    if gguf and making.share_folder is not None:
        return _read(making.share_folder("model", partial(_write, place, gguf)))
    return _read(place, gguf)


def _read(place: Path, gguf: str | None = None) -> tuple[Any, Any]:
    """Return the tokenizer and the model in a folder, or in a GGUF file of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    options: dict[str, Any] = {"local_files_only": True} | ({"gguf_file": gguf} if gguf else {})
    with _parsed_once(gguf):
        if gguf and (place / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(place, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
    return tokenizer, model


def _write(place: Path, gguf: str, folder: Path) -> None:
    """Write what a GGUF file holds to a folder, as transformers saves it."""
    tokenizer, model = _read(place, gguf)
    quantizer = getattr(model, "hf_quantizer", None)  # recent versions of transformers have one
    if quantizer is not None:
        quantizer.remove_quantization_config(model)  # weights are float32 now, and can be saved
    write_tokenizer(tokenizer, folder)
    model.save_pretrained(folder)


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write how a tokenizer encodes, and its special tokens, so that it is read as it is.

    Classes for one kind of model, such as that of Gemma, make some parts anew when they are read.
    What encoding plain text does not need, such as a template for chats, is not written.
    """
    from transformers import PreTrainedTokenizerFast

    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: getattr(tokenizer, name) for name in names}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, **special
    ).save_pretrained(folder)


@contextmanager
def _parsed_once(gguf: str | None) -> Iterator[None]:
    """Have transformers share one reader of a GGUF file, and one map of its names."""
    if not gguf:
        yield
        return
    package = import_or_refuse("gguf", "model causal_lm", "pip install gguf")
    before = package.GGUFReader, package.get_tensor_name_map
    package.GGUFReader, package.get_tensor_name_map = map(cache, before)
    try:
        yield
    finally:
        package.GGUFReader, package.get_tensor_name_map = before
