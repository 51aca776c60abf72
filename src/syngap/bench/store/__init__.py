"""The files of runs and results: nothing else in the package knows their names.

- `layout`: the names of the files of a run; `folder_writer` writes them, `folder_reader` reads them
- `outcome`: what is known of a run, wherever it was read from
- `packed`: many runs in two files; `keep`: from run folders to packed results
- `shared`: tensors that several fine-tuning runs use
- `surface`: the file of a loss surface; `environment`: what a run ran on
- `records`: locks, JSON and YAML; `removal`: which folders are runs, and how they are removed
"""
