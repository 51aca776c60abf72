"""Networks: from the shape of one sample and a number of classes to a module.

A network is a function `(shape, classes, *, options...)`; its layers have names, because plasticity
is shown layer by layer.
"""

from syngap.bench.models.cnn import cnn
from syngap.bench.models.mlp import mlp
from syngap.bench.models.resnet import resnet18
from syngap.bench.registry import Registry

__all__ = ["cnn", "mlp", "registry", "resnet18"]

registry = Registry(
    "model",
    "syngap.models",
    {
        "mlp": "syngap.bench.models.mlp:mlp",
        "cnn": "syngap.bench.models.cnn:cnn",
        "resnet18": "syngap.bench.models.resnet:resnet18",
    },
)
