"""A small GPT-2 learns a second language and keeps the first, of which it has its own samples."""

import copy

import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import pad

import syngap

WORDS, HELD_OUT = 16, 128


def language(seed: int, low: int, high: int) -> Tensor:
    """Make sentences of invented words in an order of their own: 0 begins one, 1 is a space."""
    chance = torch.Generator().manual_seed(seed)
    words = pad(torch.randint(low, high, (WORDS, 4), generator=chance), (0, 1), value=1)
    follows = torch.rand(WORDS, WORDS, generator=chance) ** 8
    said = [torch.randint(WORDS, (1024,), generator=chance)]
    for _ in range(5):
        said.append(torch.multinomial(follows[said[-1]], 1, generator=chance)[:, 0])
    return pad(words[torch.stack(said, 1)].flatten(1), (1, 0))


def train(model, optimizer: torch.optim.Optimizer, text: Tensor, steps: int, extra=lambda: 0.0):
    chance = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = text[torch.randint(HELD_OUT, len(text), (16,), generator=chance)]
        loss = extra() + model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def losses(model, *texts: Tensor) -> list[float]:
    return [float(model(text[:HELD_OUT], labels=text[:HELD_OUT]).loss) for text in texts]


torch.manual_seed(0)
shape = {"vocab_size": 28, "n_positions": 31, "n_embd": 64, "n_layer": 2, "n_head": 2}
shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
config = hf.GPT2Config(bos_token_id=0, eos_token_id=None, **shape)
old, new = language(0, 2, 18), language(100, 12, 28)
model = hf.GPT2LMHeadModel(config)  # its layers are Conv1D, and its head is the embedding
train(model, torch.optim.AdamW(model.parameters(), lr=5e-3), old, 300)
plain, found = copy.deepcopy(model), {"before": losses(model, old, new)}

protection = syngap.protect(model, syngap.own_samples(model, length=31))
optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
train(model, optimizer, new, 100, protection.loss)
found["protected"] = losses(model, old, new)
print(protection.report())
train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), new, 100)
found["AdamW"] = losses(plain, old, new)
for name, (old_loss, new_loss) in found.items():
    print(f"{name:9}  loss on old {old_loss:.2f}, on new {new_loss:.2f}")
assert found["protected"][0] < found["before"][0] + 0.1
assert found["protected"][1] < found["AdamW"][1]  # three times the rate, and it forgets less
