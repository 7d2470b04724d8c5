# SPDX-License-Identifier: Apache-2.0
"""The example: a transformer that trains with attend, in process and over gRPC, follows one that
trains with PyTorch's own attention."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import attend  # noqa: E402
import train_transformer  # noqa: E402

STEPS = 25


@pytest.fixture(scope="module")
def losses():
    return {name: train_transformer.train(attention, steps=STEPS)
            for name, attention in train_transformer.ATTENTIONS.items()}


def assert_follows(losses, ours):
    """Roundings grow from step to step. The measure is what two of PyTorch's own computations are
    apart until then."""
    torchs = losses["torch"]
    apart = [itertools.accumulate((abs(a - b) for a, b in zip(torchs, row, strict=True)), max)
             for row in (ours, losses["torch's math"])]
    for step, (off, theirs) in enumerate(zip(*apart)):
        rounding = 2.0**-23 * torchs[0]
        assert off <= 8 * (theirs + rounding), f"step {step}: {off:.1e} apart, {theirs:.1e}"


def test_the_losses_follow_each_other_step_by_step(losses):
    assert losses["torch"][-1] < 0.9 * losses["torch"][0]  # it learns
    assert_follows(losses, losses["attend"])


def test_served_it_is_the_same_training(losses, client):
    with attend.connect(client):
        served = train_transformer.train(train_transformer.ATTENTIONS["attend"], steps=STEPS)
    assert_follows(losses, served)
