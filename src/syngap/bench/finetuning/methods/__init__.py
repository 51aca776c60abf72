"""Ways of fine-tuning: one file, one method.

A method is a class whose constructor takes a `Setting` and keyword-only options; `method` has the
base class and `peft_method` that of adapters. Interpolation with the start is no method: every
method is evaluated with it. Another package adds one by an entry point of the group
"syngap.finetuning_methods".
"""

from syngap.bench.finetuning.methods.method import Method
from syngap.bench.registry import Registry

__all__ = ["Method", "registry"]

_HERE = "syngap.bench.finetuning.methods"

registry = Registry(
    "fine-tuning method",
    "syngap.finetuning_methods",
    {
        "adamw": f"{_HERE}.adamw:AdamW",
        "sgd": f"{_HERE}.sgd:SGD",
        "lora": f"{_HERE}.lora:LoRA",
        "osf": f"{_HERE}.osf:OSF",
        "corda": f"{_HERE}.corda:CorDA",
        "l2_sp": f"{_HERE}.l2_sp:L2SP",
        "ewc": f"{_HERE}.ewc:EWC",
        "kronecker_ewc": f"{_HERE}.kronecker_ewc:KroneckerEWC",
        "kl": f"{_HERE}.kl:KL",
        "own_samples": f"{_HERE}.own_samples:OwnSamples",
        "crispedit": f"{_HERE}.crispedit:CrispEdit",
        "mofo": f"{_HERE}.mofo:MoFO",
        "freeze": f"{_HERE}.freeze:Freeze",
        "replay": f"{_HERE}.replay:Replay",
        "protect": f"{_HERE}.protect:Protect",
        "gate": f"{_HERE}.gate:Gate",
        "teacher": f"{_HERE}.teacher:Teacher",
        "larger_batch": f"{_HERE}.controls:LargerBatch",
        "noise_anchors": f"{_HERE}.controls:NoiseAnchors",
        "random_directions": f"{_HERE}.controls:RandomDirections",
        "shuffled_importance": f"{_HERE}.controls:ShuffledImportance",
    },
)
