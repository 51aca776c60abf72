"""The optimizer: it needs torch and nothing else.

Where to find what, in the order of a step:

- `importance`: from a prediction to labels and scores; `exact` and `per_sample`: the same sample by
  sample; `estimator`: which of them, and for whose processes (`distributed`, `sharded`)
- `schedule`: at which steps; `observation`: what waits between `observe` and `step`
- `syngap`: the class; `update`: the arithmetic of its step (`fused`: as one kernel on a GPU);
  `means`: μ; `plasticity`: the mask
- `wrapped`: the gate in front of another optimizer; `ballistic`: a baseline
- `compact`: importance in two bytes
- `finite`: gradients that are not; `errors`: what is raised then
- `rotation`: weights along directions, for pre-trained models
- `loading`: what a state may hold that is loaded; `options`: what the user may set
- `consolidation`, `states`, `summary`, `precision`, `notices`: inputs without labels, states
  restored and of grown parameters, numbers to log, types, warnings
"""

from syngap.optim.ballistic import Ballistic
from syngap.optim.plasticity import linear_plasticity, plasticity
from syngap.optim.rotation import rotate, unrotate
from syngap.optim.syngap import SynGAP

__all__ = ["Ballistic", "SynGAP", "linear_plasticity", "plasticity", "rotate", "unrotate"]
