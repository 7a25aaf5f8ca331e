"""Audits of a masked total, decoded as a server decodes it: what one record adds is hidden as much as claimed, no less.

A column of the sums is a trial of its own: at one client a record with a row of full length along that column is there
or not, by a fair coin. The score is the column's total.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from torch import Tensor

from fedstill.audits.lower_bounds import fitted, from_scores
from fedstill.base import seeds
from fedstill.privacy import integer_sums, lattice
from fedstill.privacy.accounting import gaussian_noise
from fedstill.privacy.integer_sums import IntegerClassSums
from fedstill.sums.helpers import Helper, masks_of, total_of
from fedstill.sums.masks import Terms, mask

TRIALS, CLIENTS, ARRIVED, LEAST, HONEST = 6000, 20, 10, 10, 9
DELTA = 1e-5
KEYS = [Ed25519PrivateKey.from_private_bytes(hashlib.sha256(bytes([i])).digest()) for i in range(CLIENTS)]


def roster(client: int) -> bytes:
    return KEYS[client].public_key().public_bytes_raw()


def release(epsilon: float, rows: Tensor, adders: int, client: int) -> NDArray[np.int64]:
    """One client's numbers: sums of rows of length 1 at most, in 256 steps."""
    mechanism = IntegerClassSums(
        num_classes=1, radius=1.0, noise_multiplier=gaussian_noise(epsilon, DELTA), adders=adders
    )
    noise = seeds.Simulated(torch.Generator().manual_seed(client))
    return mechanism((rows, torch.zeros(len(rows), dtype=torch.int64)), noise)[0].numpy()


def audited(folder: Path, epsilon: float, adders: int, sums: Callable[..., NDArray[np.int64]] = release) -> float:
    """The lower bound of epsilon at 99.9 % confidence by the totals, from all clients but one that colludes."""
    helpers = [Helper(folder / str(i), i, roster) for i in range(4)]
    boxes, signers = tuple(h.keys.box for h in helpers), tuple(h.keys.signer for h in helpers)
    terms = Terms(bytes(32), 0, boxes, signers, 1, LEAST, TRIALS, 5)
    coins = np.random.default_rng(5).random(TRIALS) < 0.5
    made = []
    for client in range(ARRIVED):
        rows = torch.eye(TRIALS)[torch.from_numpy(coins)] if client == 0 else torch.zeros(1, TRIALS)
        numbers = sums(epsilon, rows, adders, client)
        if client == ARRIVED - 1:  # it works with the server, which knows its noise
            numbers = np.zeros(TRIALS, dtype=np.int64)
        made.append(mask(numbers, terms, client, KEYS[client].sign))
    uploads = [upload for _, upload in made]
    total = total_of((data for data, _ in made), masks_of(helpers, terms, uploads), 5).astype(float)
    found = fitted(total[~coins], total[coins], delta=DELTA, confidence=0.999)
    general = from_scores(total[~coins], total[coins], delta=DELTA, confidence=0.999)
    assert general.epsilon <= found * 1.05
    return found


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_the_total_is_as_private_as_claimed_and_hardly_more(tmp_path: Path, epsilon: float) -> None:
    least = {1.0: 0.55, 4.0: 0.85}[epsilon]  # at this number of trials and confidence
    assert least * epsilon < audited(tmp_path, epsilon, HONEST) <= epsilon


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_noise_for_all_clients_in_place_of_the_least_number_is_caught(tmp_path: Path, epsilon: float) -> None:
    assert audited(tmp_path, epsilon, CLIENTS) > epsilon


def test_a_wrong_share_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = lattice.share
    monkeypatch.setattr(lattice, "share", lambda std, adders: share(std / 1.3, adders))
    assert audited(tmp_path, 4.0, HONEST) > 4.0


def test_noise_of_a_continuous_share_that_is_rounded_to_coarse_steps_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps as coarse as the share itself, rounding takes most of the noise away."""

    def rounded(shape: tuple[int, ...], variance: float, noise: seeds.Noise) -> Tensor:
        step = 4 * variance**0.5
        return ((noise.gaussian(shape) * variance**0.5 / step).round() * step).to(torch.int64)

    monkeypatch.setattr(lattice, "discrete_gaussian", rounded)
    assert audited(tmp_path, 4.0, HONEST) > 4.0


def test_noise_before_clipping_is_caught(tmp_path: Path) -> None:
    """Rows with noise are clipped: little of the noise is left."""

    def early(epsilon: float, rows: Tensor, adders: int, client: int) -> NDArray[np.int64]:
        noise = seeds.Simulated(torch.Generator().manual_seed(client))
        noisy = rows.double() + 0.001 * noise.gaussian(rows.shape)
        mechanism = IntegerClassSums(num_classes=1, radius=1.0, noise_multiplier=0.0, adders=adders)
        return mechanism((noisy, torch.zeros(len(rows), dtype=torch.int64)), noise)[0].numpy()

    assert audited(tmp_path, 4.0, HONEST, early) > 4.0


def test_steps_from_private_rows_move_further_than_the_sensitivity() -> None:
    """With a radius that is the longest row's, one record changes what all the others add."""
    rows = torch.full((1000, 1), 0.01)
    longer = torch.cat([rows, torch.ones(1, 1)])
    moved = []
    for some in (rows, longer):
        mechanism = IntegerClassSums(num_classes=1, radius=float(some.norm(dim=1).max()), noise_multiplier=0.0)
        moved.append(mechanism((some, torch.zeros(len(some), dtype=torch.int64)), seeds.Entropy()))
    assert float((moved[0] - moved[1]).double().norm()) > 100 * mechanism.sensitivity
    public = [
        IntegerClassSums(num_classes=1, radius=0.5, noise_multiplier=0.0)(
            (some, torch.zeros(len(some), dtype=torch.int64)), seeds.Entropy()
        )
        for some in (rows, longer)
    ]
    assert float((public[0] - public[1]).double().norm()) <= integer_sums.IntegerClassSums.steps
