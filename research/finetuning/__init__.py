"""Fine-tuning without the old data: which method forgets least for what it learns?

A byte-level GPT is trained on an old domain, then fine-tuned on a new one by each method and value.
Every evaluation is a point (new loss, old loss): when to stop is a hyper-parameter like any other.
Methods are compared along the lower left frontier of their points, never at one of them. Losses are
in nats per byte, on test text cut in two halves: points are chosen on one half and evaluated on the
other, so that a method gains nothing by many tries. ../README.md shows how to run it.

- `data`: text of three domains; `model`: the GPT; `methods`: optimizers, penalty, adapters
- `cache`: what runs share; `training`: one run; `runs`: the values of each method, and all runs
- `records`: the table of results; `analysis`: frontiers and ratios; `tables`, `figures`: output
- `checks`: methods and frontiers against their definitions
"""
