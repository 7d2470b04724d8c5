# SPDX-License-Identifier: Apache-2.0
"""libattend_kernels.so in NumPy: the same C functions, with host memory as device memory. They read
through the addresses and strides they are given, as a kernel would."""

import ctypes

import numpy as np

from attend_kernels import _library

DTYPES = {1: np.float16, 3: np.float32}


def strided(address, shape, strides, dtype):
    """A writable view of memory; strides count elements."""
    item = np.dtype(dtype).itemsize
    if 0 in shape:
        return np.empty(shape, dtype)
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    block = np.ctypeslib.as_array((ctypes.c_uint8 * (size * item)).from_address(address))
    return np.lib.stride_tricks.as_strided(block.view(dtype), shape, [s * item for s in strides])


def softmax(scores, sink):
    """Weights and LSE of one row. Without keys the weights are 0 and the LSE is the sink's."""
    logits = scores if sink is None else np.append(scores, sink)
    top = logits.max(initial=-np.inf)
    if top == -np.inf:
        return np.zeros_like(scores), -np.inf
    total = np.exp(logits - top).sum()
    return np.exp(scores - top) / total, top + np.log(total)


def row(p, s, i, j):
    """Capped, biased and masked scores of query i over keys j of one sequence and head."""
    scores = p.scale * (s["k"] @ s["q"][i])
    if p.softcap > 0:
        scores = p.softcap * np.tanh(scores / p.softcap)
    distance = j - i - s["offset"]
    scores = scores + s["bias"][i, :len(j)] - s["slope"] * abs(distance)
    hidden = np.zeros(len(j), bool)
    if p.window_left >= 0:
        hidden |= distance < -p.window_left
    if p.window_right >= 0:
        hidden |= distance > p.window_right
    return np.where(hidden, -np.inf, scores)


def head(p, b, h, q_begin, q_len, k_begin, k_len):
    """The operands of one sequence and head in double."""
    dtype, kv = DTYPES[p.dtype], h // (p.heads_q // p.heads_kv)

    def rows(t, head_index, begin, count, dim, dtype=dtype):
        item = np.dtype(dtype).itemsize
        first = t.stride_b * b + t.stride_h * head_index + t.stride_l * begin
        return strided((t.data or 0) + first * item, (count, dim), (t.stride_l, 1), dtype)

    def keys(t, dim):
        if not p.page_rows:
            return rows(t, kv, k_begin, k_len, dim)
        table = strided(p.kv_pages + 4 * b * p.kv_pages_stride, (-(-k_len // p.page_rows),), (1,),
                        np.int32)
        item = np.dtype(dtype).itemsize
        pages = [strided(t.data + (t.stride_b * int(n) + t.stride_h * kv) * item,
                         (p.page_rows, dim), (t.stride_l, 1), dtype) for n in table]
        return np.concatenate([np.zeros((0, dim), dtype), *pages])[:k_len]

    bias = np.zeros((p.len_q, p.len_k))
    if p.bias and p.bias_dtype == _library.BIT:
        assert p.bias_stride_b % 8 == p.bias_stride_h % 8 == p.bias_stride_q % 8 == 0
        first = (b * p.bias_stride_b + h * p.bias_stride_h) // 8
        packed = strided(p.bias + first, (p.len_q, -(-p.len_k // 8)), (p.bias_stride_q // 8, 1),
                         np.uint8)
        seen = np.unpackbits(packed, axis=-1, count=p.len_k, bitorder="little")
        bias = np.where(seen, 0.0, -np.inf)
    elif p.bias:
        kind = DTYPES[p.bias_dtype]
        first = b * p.bias_stride_b + h * p.bias_stride_h
        bias = strided(p.bias + first * np.dtype(kind).itemsize, (p.len_q, p.len_k),
                       (p.bias_stride_q, 1), kind).astype(float)
    slope = 0.0
    if p.alibi_slopes:
        slope = float(strided(p.alibi_slopes + 4 * (b * p.alibi_stride_b + h), (1,), (1,),
                              np.float32)[0])
    return {"q": rows(p.q, h, q_begin, q_len, p.dim).astype(float),
            "k": keys(p.k, p.dim).astype(float),
            "v": keys(p.v, p.dim_v).astype(float),
            "o": rows(p.o, h, q_begin, q_len if p.packed else p.len_q, p.dim_v,
                      DTYPES[p.o_dtype]),
            "bias": bias, "slope": slope, "offset": 0 if p.alignment else k_len - q_len}


def attention(p):
    """Fills o and lse of one attend_params."""
    def lengths(address, count, value):
        return strided(address, (count,), (1,), np.int64) if address else [value] * count

    for b in range(p.batch):
        if p.packed:
            q, k = (lengths(a, p.batch + 1, 0) for a in (p.q_offsets, p.kv_offsets))
            place = (q[b], q[b + 1] - q[b], k[b], k[b + 1] - k[b])
        else:
            place = (0, lengths(p.q_lengths, p.batch, p.len_q)[b],
                     0, lengths(p.kv_lengths, p.batch, p.len_k)[b])
        for h in range(p.heads_q):
            s = head(p, b, h, *map(int, place))
            sink = float(strided(p.sinks + 4 * h, (1,), (1,), np.float32)[0]) if p.sinks else None
            lse = np.full(len(s["o"]), -np.inf)
            s["o"][:] = 0
            for i in range(len(s["q"])):
                weights, lse[i] = softmax(row(p, s, i, np.arange(len(s["k"]))), sink)
                s["o"][i] = weights @ s["v"]
            if p.lse:
                first = b * p.lse_stride_b + h * p.lse_stride_h + int(place[0])
                strided(p.lse + 4 * first, lse.shape, (1,), np.float32)[:] = lse


class FakeLibrary:
    """The functions of attend_c.h that attend_kernels calls. `blocks` holds the live allocations,
    `streams` every stream that was used, `launches` the batch size of every launch."""
    workspace_bytes = 32768

    def __init__(self):
        self.blocks, self.streams, self.launches, self.error = {}, set(), [], b""
        self.selected = None  # the params of the last attend_select

    def attend_last_error(self):
        return self.error

    def attend_device_count(self, count):
        count._obj.value = 1
        return 0

    def attend_malloc(self, device, byte_count, address):
        if byte_count > 2**30:
            self.error = b"no memory"
            return 8
        if byte_count:
            block = ctypes.create_string_buffer(b"\xff" * byte_count, byte_count)
            address._obj.value = ctypes.addressof(block)
            self.blocks[address._obj.value] = block
        return 0

    def attend_free(self, device, address):
        del self.blocks[address]
        return 0

    def attend_memcpy(self, device, to, source, byte_count, kind, stream):
        self.streams.add(stream)
        if byte_count:
            ctypes.memmove(to, source, byte_count)
        return 0

    def attend_memset(self, device, address, value, byte_count, stream):
        ctypes.memset(address, value, byte_count)
        return 0

    def attend_synchronize(self, device, stream):
        return 0

    def attend_batch_workspace_bytes(self, params, count, byte_count):
        byte_count._obj.value = self.workspace_bytes
        return 0

    def attend_select(self, params, kernel, why):
        self.selected = params._obj
        kernel._obj.value, why._obj.value = b"fake", b"it is here"
        return 0

    def attend_run_batch(self, params, count, workspace, workspace_bytes, stream):
        assert workspace and workspace_bytes == self.workspace_bytes
        first = ctypes.string_at(workspace, _library.WORKSPACE_ZERO_BYTES)
        assert first == bytes(_library.WORKSPACE_ZERO_BYTES)
        self.streams.add(stream)
        self.launches.append(count)
        for p in params:
            assert p.struct_bytes == ctypes.sizeof(_library.Params)
            if p.kernel not in (b"auto", b"fake"):
                self.error = b'kernel is "' + p.kernel + b'", must be one of auto, fake'
                return 3
            attention(p)
        return 0
