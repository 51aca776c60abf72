"""Texts that a model writes itself."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import torch
from torch import Tensor, nn

from syngap import own_samples

TOKENS = 8


class Chain(nn.Module):
    """A language model whose next token depends on the last one alone."""

    def __init__(self, chances: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(chances.log())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of what comes after each token."""
        return self.logits[tokens]


def chain() -> Chain:
    """Goes on with token 1 nine times of ten after token 0, else with the token that comes next."""
    follow = torch.full((TOKENS, TOKENS), 1e-9)
    follow[torch.arange(TOKENS), (torch.arange(TOKENS) + 1) % TOKENS] = 1.0
    follow[0] = torch.tensor([0.0, 0.9, *[0.1 / (TOKENS - 2)] * (TOKENS - 2)])
    return Chain(follow)


def test_texts_are_drawn_as_the_model_believes() -> None:
    texts = own_samples(chain(), 2000, length=3, start=0, generator=torch.Generator())
    assert (texts[:, 0] == 0).all()
    assert 0.87 < (texts[:, 1] == 1).float().mean() < 0.93  # four standard deviations
    assert torch.equal(texts[:, 2], (texts[:, 1] + 1) % TOKENS)


def test_a_high_temperature_draws_more_evenly() -> None:
    texts = own_samples(chain(), 2000, length=2, start=0, temperature=100.0)
    assert (texts[:, 1] == 1).float().mean() < 0.25


def test_prompts_stay_as_they_are() -> None:
    prompts = torch.tensor([[3, 4], [5, 6]])
    texts = own_samples(chain(), 4, length=4, prompts=prompts, generator=torch.Generator())
    assert texts.tolist() == [[3, 4, 5, 6], [5, 6, 7, 0]] * 2


def test_a_generator_of_its_own_leaves_torchs_alone() -> None:
    before = torch.get_rng_state()
    own_samples(chain(), 4, length=6, start=0, generator=torch.Generator().manual_seed(1))
    own_samples(chain(), 4, length=6, start=0)
    assert torch.equal(torch.get_rng_state(), before)


@dataclass
class Chat:
    """A tokenizer with a chat template; its tokens are characters and what is in <>."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    special: list[str] = field(default_factory=list)

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize
        assert self.chat_template is not None
        template = jinja2.Template(self.chat_template)
        return template.render(
            messages=messages, bos_token=self.bos_token, eos_token=self.eos_token
        )

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        return {"input_ids": [self.number(part) for part in re.findall("<[^>]*>|.", text, re.S)]}

    def number(self, part: str) -> int:
        """Return the number of a token; those in <> have numbers below that of a newline."""
        if len(part) > 1 and part not in self.special:
            self.special.append(part)
        return ord(part) if len(part) == 1 else self.special.index(part)

    def decode(self, tokens: list[int]) -> str:
        known = dict(enumerate(self.special))
        return "".join(known.get(token, chr(token)) for token in tokens)

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.number(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.number(self.eos_token)


def letters() -> nn.Module:
    """A model of characters that writes "a" always."""
    follow = torch.full((128, 128), 1e-9)
    follow[:, ord("a")] = 1.0
    return Chain(follow)


CHATS = {
    "ChatML": (
        "<im_start>",
        "<im_end>",
        "<im_start>system\nBe kind<im_end>\n{% for m in messages %}<im_start>{{m.role}}\n"
        "{{m.content}}<im_end>\n{% endfor %}",
        "<im_start>user\n",
    ),
    "no token begins a text": (
        None,
        "<im_end>",
        "{% for m in messages %}<im_start>{{m.role}}\n{{m.content}}<im_end>\n{% endfor %}",
        "<im_start>user\n",
    ),
    "headers": (
        "<begin>",
        "<eot>",
        "{{bos_token}}{% for m in messages %}<h>{{m.role}}</h>\n\n{{m.content}}<eot>{% endfor %}",
        "<begin><h>user</h>\n\n",
    ),
    "instructions": (
        "<s>",
        "</s>",
        "{{bos_token}}{% for m in messages %}{% if m.role == 'user' %}[INST] {{m.content}} [/INST]"
        "{% else %} {{m.content}} {{eos_token}}{% endif %}{% endfor %}",
        "<s>[INST] ",
    ),
    "an answer ends otherwise than a text": (
        "<bos>",
        "<eos>",
        "{{bos_token}}{% for m in messages %}<turn>{{m.role}}\n{{m.content}}<end>\n{% endfor %}",
        "<bos><turn>user\n",
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_begins_with_a_users_turn(name: str) -> None:
    bos, eos, template, expected = CHATS[name]
    tokenizer = Chat(template, bos, eos)
    length = len(tokenizer(expected, add_special_tokens=False)["input_ids"]) + 2
    (text,) = own_samples(letters(), 1, length=length, tokenizer=tokenizer).tolist()
    assert tokenizer.decode(text) == expected + "aa"


@pytest.mark.parametrize("start", [{"start": 65}, {"prompts": [[65]]}])
def test_what_texts_begin_with_may_be_chosen_beside_a_tokenizer(start: dict[str, Any]) -> None:
    bos, eos, template, _ = CHATS["ChatML"]
    texts = own_samples(letters(), 1, length=2, tokenizer=Chat(template, bos, eos), **start)
    assert texts.tolist() == [[65, ord("a")]]


def test_a_tokenizer_without_a_chat_template_changes_nothing() -> None:
    with pytest.raises(ValueError, match="no token is known that texts begin with"):
        own_samples(letters(), 1, tokenizer=Chat(None, None, None))


@pytest.mark.parametrize(
    "prompts", ["text", ["text"], [[1, 2], [3]], [1, 2], [[0.5]], [[]], [[-1]]]
)
def test_prompts_that_are_not_tokens_are_refused(prompts: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="prompts must be token numbers"):
        own_samples(chain(), 1, length=4, prompts=prompts)


@pytest.mark.parametrize("start", ["<bos>", 1.0, -1, True, [1]])
def test_a_start_that_is_no_number_of_a_token_is_refused(start: Any) -> None:
    with pytest.raises(ValueError, match=r"start must be the number of a token, got .*bos_token_"):
        own_samples(chain(), 1, length=4, start=start)


class Writer(nn.Sequential):
    """Generates as a model of transformers."""

    config = SimpleNamespace(bos_token_id=0)

    def generate(self, tokens: Tensor, **options: Any) -> Tensor:
        return tokens + self(tokens).argmax(-1)


@pytest.mark.parametrize("kind", [nn.Sequential, Writer])
@pytest.mark.parametrize("first", [{"start": 50}, {"prompts": [[1, 50]]}])
def test_a_token_that_the_model_has_not_is_named(kind: Any, first: dict[str, Any]) -> None:
    model = kind(nn.Embedding(20, 8), nn.Linear(8, 20))
    with pytest.raises(ValueError, match="largest token is 50, and the model has 20"):
        own_samples(model, 2, length=4, **first)


@pytest.mark.parametrize("name", ["count", "length", "batch_size", "temperature"])
@pytest.mark.parametrize("value", ["4", 0, -1, None])
def test_numbers_out_of_range_are_named(name: str, value: Any) -> None:
    if (name, value) != ("batch_size", None):
        options: dict[str, Any] = {"count": 2, "length": 4} | {name: value}
        with pytest.raises(ValueError, match=f"{name} must be .*got"):
            own_samples(chain(), start=0, **options)


def test_texts_longer_than_the_model_sees_are_refused() -> None:
    model = chain()
    model.config = SimpleNamespace(max_position_embeddings=4)  # type: ignore[assignment]
    assert own_samples(model, 1, length=4, start=0, generator=torch.Generator()).shape == (1, 4)
    with pytest.raises(ValueError, match="length is 5, and the model has 4 positions"):
        own_samples(model, 1, length=5, start=0)


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 3), nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.LazyLinear(3))]
)
def test_a_model_that_writes_no_texts_is_refused(model: nn.Module) -> None:
    with pytest.raises(TypeError, match="only a language model has own samples"):
        own_samples(model, 2, length=4, start=0)
    with pytest.raises(ValueError, match="A model that writes no texts has no own samples"):
        own_samples(model, 2, length=4)
