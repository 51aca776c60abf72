"""The files of runs and results: nothing else in the package knows their names.

- `outcome`: what is known of a run; `run_folder`: reads it from its files; `journal`: writes it
- `packed`: many runs in two files; `keep`: from run folders to packed results
- `surface`: the file of a loss surface; `environment`: what a run ran on
- `records`: locks, JSON and YAML; `removal`: which folders are runs, and how they are removed
"""
