"""A language model learns a second language in a Trainer, and keeps the first without its texts.

`protect=` takes sentences that the model writes itself. The same training without it forgets.
"""

import copy
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as hf
from torch.nn.functional import pad

import syngap
from syngap.integrations.transformers import SynGAPTrainer

WORDS, HELD_OUT, STEPS, FOLDER = 16, 128, 200, TemporaryDirectory()
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SHAPE |= {"vocab_size": 28, "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": None}


def language(seed: int, *letters: int) -> list[dict[str, torch.Tensor]]:
    """Make sentences of invented words in an order of their own: 0 begins one, 1 is a space."""
    chance = torch.Generator().manual_seed(seed)
    words = pad(torch.randint(*letters, (WORDS, 4), generator=chance), (0, 1), value=1)
    follows = torch.rand(WORDS, WORDS, generator=chance) ** 8
    order = [torch.randint(WORDS, (1024,), generator=chance)]
    for _ in range(5):
        order.append(torch.multinomial(follows[order[-1]], 1, generator=chance)[:, 0])
    text = pad(words[torch.stack(order, 1)].flatten(1), (1, 0))
    return [{"input_ids": row, "labels": row} for row in text]


def trained(kind: Any, model: Any, text: Any, steps: int, lr: float, **own: Any) -> Any:
    options = {"max_steps": steps, "learning_rate": lr, "per_device_train_batch_size": 16}
    common = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = hf.TrainingArguments(FOLDER.name, **options, **common)
    trainer = kind(copy.deepcopy(model), args, train_dataset=text[HELD_OUT:], **own)
    trainer.train()
    return trainer


def main(seed: int = 0) -> None:
    old, new = language(seed, 2, 18), language(seed + 100, 12, 28)
    hf.set_seed(seed)
    first = trained(hf.Trainer, hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)), old, 300, 5e-3)
    plain = trained(hf.Trainer, first.model, new, STEPS, 1e-3)
    known = syngap.own_samples(first.model, 256, length=31)
    kept = trained(SynGAPTrainer, first.model, new, STEPS, 1e-3, protect=known)
    print(kept.protection.report())
    runs = (first, plain, kept)
    on_old, on_new = ([run.evaluate(t[:HELD_OUT])["eval_loss"] for run in runs] for t in (old, new))
    for name, *losses in zip(("first", "Trainer", "protected"), on_old, on_new, strict=True):
        print("{:9} loss on the old language {:.2f}, on the new {:.2f}".format(name, *losses))
    assert on_old[2] - on_old[0] < (on_old[1] - on_old[0]) / 5  # forgets less than a fifth
    assert on_new[2] < on_new[0] / 5


if __name__ == "__main__":
    main()
