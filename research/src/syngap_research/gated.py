"""The gate under the losses of ER-ACE and DER++."""

from __future__ import annotations

from syngap.bench.methods.derpp import DERpp
from syngap.bench.methods.er_ace import ERACE
from syngap.bench.methods.syngap import SynGAP

__all__ = ["GatedDERpp", "GatedERACE"]


class GatedERACE(SynGAP, ERACE):
    """SynGAP with the loss of ER-ACE."""


class GatedDERpp(SynGAP, DERpp):
    """SynGAP with the loss of DER++."""
