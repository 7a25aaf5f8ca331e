"""Experiments: the settings of a run, its task, and the run itself."""
