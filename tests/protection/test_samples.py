"""Texts that a model writes itself."""

from __future__ import annotations

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
    """Starts with token 1 nearly always, never with 0; goes on with the token that comes next."""
    first = torch.tensor([1e-6, 0.9, *[0.1 / (TOKENS - 2)] * (TOKENS - 2)])
    follow = torch.full((TOKENS, TOKENS), 1e-9)
    follow[torch.arange(TOKENS), (torch.arange(TOKENS) + 1) % TOKENS] = 1.0
    follow[0] = first
    return Chain(follow)


def test_first_tokens_are_even_and_what_follows_is_the_models() -> None:
    texts = own_samples(chain(), 7000, length=3, start=0, generator=torch.Generator())
    counts = texts[:, 1].bincount(minlength=TOKENS)
    assert counts[0] == 0  # improbable
    assert (counts[1:] - 1000).abs().max() < 150  # five standard deviations
    assert torch.equal(texts[:, 2], (texts[:, 1] + 1) % TOKENS)


def test_the_model_draws_first_tokens_where_texts_are_not_varied() -> None:
    texts = own_samples(chain(), 2000, length=3, start=0, varied=False, generator=torch.Generator())
    assert 0.87 < (texts[:, 1] == 1).float().mean() < 0.93


def test_prompts_stay_as_they_are() -> None:
    prompts = torch.tensor([[3, 4], [5, 6]])
    texts = own_samples(chain(), 4, length=4, prompts=prompts, generator=torch.Generator())
    assert texts.tolist() == [[3, 4, 5, 6], [5, 6, 7, 0]] * 2


def test_a_generator_of_its_own_leaves_torchs_alone() -> None:
    before = torch.get_rng_state()
    own_samples(chain(), 4, length=6, start=0, generator=torch.Generator().manual_seed(1))
    own_samples(chain(), 4, length=6, start=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("varied", [True, False])
def test_the_shortest_text_has_the_start_and_one_token(varied: bool) -> None:
    assert own_samples(chain(), 3, length=2, start=1, varied=varied).shape == (3, 2)
