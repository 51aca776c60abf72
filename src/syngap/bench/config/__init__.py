"""What an experiment is: read from YAML, completed by defaults, checked.

- `experiment`: the whole of it; `values`: checks of its parts; `search`, `space`: how to tune it
- `reading`: files that nobody has to trust; `formats`: which versions of them are read
- `shipped`: the experiments that come with the package
"""
