"""From a configuration to folders of runs: the plan, the processes, the folder of a run."""
