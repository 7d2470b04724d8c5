# SPDX-License-Identifier: Apache-2.0
"""The dropout mask in NumPy, written from the description in kernels/contract/dropout.h."""

import numpy as np

ROUNDS = 7


def _philox(seed, counter):
    """Philox4x32-7: four arrays of 32-bit numbers from four counters, all stored as uint64."""
    low = np.uint64(0xffffffff)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    key0, key1 = seed & 0xffffffff, seed >> 32
    for _ in range(ROUNDS):
        product0, product1 = np.uint64(0xd2511f53) * c0, np.uint64(0xcd9e8d57) * c2
        c0, c1, c2, c3 = ((product1 >> np.uint64(32)) ^ c1 ^ np.uint64(key0), product1 & low,
                          (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(key1), product0 & low)
        key0, key1 = (key0 + 0x9e3779b9) & 0xffffffff, (key1 + 0xbb67ae85) & 0xffffffff
    return c0, c1, c2, c3


def kept(p, seed, batch, heads, rows, keys):
    """[batch, heads, rows, keys]: 0 where a weight is dropped, 1 / (1 - p) where it is kept, with p
    rounded to a multiple of 2^-16."""
    steps = round(float(np.float32(p)) * 65536)
    b, h, i, j = np.ogrid[:batch, :heads, :rows, :keys]
    counter = np.broadcast_arrays(8 * (i // 16) + i % 8, 4 * (j // 16) + j % 8 // 2, h, b)
    words = np.stack(_philox(seed, counter))
    word = np.broadcast_to(2 * (i // 8 % 2) + j // 8 % 2, counter[0].shape)
    chosen = np.take_along_axis(words, word[None], 0)[0]
    draw = np.where(j % 2 == 0, chosen & np.uint64(0xffff), chosen >> np.uint64(16))
    return np.where(draw >= steps, 65536 / (65536 - steps), 0.0)
