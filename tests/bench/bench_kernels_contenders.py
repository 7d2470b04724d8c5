# SPDX-License-Identifier: Apache-2.0
"""The contenders of bench_kernels.py: attend's kernels through the C ABI, PyTorch's SDPA backends,
an unfused baseline. A contender computes outputs from input sets; a set is a list of (shape, (q, k,
v)), one per attention, in BHLD on the GPU; outputs are one tensor per attention."""

import contextlib
import ctypes
import math
import pathlib
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels/python"))

from attend_kernels import _library  # noqa: E402

import bench_kernels_cells as cells  # noqa: E402

BACKENDS = {cells.CUDNN: SDPBackend.CUDNN_ATTENTION, cells.FLASH: SDPBackend.FLASH_ATTENTION,
            cells.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION, cells.MATH: SDPBackend.MATH}


class CannotRun(Exception):
    """A contender does not support a cell; the message says why."""


class Contender:
    """`is_attend`: a wrong answer fails the run. `mask` replaces the cell's mask."""
    is_attend = False
    note = ""

    def __init__(self, name, mask=None):
        self.name, self.mask = name, mask or (lambda shape: shape)

    def problems(self, problem_set):
        return [(self.mask(shape), tensors) for shape, tensors in problem_set]

    def prepare(self, sets):
        """Does everything that is not timed. Raises CannotRun."""
        self.sets = [self.problems(one) for one in sets]

    def context(self):
        """A context for calls that are timed together."""
        return contextlib.nullcontext()

    def poison(self, n):
        """Fills the outputs of set n with NaN, if the contender owns them."""

    def beside_bytes(self):
        """Bytes of memory beside inputs and outputs, None if they have to be measured."""
        return None

    def release(self):
        self.sets = None


def wanted(contenders, options):
    """Our contenders and the selected rivals."""
    return [c for c in contenders if c.is_attend or
            not options.no_rivals and cells.is_raced(c.name, options.rival)]


def inputs(shape):
    """Random Q, K and V."""
    sizes = ((shape.heads_q, shape.dim), (shape.heads_kv, shape.dim),
             (shape.heads_kv, shape.dim_v))
    return tuple(torch.randn(shape.batch, heads, shape.length, dim, device="cuda:0",
                             dtype=getattr(torch, shape.dtype)) for heads, dim in sizes)


class Attend:
    """libattend_kernels.so and its queries."""

    def __init__(self, path):
        self.lib = _library.load(path)

    def check(self, code):
        if code != 0:
            text = self.lib.attend_last_error().decode(errors="replace")
            raise CannotRun(f"{_library.CODES.get(code, code)}: {text}")

    def params(self, shape, tensors, output, kernel, config=-1):
        """attend_params of one attention; `tensors` and `output` may be None for queries."""
        p = _library.Params(
            struct_bytes=ctypes.sizeof(_library.Params), device=0, batch=shape.batch,
            dtype=_library.DTYPES[shape.dtype], heads_q=shape.heads_q, heads_kv=shape.heads_kv,
            len_q=shape.length, len_k=shape.length, dim=shape.dim, dim_v=shape.dim_v,
            window_left=shape.left, window_right=shape.right, scale=1 / math.sqrt(shape.dim),
            config=config, kernel=kernel.encode())
        dims = (shape.dim, shape.dim, shape.dim_v, shape.dim_v)
        heads = (shape.heads_q, shape.heads_kv, shape.heads_kv, shape.heads_q)
        for name, tensor, dim, h in zip("qkvo", (*(tensors or [None] * 3), output), dims, heads):
            strides = tensor.stride()[:3] if tensor is not None else \
                (h * shape.length * dim, shape.length * dim, dim)
            address = tensor.data_ptr() if tensor is not None else 4096
            setattr(p, name, _library.TensorStruct(address, *strides))
        return p

    def selected(self, shape, kernel="auto"):
        """(kernel, why). Raises CannotRun."""
        name, why = ctypes.c_char_p(), ctypes.c_char_p()
        p = self.params(shape, None, None, kernel)
        self.check(self.lib.attend_select(ctypes.byref(p), ctypes.byref(name), ctypes.byref(why)))
        return name.value.decode(), why.value.decode()

    def configs(self, shape, kernel):
        """Names of the compiled variants of a kernel for this shape."""
        p, count = self.params(shape, None, None, kernel), ctypes.c_int32()
        self.check(self.lib.attend_configs(ctypes.byref(p), ctypes.byref(count)))
        return [self.lib.attend_config_name(ctypes.byref(p), n).decode()
                for n in range(count.value)]

    def workspace_bytes(self, shape, kernel):
        p, found = self.params(shape, None, None, kernel), ctypes.c_int64()
        self.check(self.lib.attend_workspace_bytes(ctypes.byref(p), ctypes.byref(found)))
        return found.value


class AttendContender(Contender):
    """One batched call of the C ABI per run; arguments and outputs are made in advance."""
    is_attend = True

    def __init__(self, attend, kernel, config=-1, name=None, mask=None):
        super().__init__(name or kernel, mask)
        self.attend, self.kernel, self.config = attend, kernel, config

    def prepare(self, sets):
        super().prepare(sets)
        self.outputs, self.params, needed = [], [], ctypes.c_int64()
        kernel = "auto" if self.kernel == cells.AUTO else self.kernel
        for problems in self.sets:
            outputs = [torch.empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3], dtype=q.dtype,
                                   device=q.device) for _, (q, _, v) in problems]
            listed = [self.attend.params(shape, tensors, output, kernel, self.config)
                      for (shape, tensors), output in zip(problems, outputs)]
            self.outputs.append(outputs)
            self.params.append((_library.Params * len(listed))(*listed))
        self.count = len(self.params[0])
        self.attend.check(self.attend.lib.attend_batch_workspace_bytes(
            self.params[0], self.count, ctypes.byref(needed)))
        self.needed = needed.value
        self.workspace = torch.zeros(self.needed + 256, dtype=torch.uint8, device="cuda:0")
        self.place = (self.workspace.data_ptr() + 255) // 256 * 256

    def poison(self, n):
        for output in self.outputs[n]:
            output.fill_(math.nan)

    def run(self, n):
        code = self.attend.lib.attend_run_batch(self.params[n], self.count, self.place,
                                                self.needed, None)
        if code != 0:
            self.attend.check(code)
        return self.outputs[n]

    def beside_bytes(self):
        return self.needed

    def release(self):
        super().release()
        self.outputs = self.params = self.workspace = None


class AttendEach(AttendContender):
    """The same without batching: one call per attention."""

    def prepare(self, sets):
        super().prepare(sets)
        size = ctypes.sizeof(_library.Params)
        self.places = [[ctypes.addressof(one) + n * size for n in range(self.count)]
                       for one in self.params]

    def run(self, n):
        for place in self.places[n]:
            self.attend.check(self.attend.lib.attend_run_batch(place, 1, self.place, self.needed,
                                                               None))
        return self.outputs[n]


class TorchContender(Contender):
    """One SDPA call per attention, with one backend allowed."""

    def __init__(self, name, backend, mask=None):
        super().__init__(name, mask)
        self.backend = backend

    def prepare(self, sets):
        super().prepare(sets)
        self.options = []
        for shape, _ in self.sets[0]:
            if (shape.left, shape.right) not in ((-1, -1), (-1, 0)):
                raise CannotRun("SDPA has no window")
            grouped = {"enable_gqa": True} if shape.heads_q != shape.heads_kv else {}
            self.options.append({"is_causal": shape.right == 0, **grouped})

    def context(self):
        return sdpa_kernel(self.backend)

    def run(self, n):
        return [sdpa(q, k, v, **options)
                for (_, (q, k, v)), options in zip(self.sets[n], self.options)]


class FlashWindow(Contender):
    """PyTorch's FlashAttention-2 called without SDPA, as it supports windows."""

    def prepare(self, sets):
        super().prepare(sets)
        self.swapped = [[tuple(x.transpose(1, 2) for x in tensors) for _, tensors in one]
                        for one in self.sets]

    def run(self, n):
        outputs = []
        for (shape, _), (q, k, v) in zip(self.sets[n], self.swapped[n]):
            outputs.append(torch.ops.aten._flash_attention_forward(
                q, k, v, None, None, shape.length, shape.length, 0.0, False, False,
                window_size_left=shape.left, window_size_right=shape.right)[0].transpose(1, 2))
        return outputs

    def release(self):
        super().release()
        self.swapped = None


class PaddedCudnn(Contender):
    """The ragged mix for cuDNN through SDPA: causal and full requests in separate calls, each
    padded to its longest. The causal half needs no padding mask, as padding follows the last
    row."""
    MASKS = ("an expanded padding mask", "a padding mask of [B, 1, L, L]",
             "no padding mask: its unmasked half is wrong, and timed in its favour")

    def prepare(self, sets):
        super().prepare(sets)
        problems = self.sets[0]
        self.halves = [self._pad(problems, right) for right in (-1, 0)]
        for kind in self.MASKS:
            self.mask_tensor = self._padding_mask(kind)
            try:
                with self.context():
                    self.run(0)
                torch.cuda.synchronize()
            except RuntimeError:
                continue
            self.note = f"cuDNN took {kind}"
            self.unchecked = kind == self.MASKS[-1]
            return
        raise CannotRun("SDPA's cuDNN backend refused the padded halves")

    @staticmethod
    def _pad(problems, right):
        """(indices, lengths, stacked q, k, v) of the requests with this mask."""
        some = [n for n, (shape, _) in enumerate(problems) if shape.right == right]
        lengths = [problems[n][0].length for n in some]
        longest = -(-max(lengths) // 64) * 64
        stacked = []
        for which in range(3):
            first = problems[some[0]][1][which]
            block = first.new_zeros(len(some), first.shape[1], longest, first.shape[3])
            for row, n in enumerate(some):
                block[row, :, :lengths[row]] = problems[n][1][which][0]
            stacked.append(block)
        return some, lengths, stacked

    def _padding_mask(self, kind):
        _, lengths, (q, _, _) = self.halves[0]
        if kind == self.MASKS[2]:
            return None
        ends = torch.tensor(lengths, device=q.device)[:, None]
        seen = torch.arange(q.shape[2], device=q.device)[None, :] < ends
        bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        bias.masked_fill_(~seen, -math.inf)
        whole = bias[:, None, None, :].expand(-1, 1, q.shape[2], -1)
        return whole if kind == self.MASKS[0] else whole.contiguous()

    def context(self):
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)

    def run(self, n):
        outputs = [None] * len(self.sets[0])
        for (some, lengths, (q, k, v)), causal in zip(self.halves, (False, True)):
            mask = None if causal else self.mask_tensor
            o = sdpa(q, k, v, attn_mask=mask, is_causal=causal)
            for row, index in enumerate(some):
                outputs[index] = o[row:row + 1, :, :lengths[row]]
        return outputs

    def release(self):
        super().release()
        self.halves = self.mask_tensor = None


def hidden_by(shape, device):
    """A bool mask of the hidden pairs, [L, L]; None if there are none."""
    if shape.heads_q != shape.heads_kv or shape.left >= 0 or shape.right > 0:
        raise CannotRun("the baseline has one mask and no groups")
    if shape.right < 0:
        return None
    return torch.ones(shape.length, shape.length, dtype=torch.bool, device=device).triu_(1)


def unfused(q, k, v, hidden):
    """Standard attention with its scores in memory, in the inputs' dtype."""
    scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.mT
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


class Unfused(Contender):
    """matmul, mask, softmax, matmul. The mask is made in advance."""

    def prepare(self, sets):
        super().prepare(sets)
        self.hidden = [hidden_by(shape, q.device) for shape, (q, _, _) in self.sets[0]]

    def run(self, n):
        return [unfused(q, k, v, hidden)
                for (_, (q, k, v)), hidden in zip(self.sets[n], self.hidden)]

    def release(self):
        super().release()
        self.hidden = None
