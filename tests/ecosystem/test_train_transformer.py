# SPDX-License-Identifier: Apache-2.0
"""The example train_transformer.py: training with attend, in process and over gRPC, follows
training with PyTorch's own attention."""

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
    """Rounding errors grow from step to step. The difference may be 8 times the largest one so far
    between two of PyTorch's own implementations."""
    torchs = losses["torch"]
    apart = [itertools.accumulate((abs(a - b) for a, b in zip(torchs, row, strict=True)), max)
             for row in (ours, losses["torch's math"])]
    for step, (off, theirs) in enumerate(zip(*apart)):
        rounding = 2.0**-23 * torchs[0]
        assert off <= 8 * (theirs + rounding), f"step {step}: {off:.1e} apart, {theirs:.1e}"


def test_losses_follow_pytorchs_at_every_step(losses):
    assert losses["torch"][-1] < 0.9 * losses["torch"][0]  # it learns
    assert_follows(losses, losses["attend"])


def test_losses_follow_pytorchs_with_a_server(losses, client):
    with attend.connect(client):
        served = train_transformer.train(train_transformer.ATTENTIONS["attend"], steps=STEPS)
    assert_follows(losses, served)
