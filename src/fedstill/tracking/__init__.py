"""Experiment trackers: TensorBoard, MLflow, Weights & Biases and Trackio, each a watcher of a run."""
