"""SynGAP: metaplasticity as adaptive gradient preconditioning."""

from syngap.optim import SynGAP, plasticity

__version__ = "0.1.0"

__all__ = ["SynGAP", "__version__", "plasticity"]
