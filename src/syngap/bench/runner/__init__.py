"""From an experiment to finished runs.

- `plan`: which runs are to be done; `run`: one of them; `recorded`: those of a result, again
- `execution`: does the runs of a plan, and shows how far they are (`progress`)
- `local`: processes of this machine (`mps`: several on one GPU); `cluster`: a Ray cluster
  (`machines`: which of its machines can do a run)
- `loggers`: TensorBoard, MLflow, Weights & Biases
"""
