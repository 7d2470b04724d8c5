# SPDX-License-Identifier: Apache-2.0
"""FlexAttention's BlockMask. Answers are compared with flex_attention's, and gradients, which it
does not have on a CPU, with those of the equal dense mask."""

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import attend.torch  # noqa: E402

BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 70, 150, 16
DOCUMENTS = torch.tensor([[0] * 40 + [1] * 60 + [2] * 50, [0] * 100 + [1] * 50])
MASKS = {
    "causal": lambda b, h, q, k: q + KEYS - ROWS >= k,
    "window": lambda b, h, q, k: (q - k).abs() <= 20,
    "prefix": lambda b, h, q, k: (k < 33) | (q >= k),
    "documents": lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
    "by_head": lambda b, h, q, k: (q + k) % (h + 2) == 0,
    "some_rows_see_nothing": lambda b, h, q, k: (q < 10) & (k < 5),
    "nothing": lambda b, h, q, k: q < 0,
}


def tensors():
    return [torch.randn(BATCH, HEADS, rows, DIM, requires_grad=True) for rows in (ROWS, KEYS, KEYS)]


CASES = [(name, (BATCH, HEADS)) for name in MASKS]
# Masks that do not depend on sequence and head are also made for a batch and heads of 1.
CASES += [(name, (None, None)) for name in MASKS if name not in ("documents", "by_head")]


@pytest.mark.parametrize("block", [16, (32, 64), 128])
@pytest.mark.parametrize("name,shape", CASES)
def test_mask_functions(name, shape, block):
    blocks = flex.create_block_mask(MASKS[name], *shape, ROWS, KEYS, device="cpu",
                                    BLOCK_SIZE=block)
    dense = flex.create_mask(MASKS[name], *shape, ROWS, KEYS, device="cpu")
    inputs, d_o = tensors(), torch.randn(BATCH, HEADS, ROWS, DIM)
    theirs = flex.flex_attention(*(x.detach() for x in inputs), block_mask=blocks)
    exact = attend.torch.StandardAttention()(*inputs, bias=dense)
    wanted = [theirs, *torch.autograd.grad(exact, inputs, d_o)]
    for o in (attend.torch.attention(*inputs, bias=blocks),
              attend.torch.scaled_dot_product_attention(*inputs, attn_mask=blocks)):
        for ours, one in zip((o, *torch.autograd.grad(o, inputs, d_o)), wanted):
            torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-5)


def test_blocks_without_a_mask_function():
    """Only the visible blocks are given; indices beyond their count are ignored."""
    counts = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 2], [1, 1, 1], [1, 7, -1]]]], dtype=torch.int32)
    mask = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(32, 64),
                                         seq_lengths=(ROWS, KEYS), compute_q_blocks=False)
    dense = attend.torch.mask_of_blocks(mask)
    assert dense.shape == (1, 1, ROWS, KEYS)
    seen = torch.zeros(ROWS, KEYS, dtype=torch.bool)
    seen[:32, :64] = seen[:32, 128:] = seen[64:, 64:128] = True
    assert torch.equal(dense[0, 0], seen)


def test_full_blocks_ignore_the_mask_function():
    full = torch.tensor([[[1]]], dtype=torch.int32), torch.tensor([[[[1]]]], dtype=torch.int32)
    part = torch.tensor([[[1]]], dtype=torch.int32), torch.tensor([[[[0]]]], dtype=torch.int32)
    mask = flex.BlockMask.from_kv_blocks(*part, *full, BLOCK_SIZE=64, seq_lengths=(64, 128),
                                         mask_mod=lambda b, h, q, k: k < 3, compute_q_blocks=False)
    seen = attend.torch.mask_of_blocks(mask)[0, 0]
    assert torch.equal(seen.sum(1), torch.full((64,), 3 + 64))


def test_a_score_function_is_refused():
    q, k, v = tensors()
    for call in (lambda f: attend.torch.attention(q, k, v, bias=f),
                 lambda f: attend.torch.scaled_dot_product_attention(q, k, v, attn_mask=f)):
        with pytest.raises(TypeError, match="score functions are not taken"):
            call(lambda score, b, h, q, k: score * 2)


def test_a_mask_for_other_lengths_is_refused():
    q, k, v = tensors()
    mask = flex.create_block_mask(MASKS["window"], None, None, ROWS + 1, KEYS, device="cpu")
    with pytest.raises(ValueError, match="attn_mask has 71 rows"):
        attend.torch.scaled_dot_product_attention(q, k, v, attn_mask=mask)
