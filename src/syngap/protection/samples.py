"""Texts that a language model writes itself: known inputs where there are no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from syngap.messages import count_of, names_arguments
from syngap.optim.checks import check_number, check_whole
from syngap.optim.predictions import Progress, as_it_was
from syngap.optim.scores import sample_labels
from syngap.protection.hints import vocabulary_hint
from syngap.protection.refusals import require_module

__all__ = ["own_samples"]

_PROMPTS = (
    "prompts must be token numbers of shape (N, T), all of one length, such as "
    'tokenizer(["..."])["input_ids"]'
)


@names_arguments()
@torch.no_grad()
def own_samples(
    model: nn.Module,
    count: int = 256,
    *,
    length: int = 256,
    prompts: Tensor | Sequence[Sequence[int]] | None = None,
    start: int | None = None,
    tokenizer: Any = None,
    temperature: float = 1.0,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Return texts (count, length) that a language model samples, as tokens.

    A text goes on after a token that ends it: a chat with its next turn, others with a new text.
    Pass the tokenizer of a model that was tuned to chat: texts then begin with a user's turn, and
    the model writes questions of many kinds, and answers (Magpie, Xu 2024).

    Args:
        model: takes tokens (N, T) and returns logits (N, T, tokens), or an output that has them. A
            model of transformers samples by its own `generate`, with a cache.
        count: how many texts.
        length: how many tokens each has, prompt and start token included.
        prompts: what texts begin with, as tokens of one length: rows of a tensor, taken in turn.
        start: the token that texts begin with where there are no prompts; None is the
            `bos_token_id` of the model's configuration.
        tokenizer: where it has a chat template, and there are no prompts and no start, texts begin
            with what the template puts before a user's words, without a system prompt.
        temperature: divides the logits; 1 samples what the model believes.
        batch_size: so many texts are written at a time; None is 256 by `generate`, else 64.
        generator: of the random numbers; None draws from torch's own, whose states are afterwards
            what they were, so that a second call samples the same texts.
        progress: called after each batch with the number of texts done and of all.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
        >>> own_samples(model, 3, length=4, start=0).shape
        torch.Size([3, 4])
    """
    require_module(model, "own_samples")
    generates = generator is None and hasattr(model, "generate") and hasattr(model, "config")
    if batch_size is None:
        batch_size = 256 if generates else 64  # without a cache logits of all places are made
    for name, value, least in (("count", count, 1), ("length", length, 2)):
        check_whole(name, value, least)
    check_whole("batch_size", batch_size, 1)
    check_number("temperature", temperature, "above 0", lambda value: value > 0)
    device = next(model.parameters()).device
    if prompts is None and start is None and getattr(tokenizer, "chat_template", None):
        prompts = [_users_turn(tokenizer)]
    beginnings = _beginnings(model, prompts, start)
    first = beginnings.to(device)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and length > positions:
        raise ValueError(f"length is {length}, and the model has {count_of(positions, 'position')}")
    if first.shape[1] >= length:
        raise ValueError(
            f"prompts have {count_of(first.shape[1], 'token')}, and length is {length}"
        )
    texts = []
    with as_it_was(model, None), _explained_by(beginnings, model):
        for done in range(0, count, batch_size):
            rows = torch.arange(done, min(count, done + batch_size), device=device) % len(first)
            texts.append(
                _generated(model, first[rows], length, temperature)
                if generates
                else _continued(model, first[rows], length, temperature, generator)
            )
            if progress is not None:
                progress(min(count, done + batch_size), count)
    return torch.cat(texts)


@contextmanager
def _explained_by(tokens: Tensor, model: nn.Module) -> Iterator[None]:
    """Say that texts begin with a token which the model does not have, where that is so."""
    try:
        yield
    except (IndexError, RuntimeError, TypeError) as error:
        if not (hint := next(vocabulary_hint(model, [tokens]), "")):
            raise
        raise ValueError(
            f"start or prompts have a token outside of the model's vocabulary. {hint}"
        ) from error


def _users_turn(tokenizer: Any) -> list[int]:
    """Return the tokens that begin a user's turn: what both turns of a user have before them."""
    said = ("syngap-0", "syngap-1", "syngap-2")
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    chat: str = tokenizer.apply_chat_template(messages, tokenize=False)
    one, other = (
        tokenizer(chat.split(said[place])[0], add_special_tokens=False)["input_ids"]
        for place in (0, 2)
    )
    tokens: list[int] = []
    while one[: -len(tokens) or None] and one[-len(tokens) - 1 :] == other[-len(tokens) - 1 :]:
        tokens = one[-len(tokens) - 1 :]
    ends, first = tokenizer.eos_token_id, tokenizer.bos_token_id
    while tokens and (tokens[0] == ends or not tokenizer.decode(tokens[:1]).strip()):
        del tokens[0]
    if first is not None and one[:1] == [first] != tokens[:1]:
        tokens.insert(0, first)
    return tokens


def _beginnings(model: nn.Module, prompts: Any, start: int | None) -> Tensor:
    if prompts is not None:
        try:
            found = torch.as_tensor(prompts, device="cpu")
        except (TypeError, ValueError) as error:
            raise TypeError(f"{_PROMPTS}: {error}") from error
        if found.dim() != 2 or found.is_floating_point() or not found.numel():
            raise ValueError(f"{_PROMPTS}, got {found.dtype} {tuple(found.shape)}")
        if found.min() < 0:
            raise ValueError(f"{_PROMPTS}, got {int(found.min())}")
        return found.long()
    if start is None:
        start = getattr(getattr(model, "config", None), "bos_token_id", None)
    if start is None:
        raise ValueError(
            "no token is known that texts begin with (config.bos_token_id of the model): "
            "pass start= or prompts=. A model that writes no texts has no own samples: give "
            "protect() inputs like those that it was trained on"
        )
    try:
        number = -1 if isinstance(start, bool) else index(start)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(
            f"start must be the number of a token, got {start!r}: pass tokenizer.bos_token_id, or "
            'another one, as from tokenizer.convert_tokens_to_ids("...")'
        )
    return torch.tensor([[number]], device="cpu")


def _generated(model: nn.Module, tokens: Tensor, length: int, temperature: float) -> Tensor:
    more = length - tokens.shape[1]
    with _plain_generation(model):
        written: Tensor = model.generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=temperature,
            max_new_tokens=more,
            eos_token_id=None,
            pad_token_id=int(tokens[0, 0]),
        )
    return written


@contextmanager
def _plain_generation(model: nn.Module) -> Iterator[None]:
    """Let `generate` sample what the model believes, without penalties and forbidden words.

    A model's own settings count for every argument that is left out. A wrapper, as of peft, gives
    its own to the model inside.
    """
    settings = {
        module: module.__dict__["generation_config"]
        for module in model.modules()
        if "generation_config" in module.__dict__
    }
    try:
        for module, its in settings.items():
            module.__dict__["generation_config"] = type(its)()
        yield
    finally:
        for module, its in settings.items():
            module.__dict__["generation_config"] = its


def _continued(
    model: nn.Module,
    tokens: Tensor,
    length: int,
    temperature: float,
    generator: torch.Generator | None,
) -> Tensor:
    while tokens.shape[1] < length:
        try:
            output: Any = model(tokens)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            raise TypeError(
                f"{type(model).__name__} does not take tokens of shape {tuple(tokens.shape)} "
                f"({error}): only a language model has own samples"
            ) from error
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != tokens.shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(
                f"{type(model).__name__} must return logits of shape (N, T, tokens) for tokens of "
                f"shape (N, T), got {got} for {tuple(tokens.shape)}: only a language model has "
                "own samples"
            )
        drawn = sample_labels(logits[:, -1] / temperature, generator)
        tokens = torch.cat([tokens, drawn.unsqueeze(1)], 1)
    return tokens
