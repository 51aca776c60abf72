"""Ways of learning from a stream: one file, one method.

What methods share: `method` and `descent` (base classes), `learner` (the network and its data),
`average` and `teacher` (options), `guard` (finite numbers), `states` (checkpoints). A new method is
a file here and a line in `registry`. Another package adds one by an entry point of the group
"syngap.methods": a `Method` whose constructor takes a `Learner` and keyword-only options.
"""

from syngap.bench.methods.learner import Learner
from syngap.bench.methods.method import Method
from syngap.bench.registry import Registry

__all__ = ["Learner", "Method", "registry"]

registry = Registry(
    "method",
    "syngap.methods",
    {
        "sgd": "syngap.bench.methods.sgd:SGD",
        "sgdm": "syngap.bench.methods.sgdm:SGDM",
        "adam": "syngap.bench.methods.adam:Adam",
        "ballistic": "syngap.bench.methods.ballistic:Ballistic",
        "ewcpp": "syngap.bench.methods.ewcpp:EWCpp",
        "si": "syngap.bench.methods.si:SI",
        "mas": "syngap.bench.methods.mas:MAS",
        "lwf": "syngap.bench.methods.lwf:LwF",
        "er": "syngap.bench.methods.er:ER",
        "er_ace": "syngap.bench.methods.er_ace:ERACE",
        "derpp": "syngap.bench.methods.derpp:DERpp",
        "agem": "syngap.bench.methods.agem:AGEM",
        "cls_er": "syngap.bench.methods.cls_er:CLSER",
        "scr": "syngap.bench.methods.scr:SCR",
        "syngap": "syngap.bench.methods.syngap:SynGAP",
        "gated_er_ace": "syngap.bench.methods.gated_losses:GatedERACE",
        "gated_derpp": "syngap.bench.methods.gated_losses:GatedDERpp",
        "joint": "syngap.bench.methods.joint:Joint",
    },
)
