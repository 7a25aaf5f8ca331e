"""A user's own model."""

from torch import nn


def mlp(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    channels, height, width = shape
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * height * width, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, num_classes)
    )
