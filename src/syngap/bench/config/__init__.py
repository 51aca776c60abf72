"""What an experiment is: read from YAML, completed by defaults, checked.

- `experiment`: the whole of it; `run_config`: one run of it
- `finetuning`: an experiment that compares fine-tuning methods, and one run of it
- `component`: a stream, a network or a method, with its options; `values`: checks of them
- `search`, `space`: how hyper-parameters are chosen
- `reading`: files that nobody has to trust; `formats`: which versions of them are read
- `shipped`: the experiments that come with the package
"""
