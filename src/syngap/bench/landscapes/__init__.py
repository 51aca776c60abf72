"""The loss of task 1 around where training went.

- `landscape`: trains, lays the plane, computes the surface; `display`: shows how far it is
- `path`: the networks during training; `plane`: filter norms and the plane through three of them
- `task_evaluator`: the loss of a network
"""
