"""Ways of learning from a stream: one file, one method.

Another package adds one by an entry point of the group "syngap.methods": a `Method` whose
constructor takes a `Learner` and keyword-only options.
"""

from syngap.methods.learner import Learner
from syngap.methods.method import Method
from syngap.registry import Registry

__all__ = ["Learner", "Method", "registry"]

registry = Registry(
    "method",
    "syngap.methods",
    {
        "sgd": "syngap.methods.sgd:SGD",
        "sgdm": "syngap.methods.sgdm:SGDM",
        "adam": "syngap.methods.adam:Adam",
        "ballistic": "syngap.methods.ballistic:Ballistic",
        "ewcpp": "syngap.methods.ewcpp:EWCpp",
        "er": "syngap.methods.er:ER",
        "er_ace": "syngap.methods.er_ace:ERACE",
        "derpp": "syngap.methods.derpp:DERpp",
        "syngap": "syngap.methods.syngap:SynGAP",
        "joint": "syngap.methods.joint:Joint",
    },
)
