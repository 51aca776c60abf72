"""What a comparison of fine-tuning methods is made of.

- `texts`: what a model knows and what it is to learn; `models`: the models that are tuned
- `setting`: a model, its windows of text, its anchors; `methods`: one file, one method
- `loop`: one run, from set-up to the last evaluation; `point`: what an evaluation found
- `frontier`: forgetting at matched new loss, along all points of a method
"""
