# SPDX-License-Identifier: Apache-2.0
"""The mask of a draft whose tokens are a tree (speculative decoding): made, read, and written out
as a bias of bits."""

import array
import ctypes

from . import _checks, _tensors
from ._library import BIT, Params, TreeStruct, check, invalid, library

TOKENS_MAX = 1024  # kTreeTokensMax


def tree_from_parents(parents):
    """The tree of a draft as `tree` takes it, a NumPy array of bool [1, T, T]: each token sees
    itself and its ancestors. parents: for each of 1 to 1024 tokens, the index of its parent, which
    precedes it, or -1."""
    import numpy
    parents = numpy.asarray(parents).tolist()
    tokens = len(parents)
    if not 1 <= tokens <= TOKENS_MAX:
        raise invalid(f"parents has {tokens} elements, must have 1 to {TOKENS_MAX}")
    tree = numpy.eye(tokens, dtype=bool)
    for token, parent in enumerate(parents):
        if not isinstance(parent, int) or not -1 <= parent < token:
            raise invalid(f"parents[{token}] is {parent!r}, must be in [-1, {token - 1}]: a token "
                          f"before it, or -1")
        if parent >= 0:
            tree[token] |= tree[parent]
    return tree[None]


def packed(options, batch):
    """(bits, shape) of options["tree"]: an array of uint8 on the host, and [B or 1, T, T]. None:
    there is no tree."""
    tree = options["tree"]
    if tree is None:
        if options["tree_lengths"] is not None:
            raise invalid("tree_lengths is given, but tree is None")
        return None
    if options["bias"] is not None:
        raise invalid("tree is given with a bias, must be one of the two")
    if not _tensors.is_mask(tree):
        raise invalid(f"tree is of {getattr(tree, 'dtype', type(tree).__name__)}, must be an array "
                      f"or torch tensor of bool")
    shape = tuple(tree.shape)
    fits = len(shape) == 3 and shape[0] in (1, batch) and shape[1] == shape[2]
    if not fits or not 1 <= shape[2] <= TOKENS_MAX:
        raise invalid(f"tree has shape {shape}, must be (1, T, T) or ({batch}, T, T) with T in "
                      f"[1, {TOKENS_MAX}]")
    bits = _tensors.packed_mask(tree, "tree")
    return (bits if _tensors.is_numpy(bits) else bits.cpu().contiguous()), shape


def lengths(options, batch):
    """options["tree_lengths"] as array.array; None: all T."""
    if options["tree_lengths"] is None:
        return None
    values, shape = _tensors.numbers("tree_lengths", options["tree_lengths"], "q")
    _checks.shape("tree_lengths", shape, (batch,))
    return values


def _address(values):
    return None if values is None else values.buffer_info()[0] or None


def set_bias(params, options, host_lengths, staging):
    """Writes the call's tree out as its bias. host_lengths: the call's lengths by their field of
    `params`, None for those on a GPU. Returns whether there is a tree."""
    tree = packed(options, params.batch)
    if tree is None:
        return False
    if params.keys_after:
        raise invalid(f"keys_after is {params.keys_after}, must be 0 with a tree, whose tokens are "
                      f"the last keys")
    bits, shape = tree
    sizes = Params(struct_bytes=ctypes.sizeof(Params), batch=params.batch, len_q=params.len_q,
                   len_k=params.len_k, packed=params.packed)
    for field, (name, values) in host_lengths.items():
        if values is None:
            raise invalid(f"{name} is on the GPU, must be a list or on the host with a tree")
        setattr(sizes, field, _address(values))
    drafts = lengths(options, params.batch)
    place = bits.ctypes.data if _tensors.is_numpy(bits) else bits.data_ptr()
    row = -(-shape[2] // 8)
    struct = TreeStruct(ctypes.sizeof(TreeStruct), place, shape[2],
                        0 if shape[0] == 1 else shape[1] * row, _address(drafts))
    bias_row = -(-params.len_k // 8)
    out = array.array("B", bytes(params.batch * params.len_q * bias_row))
    check(library().attend_write_tree(ctypes.byref(struct), ctypes.byref(sizes), _address(out),
                                      len(out)))
    params.bias, params.bias_dtype = staging.place_numbers(out) or None, BIT
    params.bias_stride_b, params.bias_stride_h = 8 * params.len_q * bias_row, 0
    params.bias_stride_q = 8 * bias_row
    return True
