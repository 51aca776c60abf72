"""The optimizer: it needs torch and nothing else."""

from syngap.optim.ballistic import Ballistic
from syngap.optim.plasticity import linear_plasticity, plasticity
from syngap.optim.syngap import SynGAP

__all__ = ["Ballistic", "SynGAP", "linear_plasticity", "plasticity"]
