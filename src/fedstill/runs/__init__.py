"""The folder of a run on disk, and the contents of its files."""
