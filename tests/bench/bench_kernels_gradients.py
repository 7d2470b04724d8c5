# SPDX-License-Identifier: Apache-2.0
"""Contenders of the backward pass: attend through the C ABI, and functions with autograd. Inputs
are sets as in bench_kernels_contenders with one attention each; `d_os` are the gradients of O."""

import contextlib
import ctypes
import math

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import bench_kernels_contenders as entries
from attend_kernels import _library


def workspace(byte_count):
    """(tensor, an address in it that is aligned to 256 bytes, bytes from there on)."""
    tensor = torch.zeros(byte_count + 256, dtype=torch.uint8, device="cuda:0")
    return tensor, (tensor.data_ptr() + 255) // 256 * 256, byte_count


def by_o(sets):
    """dO for every set."""
    return [torch.randn(*tensors[0].shape[:3], tensors[2].shape[3], device=tensors[0].device,
                        dtype=tensors[0].dtype) for (_, tensors), in sets]


class AttendGradients(entries.Contender):
    """One call of the C ABI per run. O and LSE are those of attend's forward pass."""
    is_attend = True

    def __init__(self, attend, d_os, kernel="auto", name="attend"):
        super().__init__(name)
        self.attend, self.d_os, self.kernel = attend, d_os, kernel

    def prepare(self, sets):
        super().prepare(sets)
        (shape, _), = self.sets[0]
        lib, needed = self.attend.lib, ctypes.c_int64()
        self.calls = [self._call(shape, tensors, d_o)
                      for ((shape, tensors),), d_o in zip(self.sets, self.d_os)]
        call = self.calls[0][0]
        self.attend.check(lib.attend_backward_workspace_bytes(ctypes.byref(call),
                                                              ctypes.byref(needed)))
        forward = self.attend.workspace_bytes(shape, "auto")
        self.memory, place, size = workspace(max(needed.value, forward))
        for call, _, _ in self.calls:
            call.attention.workspace, call.attention.workspace_bytes = place, size
            call.attention.kernel = b"auto"
            self.attend.check(lib.attend_run(ctypes.byref(call.attention), None))
            call.attention.kernel = self.kernel.encode()

    def _call(self, shape, tensors, d_o):
        """(attend_backward_params, the gradients, further objects that they point to)."""
        q, k, v = tensors
        o, lse = torch.empty_like(d_o), q.new_empty(q.shape[:3], dtype=torch.float32)
        p = self.attend.params(shape, tensors, o, self.kernel)
        p.lse, p.lse_stride_b, p.lse_stride_h = lse.data_ptr(), *lse.stride()[:2]
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        call = _library.BackwardParams(struct_bytes=ctypes.sizeof(_library.BackwardParams),
                                       attention=p)
        for name, tensor in zip(("d_o", "d_q", "d_k", "d_v"), (d_o, *gradients)):
            setattr(call, name, _library.TensorStruct(tensor.data_ptr(), *tensor.stride()[:3]))
        return call, gradients, (o, lse)

    def selected(self):
        """The kernel that runs."""
        name = ctypes.c_char_p()
        self.attend.check(self.attend.lib.attend_select_backward(
            ctypes.byref(self.calls[0][0]), ctypes.byref(name), None))
        return name.value.decode()

    def poison(self, n):
        for gradient in self.calls[n][1]:
            gradient.fill_(math.nan)

    def run(self, n):
        call, gradients, _ = self.calls[n]
        code = self.attend.lib.attend_run_backward(ctypes.byref(call), None)
        if code != 0:
            self.attend.check(code)
        return gradients

    def run_once(self):
        return self.run(0)

    def release(self):
        super().release()
        self.calls = self.memory = None


class TorchGradients(entries.Contender):
    """Autograd of `attention(shape, q, k, v)`. `deterministic`: with PyTorch's deterministic
    algorithms, if the backend has them."""

    def __init__(self, name, attention, d_os, deterministic=False):
        super().__init__(name)
        self.attention, self.d_os, self.deterministic = attention, d_os, deterministic

    def prepare(self, sets):
        super().prepare(sets)
        self.graphs = []
        for ((shape, tensors),), d_o in zip(self.sets, self.d_os):
            leaves = [x.detach().requires_grad_() for x in tensors]
            self.graphs.append((self.attention(shape, *leaves), leaves, d_o))

    @contextlib.contextmanager
    def context(self):
        before = torch.are_deterministic_algorithms_enabled()
        filled = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False  # would be part of the time
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            torch.utils.deterministic.fill_uninitialized_memory = filled

    def run(self, n):
        o, leaves, d_o = self.graphs[n]
        return torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    def run_once(self):
        """As in training, where the graph's tensors are freed as soon as they are used."""
        (o, leaves, d_o), = self.graphs
        return torch.autograd.grad(o, leaves, d_o)

    def release(self):
        super().release()
        self.graphs = None


def through_sdpa(backend, dropout_p=0.0):
    """PyTorch's SDPA with a single backend."""
    def attention(shape, q, k, v):
        if (shape.left, shape.right) not in ((-1, -1), (-1, 0)):
            raise entries.CannotRun("SDPA has no window")
        with sdpa_kernel(backend):
            return sdpa(q, k, v, dropout_p=dropout_p, is_causal=shape.right == 0,
                        enable_gqa=shape.heads_q != shape.heads_kv)
    return attention


def unfused(shape, q, k, v):
    return entries.unfused(q, k, v, entries.hidden_by(shape, q.device))


def through_flash(shape, q, k, v):
    """PyTorch's FlashAttention-2 called without SDPA, as it supports windows."""
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.ops.aten._flash_attention_forward(
        *swapped, None, None, shape.length, shape.length, 0.0, False, False,
        window_size_left=shape.left, window_size_right=shape.right)[0]
    return o.transpose(1, 2)
