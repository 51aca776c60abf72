"""Networks: from the shape of one sample and a number of classes to a module.

A network is a function `(shape, classes, *, options...)`; its layers have names, because plasticity
is shown layer by layer.
"""

from syngap.models.cnn import cnn
from syngap.models.mlp import mlp
from syngap.models.resnet import resnet18
from syngap.registry import Registry

__all__ = ["cnn", "mlp", "registry", "resnet18"]

registry = Registry(
    "model",
    "syngap.models",
    {
        "mlp": "syngap.models.mlp:mlp",
        "cnn": "syngap.models.cnn:cnn",
        "resnet18": "syngap.models.resnet:resnet18",
    },
)
