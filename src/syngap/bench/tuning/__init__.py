"""Hyper-parameters, chosen by a search that never sees a test sample.

- `halving`: which trials there are and which go on, from the scores so far
- `study`: their runs in a folder, a row beside the other
- `chosen`: the best of them, recorded and put into the experiment
"""
