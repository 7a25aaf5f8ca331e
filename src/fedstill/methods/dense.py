"""DENSE: a generator makes images that the clients' models are sure of, and a student learns from them there.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu, "DENSE: data-free one-shot federated learning", NeurIPS 2022
(arXiv:2112.12371), Algorithm 1.

Differs from the paper (docs/methods/dense.md has the whole list):

* the student learns on the images of the latest epochs, not on one batch of each (nor on all, as the code does);
* batch statistics are compared, which the authors' code means to do and does not;
* the last epoch counts; the authors' code reports the best one on the test set;
* `DensePublished` is the authors' code.
"""

import torch

from fedstill.distill.generator import Generation
from fedstill.methods.datafree import DataFreeMethod, Images
from fedstill.protocol import Records


class Dense(DataFreeMethod):
    """One upload of each client's model; a generator and a student at the server, and no data."""

    generation: Generation = Generation()
    """How images are made."""

    @property
    def images_per_epoch(self) -> int:
        """See `DataFreeMethod`."""
        return self.generation.batch_size

    def images(self, like: Records, rng: torch.Generator) -> Images:
        """theta_G <- theta_G - eta_G grad (L_CE + lambda_1 L_BN + lambda_2 L_div), T_G times an epoch."""
        return self.generation.start(like, rng)
