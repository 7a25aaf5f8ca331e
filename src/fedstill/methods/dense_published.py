"""DENSE as its authors' code runs it, to compare with: zj-jayzhang/DENSE with the settings of its README.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, "DENSE: data-free one-shot federated learning", NeurIPS 2022
(arXiv:2112.12371).

Differs from the paper (docs/methods/dense-published.md has the whole list):

* every epoch starts a new generator, whose latents are fitted with it, and the images are those of its best step;
* batch statistics are not compared: the code looks for batch norms where it can't find any;
* the student sees all images there ever were;
* from the second local epoch on, clients' batch norms train with their running statistics.

Differs from the code: the last epoch counts, not the best one on the test set.
"""

from pydantic import PositiveInt

from fedstill.distill.ensemble import Temperature
from fedstill.distill.generator import Generation, View
from fedstill.methods.dense import Dense
from fedstill.train.local import SGD, Norms


class DensePublished(Dense):
    """What the authors' code does."""

    local: SGD = SGD(batch_size=128, epochs=400)
    """A client's training in one round."""
    local_view: View = "crop_flip"
    """How its records are augmented: as CIFAR's in the code, which takes other data sets' as they are ("none")."""
    local_norm: Norms = "frozen-after-first"
    """Statistics of a client's batch norms: the code's test after each epoch leaves the network in eval mode."""
    generation: Generation = Generation.published()
    """How images are made."""
    student: SGD = SGD(lr=0.005, batch_size=256)
    """The student's training in one epoch."""
    student_view: View = "crop_flip"
    """How images are augmented for it, and for the teachers with it; "flip" where images are not CIFAR's."""
    temperature: Temperature = 20.0
    """T of the distillation loss."""
    pool: PositiveInt = 200
    """How many epochs' images it sees: all."""
