"""Names of the trackers, which help texts need without torch."""

from typing import Literal

TrackerName = Literal["tensorboard", "mlflow", "wandb", "trackio"]
