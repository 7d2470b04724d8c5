# SPDX-License-Identifier: Apache-2.0
"""The parts of torch that tests/bench/python_server.py uses, on NumPy. Imported as torch in a
process whose PYTHONPATH begins with this folder."""

import contextlib
import types

import numpy as np

float16, float32, uint8 = np.float16, np.float32, np.uint8
bfloat16 = "bfloat16"  # NumPy has no such dtype
inference_mode = contextlib.nullcontext
device = str
cuda = types.SimpleNamespace(is_available=lambda: False)


class Tensor:
    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def reshape(self, shape):
        return Tensor(self.array.reshape(shape))

    def to(self, where):
        assert where == "cpu"
        return self

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array))

    def cpu(self):
        return self

    def view(self, dtype):
        return Tensor(self.array.view(dtype))

    def numpy(self):
        return self.array


def frombuffer(buffer, dtype):
    assert isinstance(buffer, bytearray)  # torch warns if the buffer is read-only
    return Tensor(np.frombuffer(buffer, dtype))


def scaled_dot_product_attention(q, k, v, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * np.einsum("bhqd,bhkd->bhqk", q.array.astype(np.float64), k.array)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return Tensor(np.einsum("bhqk,bhkd->bhqd", weights, v.array).astype(q.array.dtype))


nn = types.SimpleNamespace(
    functional=types.SimpleNamespace(scaled_dot_product_attention=scaled_dot_product_attention))
