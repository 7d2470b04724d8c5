# SPDX-License-Identifier: Apache-2.0
"""The example: a transformer that trains with attend follows one that trains with PyTorch's own
attention."""

import itertools

import pytest

pytest.importorskip("torch")

import train_transformer  # noqa: E402


def test_the_losses_follow_each_other_step_by_step():
    """Roundings grow from step to step. The measure is what two of PyTorch's own computations are
    apart until then."""
    losses = {name: train_transformer.train(attention, steps=25)
              for name, attention in train_transformer.ATTENTIONS.items()}
    torch = losses["torch"]
    assert torch[-1] < 0.9 * torch[0]  # it learns
    apart = [itertools.accumulate((abs(a - b) for a, b in zip(torch, losses[name])), max)
             for name in ("attend", "torch's math")]
    for step, (ours, theirs) in enumerate(zip(*apart)):
        rounding = 2.0**-23 * torch[0]
        assert ours <= 8 * (theirs + rounding), f"step {step}: {ours:.1e} apart, {theirs:.1e}"
