"""Adapters of peft behind the gate, stopped half-way and resumed: the same weights, bit for bit.

With accumulated gradients and in bfloat16. What the adapters' importance is, and the labels that it
is estimated from, are in the Trainer's checkpoints.
"""

import tempfile

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from syngap.integrations.transformers import SynGAPTrainer

STEPS = 20
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = hf.LlamaConfig(vocab_size=28, num_attention_heads=2, eos_token_id=None, **SHAPE)
ROWS = (torch.arange(31) + torch.arange(1024).unsqueeze(1)) % 16  # counting, from anywhere
TEXT = [{"input_ids": row, "labels": row} for row in ROWS]


def trainer(folder: str) -> SynGAPTrainer:
    torch.manual_seed(0)
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", lora_dropout=0.1)
    model = get_peft_model(hf.LlamaForCausalLM(CONFIG), adapters)
    args = hf.TrainingArguments(
        folder,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        gradient_accumulation_steps=2,
        bf16=True,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
    )
    return SynGAPTrainer(model, args, train_dataset=TEXT, gate={"consolidation": 0.9})


def main(folder: str) -> None:
    whole = trainer(folder)
    whole.train()
    resumed = trainer(folder)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")

    losses = [[entry.get("loss") for entry in t.state.log_history[:-1]] for t in (whole, resumed)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    weights = [dict(t.model.named_parameters()) for t in (whole, resumed)]
    states = [t.gate.importance() for t in (whole, resumed)]
    assert states[0].keys() == {name for name in weights[0] if "lora" in name}
    for one, other in (weights, states):
        assert all(torch.equal(one[name], other[name]) for name in one)
    print(f"{len(states[0])} gated adapters; losses {losses[0][0]} to {losses[0][-1]}, twice alike")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
