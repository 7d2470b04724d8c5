# SPDX-License-Identifier: Apache-2.0
"""Converts FlexAttention's BlockMask to the bool mask that it stands for."""

import sys

import torch


def _seen(counts, indices, columns):
    """[B, H, rows, columns] of bool: True at the first counts[b, h, row] of indices[b, h, row]."""
    named = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = torch.where(named, indices, columns).long()  # unused entries go to an extra column
    seen = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return seen.scatter_(-1, places, True)[..., :columns]


def _dense(mask, create_mask):
    """mask_mod decides only within partial blocks; full blocks are visible throughout."""
    (batch, heads), (rows, keys) = mask.kv_num_blocks.shape[:2], mask.shape[-2:]
    row_block, key_block = mask.BLOCK_SIZE
    columns = -(-keys // key_block)

    def whole(blocks):
        wide = blocks.repeat_interleave(row_block, -2).repeat_interleave(key_block, -1)
        return wide[..., :rows, :keys]

    device = mask.kv_num_blocks.device
    seen = whole(_seen(mask.kv_num_blocks, mask.kv_indices, columns))
    seen = seen & create_mask(mask.mask_mod, batch, heads, rows, keys, device=device)
    if mask.full_kv_num_blocks is not None:
        seen = seen | whole(_seen(mask.full_kv_num_blocks, mask.full_kv_indices, columns))
    return seen


def as_tensor(name, mask):
    """A BlockMask as [B|1, H|1, Lq, Lk] of bool, on its device; a tensor or None unchanged. Takes B
    H Lq Lk bytes, so convert once if several calls share a mask."""
    if mask is None or isinstance(mask, torch.Tensor):
        return mask
    # If the module is not loaded, `mask` cannot be a BlockMask.
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None and isinstance(mask, flex.BlockMask):
        return _dense(mask, flex.create_mask)
    if callable(mask):
        raise TypeError(f"{name} is a function, must be a tensor or a BlockMask: a mask function "
                        f"becomes one by create_block_mask; score functions are not taken, but "
                        f"biases, alibi_slopes and softcap are")
    return mask
