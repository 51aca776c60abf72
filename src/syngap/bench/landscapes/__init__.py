"""The loss of task 1 around where training went.

- `landscape`: trains, lays the plane, computes the surface, and shows how far it is
- `path`: the networks during training and their loss; `plane`: filter norms and the plane through
  three networks
"""
