"""Hyper-parameters, chosen by a search that never sees a test sample.

- `study`: one study a row, each trial after those it learns from; `trials`: what came of them
- `chosen`: the best of them, put into the experiment
"""
