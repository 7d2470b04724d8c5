# SPDX-License-Identifier: Apache-2.0
"""The example: a transformer that trains with attend, in process and over gRPC, follows one that
trains with PyTorch's own attention."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import attend.torch  # noqa: E402
import train_transformer  # noqa: E402

STEPS = 25


@pytest.fixture(scope="module")
def losses():
    return {name: train_transformer.train(attention, steps=STEPS)
            for name, attention in train_transformer.ATTENTIONS.items()}


@pytest.fixture(scope="module")
def remote(server, stubs):
    from remote_attention import RemoteAttention
    attention = RemoteAttention(server.address)
    yield attention
    attention.close()


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


def test_over_grpc_too(losses, remote):
    assert_follows(losses, train_transformer.train(remote, steps=STEPS))


def test_dropout_over_grpc_is_that_in_process(remote):
    tensors = [torch.randn(2, heads, 33, 16) for heads in (4, 2, 2)]
    found = []
    for attention in (remote, attend.torch.scaled_dot_product_attention):
        given = [x.clone().requires_grad_() for x in tensors]
        torch.manual_seed(5)
        o = attention(*given, dropout_p=0.3, is_causal=True, enable_gqa=True)
        o.square().sum().backward()
        found.append([o.detach(), *(x.grad for x in given)])
    for one, other in zip(*found):
        assert torch.equal(one, other)
