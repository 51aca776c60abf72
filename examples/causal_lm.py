"""A model learns a second language and keeps the first, of which it has what it writes itself."""

import copy
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as hf
from torch.nn.functional import pad

from syngap import rotate, unrotate
from syngap.integrations.transformers import SynGAPTrainer

WORDS, HELD_OUT, STEPS, FOLDER = 16, 128, 100, TemporaryDirectory()
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
PROTECTED = {"gate": {"consolidation": 0.9999}, "observe": False}
CONFIG = hf.LlamaConfig(vocab_size=28, num_attention_heads=2, eos_token_id=None, **SHAPE)


def language(seed: int, *letters: int) -> list[dict[str, torch.Tensor]]:
    """Make sentences of invented words in an order of their own: 0 begins one, 1 is a space."""
    chance = torch.Generator().manual_seed(seed)
    words = pad(torch.randint(*letters, (WORDS, 4), generator=chance), (0, 1), value=1)
    follows = torch.rand(WORDS, WORDS, generator=chance) ** 8
    said = [torch.randint(WORDS, (1024,), generator=chance)]
    for _ in range(5):
        said.append(torch.multinomial(follows[said[-1]], 1, generator=chance)[:, 0])
    text = pad(words[torch.stack(said, 1)].flatten(1), (1, 0))
    return [{"input_ids": row, "labels": row} for row in text]


def trained(kind: Any, model: Any, text: Any, steps: int, lr: float, said: Any = (), **own: Any):
    options = {"max_steps": steps, "learning_rate": lr, "per_device_train_batch_size": 16}
    common = {"save_strategy": "no", "report_to": "none", "use_cpu": True}
    args = hf.TrainingArguments(FOLDER.name, **options, **common)
    trainer = kind(copy.deepcopy(model), args, train_dataset=text[HELD_OUT:], **own)
    if len(said):
        trainer.consolidate([{"input_ids": sentence} for sentence in said])
    trainer.train()
    return trainer


def main(seed: int = 0) -> None:
    old, new = language(seed, 2, 18), language(seed + 100, 12, 28)
    hf.set_seed(seed)
    first = trained(hf.Trainer, hf.LlamaForCausalLM(CONFIG), old, 300, 5e-3)
    plain = trained(hf.Trainer, first.model, new, STEPS, 1e-3)
    said = first.model.generate(torch.zeros(256, 1).long(), do_sample=True, top_k=0, max_length=31)
    # Its sentences turn the weights into directions, and the gate closes those that matter.
    rotate(turned := copy.deepcopy(first.model), said)
    gated = trained(SynGAPTrainer, turned, new, 2 * STEPS, 1e-3, said, **PROTECTED)
    unrotate(gated.model)  # a plain model again, to be saved
    for text in (new, old):
        losses = [each.evaluate(text[:HELD_OUT])["eval_loss"] for each in (first, plain, gated)]
        print("first, plain, gated:", *(f"{loss:.2f}" for loss in losses))
        assert losses[2] < losses[1]


if __name__ == "__main__":
    main()
