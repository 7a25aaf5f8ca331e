"""Runs on disk: the folder of a run and the contents of its files."""
