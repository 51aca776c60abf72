"""Texts that a model writes itself."""

from __future__ import annotations

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
