"""SynGAP with the losses of ER-ACE and DER++ in place of ER's."""

from __future__ import annotations

from syngap.bench.methods.derpp import DERpp
from syngap.bench.methods.er_ace import ERACE
from syngap.bench.methods.syngap import SynGAP

__all__ = ["GatedDERpp", "GatedERACE"]


class GatedERACE(SynGAP, ERACE):
    """The loss of ER-ACE, minimized by the optimizer of SynGAP."""


class GatedDERpp(SynGAP, DERpp):
    """The loss of DER++, minimized by the optimizer of SynGAP.

    Importance is that of all samples of a step, those of both draws among them.
    """
