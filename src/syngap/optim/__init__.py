"""The optimizer: it needs torch and nothing else.

Where to find what:

- `reference`: the paper's rule in a page, to be read first
- `syngap`: gradient descent through a gate; `wrapped`: any other optimizer through one; `gated`:
  what both have
- `gate`: importance, when it is refreshed, and what it lets through
- `fisher`: estimates of importance; `scores`: labels drawn from a prediction and their scores;
  `exact` and `per_sample`: the same sample by sample; `distributed`, `sharded`: of many processes
- `plasticity`: the mask Ω and the mean importance μ
- `basis`: the coordinates of a weight, its entries or directions; `directions`: those that follow a
  stream; `knowledge`: directions and importance from inputs without labels; `moments`: the
  directions; `uses`: where a forward pass multiplies with a weight
- `update`: the arithmetic of a step; `update_forms`: how another optimizer's update goes through
  the gate; `fused`: one kernel on a GPU; `compact`: importance in two bytes
- `defaults`: the values where a user sets none; `checks`: what a user may set;
  `state_checks`, `direction_checks`: what a state may hold that is loaded; `errors`: errors, and
  warnings that are given once
- `gate_changes`: importance from inputs, taken over, restored, or grown between steps;
  `predictions`: a model run over inputs, leaving no trace; `parameter_state`: what a state holds of
  a parameter, restored or grown; `summary`: numbers to log
- `tensors`: precision, and tensors that are sharded; `ballistic`: a baseline
"""

from syngap.optim.ballistic import Ballistic
from syngap.optim.checks import NonFinite
from syngap.optim.defaults import DEFAULTS, Defaults
from syngap.optim.directions import Directions
from syngap.optim.errors import NotFiniteError
from syngap.optim.gated import GatedOptimizer
from syngap.optim.plasticity import linear_plasticity, plasticity
from syngap.optim.syngap import SynGAP
from syngap.optim.update import nonfinite_gradients

__all__ = [
    "DEFAULTS",
    "Ballistic",
    "Defaults",
    "Directions",
    "GatedOptimizer",
    "NonFinite",
    "NotFiniteError",
    "SynGAP",
    "linear_plasticity",
    "nonfinite_gradients",
    "plasticity",
]
