"""Reports of fine-tuning experiments: what each method learned and forgot.

- `comparison`: from runs to the numbers of each method; `comparison_table`: as a table
- `frontiers`: the figure; `comparison_page`: the page; `repeated`: recorded runs beside new ones
"""
