"""What a comparison of fine-tuning methods is made of.

- `texts`, `images`: what a model knows and what it is to learn; `models`: what is tuned
- `setting`: what methods and the loop need of a run; `language_setting`, `encoder_setting` and
  `classifier_setting` are one each; `model_tasks` lists them
- `methods`: one file, one method
- `loop`: one run, from set-up to the last evaluation; `point`: what an evaluation found
- `frontier`: forgetting at matched new loss, along all points of a method
"""
