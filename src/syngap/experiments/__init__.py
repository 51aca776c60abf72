"""From a configuration to folders of runs.

- `config`: an experiment, read and checked; `given`: its values; `shipped`: those that come along
- `plan`: which runs; `run`: one of them; `engine`: the processes; `display`: how far they are
- `cluster`: runs on a Ray cluster; `loggers`: to where people look; `extras`: packages for them
- `journal`: writes the folder of a run; `folder`: reads it; `files`, `environment`: what is in it
- `keep`: runs to where results are published; `recorded`: such runs, to be run again
- `tuning`: hyper-parameters by a search; `landscapes`: the loss around where training went
"""
