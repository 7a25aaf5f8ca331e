"""Guessing true labels from randomised ones: the loss is the likelihood, and the evidence is weighed by Bayes' rule."""

import math

import pytest
import torch
from torch import nn

from fedstill.base.records import Records
from fedstill.base.seeds import Simulated
from fedstill.data.sources import DataSet
from fedstill.privacy.randomized_response import RandomizedResponse, probabilities
from fedstill.train import losses
from fedstill.train.losses import Denoising


def likelihood(labels: torch.Tensor, epsilon: float) -> torch.Tensor:
    """P[given label | true label] of plain randomised response among ten classes."""
    keep = math.exp(epsilon)
    found = torch.ones(len(labels), 10, dtype=torch.float64).scatter(1, labels[:, None], keep)
    return found / (keep + 9)


def test_the_loss_is_the_negative_log_likelihood_of_what_was_given() -> None:
    logits, given = torch.randn(7, 10, dtype=torch.float64), likelihood(torch.arange(7), 1.3)
    expected = -(logits.softmax(1) * given).sum(1).log().mean()
    assert float(losses.negative_log_likelihood(logits, torch.empty(0), given.log())) == pytest.approx(
        float(expected), rel=1e-12
    )


def test_likelihoods_are_those_of_the_mechanism() -> None:
    labels = torch.arange(10)
    table = probabilities(torch.ones(10, 10), 0.7).gather(2, labels.view(-1, 1, 1).expand(-1, 10, 1))[:, :, 0]
    torch.testing.assert_close(table, likelihood(labels, 0.7))


def randomised(digits: DataSet, epsilon: float) -> tuple[Records, torch.Tensor]:
    train = digits.train
    return train, RandomizedResponse(10, epsilon)(train.labels, Simulated(torch.Generator().manual_seed(3)))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def test_guesses_beat_the_randomised_labels(digits: DataSet) -> None:
    train, given = randomised(digits, 1.5)
    settings = Denoising(lr=2e-3, epochs=20)
    guess = settings.likeliest(network(), train, likelihood(given, 1.5), torch.Generator().manual_seed(1))
    kept, right = ((some == train.labels).double().mean() for some in (given, guess))
    assert kept < 0.45
    assert right > 0.75


def test_sure_evidence_is_believed_whatever_the_network_says(digits: DataSet) -> None:
    train, given = randomised(digits, 60.0)
    settings = Denoising(lr=1e-6)  # the network knows nothing
    guess = settings.likeliest(network(), train, likelihood(given, 60.0), torch.Generator().manual_seed(1))
    assert torch.equal(guess, train.labels)
    none = Denoising(lr=1e-6).likeliest(network(), train, torch.ones(len(train), 10), torch.Generator())
    assert float((none == train.labels).double().mean()) < 0.4
