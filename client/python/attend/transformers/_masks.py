# SPDX-License-Identifier: Apache-2.0
"""The masks of transformers' models in the kernels' form: a window beside the diagonal, lengths and
cu_seqlens, instead of a matrix, wherever they are equivalent."""

import dataclasses
import functools
import inspect

import torch
from transformers import masking_utils

from ._placeholder import Placeholder

_UNBOUNDED = -1


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """Key j is visible to query i if -left <= j - i <= right and both are in one sequence.
    `sequences`: each row's sequence number, [B, L]. `remapped`: i and j count from the sequence's
    start."""
    left: int = _UNBOUNDED
    right: int = _UNBOUNDED
    sequences: torch.Tensor | None = None
    remapped: bool = False

    def meet(self, other):
        """The intersection, or None if it is not such a pattern."""
        if self.sequences is not None and other.sequences is not None:
            return None
        return _Pattern(_narrower(self.left, other.left), _narrower(self.right, other.right),
                        other.sequences if self.sequences is None else self.sequences,
                        self.remapped or other.remapped)


def _narrower(one, other):
    return max(one, other) if _UNBOUNDED in (one, other) else min(one, other)


def _pattern(function):
    """The pattern of one of transformers' mask functions; None if it is not recognised."""
    if function is masking_utils.causal_mask_function:
        return _Pattern(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return _Pattern()
    if getattr(function, "__module__", "") != masking_utils.__name__:
        return None
    inner = inspect.getclosurevars(function).nonlocals
    maker = function.__qualname__.partition(".")[0]
    if maker == "sliding_window_overlay" and set(inner) == {"sliding_window"}:
        return _Pattern(left=inner["sliding_window"] - 1)
    if maker == "sliding_window_bidirectional_overlay" and set(inner) == {"sliding_window"}:
        return _Pattern(inner["sliding_window"], inner["sliding_window"])
    if maker == "packed_sequence_mask_function" and set(inner) == {"packed_sequence_mask"}:
        return _Pattern(sequences=inner["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence" and set(inner) == {"mask_function",
                                                                         "position_ids"}:
        found = _pattern(inner["mask_function"])
        return found and dataclasses.replace(found, remapped=True)
    if maker == "and_masks" and set(inner) == {"mask_functions"}:
        return functools.reduce(lambda one, other: one and other and one.meet(other),
                                map(_pattern, inner["mask_functions"]), _Pattern())
    return None


class Mask(Placeholder):
    """The mask of one kind of layer in one forward pass, read by every layer's attention. To the
    model it has the shape of a matrix per sequence.

    left, right: keys that stay visible beside the diagonal, -1 for all. Query i is at key i +
        offset.
    columns: keys from this number on are hidden from all rows: a static cache has not filled them
        yet.
    keys: [B, columns] of bool, True where a key is not padding; None if all are.
    sequences: the rows' sequence numbers, [B, L], if sequences are packed.
    is_dense: the fields above cannot express the mask; `dense` is the matrix."""

    refusal = "this model computes attention by itself: use attn_implementation='eager'"
    ndim = 4

    def __init__(self, sizes, pattern, offset, padding, make_dense):
        batch, rows, columns = sizes
        self.shape = torch.Size((batch, 1, rows, columns))
        self.is_dense = pattern is None
        pattern = pattern or _Pattern()
        self.left, self.right, self.sequences = pattern.left, pattern.right, pattern.sequences
        self.offset, self._make_dense = offset, make_dense
        self.columns = min(columns, rows + offset) if self.right == 0 else columns
        keys = None if padding is None else padding[:, :self.columns]
        self.keys = None if keys is None or keys.all() else keys

    def dim(self):
        return self.ndim

    def to(self, *_, **__):
        """As a tensor's `to`. The mask's tensors are moved when a layer reads them."""
        return self

    @functools.cached_property
    def dense(self):
        """The whole mask: bool, [B, 1, Lq, Lk], True where a key is visible."""
        return self._make_dense()

    @functools.cached_property
    def is_plain(self):
        """Whether the mask is only a window beside the diagonal."""
        return not self.is_dense and self.keys is None and self.sequences is None

    @functools.cached_property
    def lengths(self):
        """[B], int64, if all padding follows the keys; else None."""
        counts, places = self.keys.sum(-1), torch.arange(self.columns, device=self.keys.device)
        return counts if torch.equal(places < counts[:, None], self.keys) else None

    @functools.cached_property
    def left_padding(self):
        """The number of padding rows before each sequence's keys, a list of B, if there is no other
        padding; else None."""
        counts, places = self.keys.sum(-1), torch.arange(self.columns, device=self.keys.device)
        padding = self.columns - counts
        return padding.tolist() if torch.equal(places >= padding[:, None], self.keys) else None

    @functools.cached_property
    def may_be_packed(self):
        """Whether sequences are packed end to end, or are whole after left padding, whose rows see
        no key."""
        return self.sequences is not None or (
            self.keys is not None and self.right == 0 and self.offset == 0
            and self.shape[2] == self.columns and self.left_padding is not None)

    @functools.cached_property
    def packed(self):
        """(rows, cu_seqlens): indices of the B * L rows that are not padding, None for all; and the
        sequences' starts, int64 on the host, [sequences + 1]."""
        batch, _, _, columns = self.shape
        if self.sequences is not None:
            starts = torch.arange(batch, device=self.sequences.device)[:, None] * columns
            numbers = (self.sequences + starts).flatten()
            lengths, rows = torch.unique_consecutive(numbers, return_counts=True)[1], None
        else:
            lengths, rows = self.keys.sum(-1), self.keys.flatten().nonzero().flatten()
        return rows, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cpu()


def attend_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0,
                mask_function=masking_utils.causal_mask_function, attention_mask=None,
                use_vmap=False, device="cpu", **_):
    """transformers' mask interface: returns a Mask."""
    if isinstance(attention_mask, Mask):  # from generate(), for a static cache
        return attention_mask
    make_dense = functools.partial(
        masking_utils.sdpa_mask, batch_size=batch_size, q_length=q_length, kv_length=kv_length,
        q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device)
    pattern, offset = _pattern(mask_function), int(q_offset) - kv_offset
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset:kv_offset + kv_length].bool()
    if pattern is not None and not _fits(pattern, offset, padding, q_length, kv_length):
        pattern = None
    return Mask((batch_size, q_length, kv_length), pattern, offset, padding, make_dense)


def _fits(pattern, offset, padding, q_length, kv_length):
    """Whether the kernels can express the pattern: packed rows must be complete, and a diagonal
    must end at the last key."""
    if pattern.sequences is not None:
        return padding is None and offset == 0 and q_length == kv_length
    if pattern.remapped:
        return False
    if pattern.right == 0:
        return 0 <= offset <= kv_length - q_length
    return (pattern.left, pattern.right) == (-1, -1) or offset == kv_length - q_length
