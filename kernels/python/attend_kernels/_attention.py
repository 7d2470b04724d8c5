# SPDX-License-Identifier: Apache-2.0
"""attention() and its relatives: Python arguments to attend_params, and the launch."""

import ctypes
import inspect
import math
import sys

from . import _tensors
from ._library import ALIGNMENTS, DTYPES, Error, Params, TensorStruct, check, invalid, library
from ._torch import allocating_on
from ._workspaces import Workspaces

# Where B, H and L stand in a shape; packed tensors have no B.
LAYOUTS = {"BHLD": (0, 1, 2), "BLHD": (0, 2, 1), "LHD": (None, 1, 0)}
INT64_MAX = 2**63 - 1


def attention(q, k, v, *, causal=False, alignment="bottom_right", window=None, scale=None,
              softcap=0.0, bias=None, alibi_slopes=None, sinks=None, q_lengths=None,
              kv_lengths=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k=None,
              max_seqlen_q=None, max_seqlen_k=None, layout="BHLD", return_lse=False,
              o_dtype=None, kernel="auto", out=None, stream=None):
    """softmax(scale * q k^T, capped, plus bias, minus ALiBi, under the mask) v, exactly.

    q, k, v: float16, bfloat16 or float32, all alike; [B, Hq, Lq, D], [B, Hkv, Lk, D] and
        [B, Hkv, Lk, Dv] for layout BHLD, heads and rows swapped for BLHD, [rows, H, D] for LHD,
        where cu_seqlens_q and cu_seqlens_k [B + 1] say where sequences begin. Hq is a multiple of
        Hkv; D and Dv are 1 to 256. Any strides but the last dimension's, which is 1.
    causal, alignment: keys after the diagonal are hidden; the diagonal ends at the last query and
        key ("bottom_right") or begins at the first ones ("top_left").
    window: (left, right) visible keys beside the diagonal, -1 for all.
    scale: 1/sqrt(D) if None. softcap: scores become softcap * tanh(score / softcap); 0 is off.
    bias: any of the three dtypes, [B|1, Hq|1, Lq|1, Lk], leading ones optional; added to scores.
    alibi_slopes: float32 [Hq] or [B, Hq]. sinks: float32 [Hq], a logit that joins the sum only.
    q_lengths, kv_lengths: [B] true lengths, for BHLD and BLHD. Rows beyond are not read; O there
        is 0. These, cu_seqlens, slopes and sinks may be lists; on the GPU lengths are int64 and
        trusted. A host list makes a call with GPU tensors wait for its end.
    page_table: int32 [B, n], for BHLD and BLHD: K and V are in pages, [pages, Hkv, rows, D] or
        [pages, rows, Hkv, D], rows a power of two, 16 to 1024. Key j of sequence b is row j % rows
        of page page_table[b][j // rows]; numbers beyond kv_lengths[b] are not read. On the GPU
        trusted, as lengths. Sequences may share pages.
    max_seqlen_q, max_seqlen_k: the longest sequence for LHD; needed if cu_seqlens are on the GPU.
    o_dtype: "float32" for O in float32 whatever q's dtype is, as partial answers that are merged by
        their LSE need it; else q's.
    kernel: a name to force one. out: where to write. stream: a CUDA stream (an integer or an
        object with cuda_stream); else PyTorch's current one if it is loaded, else the default.
        Of a PyTorch Stream, PyTorch is told that it uses these tensors; with another's, or an
        integer, keep them until it has run.

    Returns O in the layout of q with Dv, or (O, LSE float32 [B, Hq, Lq], packed [Hq, rows]) if
    return_lse. What it is matches q: NumPy, the same class as q, or a DeviceArray for DLPack.
    GPU results are ready in the stream's order. There is no gradient. Error says what is wrong.
    """
    return _run([dict(locals())], label="")[0]


def attention_batch(calls):
    """Several attentions of any shapes in as few launches as possible. calls: dicts with the
    arguments of `attention`, all on one device and stream. Returns its results in order. Outputs
    must not overlap anything else of the batch."""
    arguments = []
    for n, call in enumerate(calls):
        unknown = set(call) - set(_DEFAULTS)
        missing = {"q", "k", "v"} - set(call)
        if unknown or missing:
            raise invalid(f"calls[{n}] " + (f"has no argument {sorted(unknown)[0]}" if unknown
                                            else f"lacks {sorted(missing)[0]}"))
        arguments.append({**_DEFAULTS, **call})
    return _run(arguments, label="calls[{}]: ")


def select(q, k, v, **options):
    """Which kernel `attention` would run with these arguments, and why: (kernel, why)."""
    unknown = set(options) - set(_DEFAULTS)
    if unknown:
        raise invalid(f"select has no argument {sorted(unknown)[0]}")
    arguments = {**_DEFAULTS, "q": q, "k": k, "v": v, **options}
    device, stream = _place(arguments)
    call = _Call(arguments, _tensors.NoStaging(device, stream))
    kernel, why = ctypes.c_char_p(), ctypes.c_char_p()
    check(library().attend_select(ctypes.byref(call.params), ctypes.byref(kernel),
                                  ctypes.byref(why)))
    return kernel.value.decode(), why.value.decode()


_DEFAULTS = {name: None if parameter.default is inspect.Parameter.empty else parameter.default
             for name, parameter in inspect.signature(attention).parameters.items()}


def _place(arguments):
    """(device, stream) of a call: q's, and the stream asked for or else current."""
    device, stream = _tensors.device_of(arguments["q"]), arguments["stream"]
    if stream is not None:
        stream = int(getattr(stream, "cuda_stream", stream))
    elif device is not None and "torch" in sys.modules:
        stream = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    return device or 0, stream or 0


class _Call:
    """One attention: checks its arguments, and fills `params` with memory from `staging`."""

    def __init__(self, arguments, staging):
        self.a, self.staging = arguments, staging
        self.made = []  # arrays for the caller that were allocated here
        if arguments["layout"] not in LAYOUTS:
            raise invalid(f"layout is {arguments['layout']!r}, must be BHLD, BLHD or LHD")
        if arguments["alignment"] not in ALIGNMENTS:
            raise invalid(f"alignment is {arguments['alignment']!r}, must be bottom_right or "
                          f"top_left")
        self.axes = LAYOUTS[arguments["layout"]]
        self.packed = self.axes[0] is None
        self.params = Params(struct_bytes=ctypes.sizeof(Params), device=staging.device, config=-1,
                             packed=self.packed, alignment=ALIGNMENTS[arguments["alignment"]],
                             kernel=arguments["kernel"].encode())
        self.q = self._operand("q")
        self.k, self.v = self._operand("k"), self._operand("v")
        self._read_shape()
        self._read_lengths()
        self._read_terms()
        self._make_outputs()

    def _operand(self, name):
        tensor = _tensors.read(name, self.a[name], self.staging.stream)
        dimensions = 3 if self.packed else 4
        if len(tensor.shape) != dimensions:
            raise invalid(f"{name} has {len(tensor.shape)} dimensions, layout {self.a['layout']} "
                          f"needs {dimensions}")
        self._check_last(tensor)
        if name != "q":
            self._check_same(tensor, "dtype", tensor.dtype, self.q.dtype)
            self._check_same(tensor, "device", tensor.device, self.q.device)
        return tensor

    @staticmethod
    def _check_last(tensor):
        if tensor.shape and tensor.shape[-1] > 1 and tensor.strides[-1] != 1:
            raise invalid(f"{tensor.name} has stride {tensor.strides[-1]} in its last dimension, "
                          f"must be 1")

    @staticmethod
    def _check_same(tensor, what, value, wanted):
        if value != wanted:
            names = ("the host" if x is None else x for x in (value, wanted))
            raise invalid("{} has {} {}, must be q's, {}".format(tensor.name, what, *names))

    def _struct(self, tensor):
        b, h, l = self.axes
        strides = tensor.strides
        return TensorStruct(tensor.address, 0 if b is None else strides[b], strides[h], strides[l])

    def _read_shape(self):
        b, h, l = self.axes
        q, k, v, p = self.q.shape, self.k.shape, self.v.shape, self.params
        wanted = [("k", "head dim", k[-1], q[-1]), ("v", "heads", v[h], k[h]),
                  ("v", "rows", v[l], k[l])]
        paged = self.a["page_table"] is not None
        if b is not None:
            wanted += [("v", "pages", v[b], k[b])] if paged else [
                ("k", "batch", k[b], q[b]), ("v", "batch", v[b], q[b])]
        for name, what, value, bound in wanted:
            if value != bound:
                raise invalid(f"{name} has {what} {value}, must be {bound}")
        p.dtype = DTYPES[self.q.dtype]
        self.o_dtype = self.q.dtype if self.a["o_dtype"] is None else self.a["o_dtype"]
        if self.o_dtype not in (self.q.dtype, "float32"):
            raise invalid(f"o_dtype is {self.o_dtype!r}, must be q's dtype or 'float32'")
        p.o_dtype = DTYPES[self.o_dtype]
        p.heads_q, p.heads_kv, p.dim, p.dim_v = q[h], k[h], q[-1], v[-1]
        if self.packed:
            p.total_q, p.total_k = q[l], k[l]
        else:
            p.batch, p.len_q, p.len_k = q[b], q[l], k[l]
        if paged:
            self._read_pages(None if b is None else k[b])
        for name in "qkv":
            setattr(p, name, self._struct(self.staging.place(getattr(self, name))))

    def _read_pages(self, pages):
        """`pages`: how many there are, or None where the layout has none."""
        p, value = self.params, self.a["page_table"]
        if pages is None:
            raise invalid(f"page_table is given, but layout {self.a['layout']} has none")
        if _tensors.device_of(value) is not None:
            table = _tensors.read("page_table", value, self.staging.stream, ("int32",))
            self._check_same(table, "device", table.device, self.q.device)
            self._check_last(table)
            shape, stride, place = table.shape, table.strides[0], self.staging.place(table).address
        else:
            values, shape = _tensors.numbers("page_table", value, "i")
            wrong = [number for number in values if not 0 <= number < pages]
            if wrong:
                raise invalid(f"page_table has {wrong[0]}, must be in [0, {pages - 1}]")
            stride, place = shape[-1], self.staging.place_numbers(values)
        if len(shape) != 2 or shape[0] != p.batch:
            raise invalid(f"page_table has shape {tuple(shape)}, must be ({p.batch}, n)")
        p.page_rows, p.len_k = p.len_k, p.len_k * shape[1]
        p.kv_pages, p.kv_pages_stride = place, stride

    def _read_lengths(self):
        p = self.params
        unwanted = ("q_lengths", "kv_lengths") if self.packed else (
            "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        for name in unwanted:
            if self.a[name] is not None:
                raise invalid(f"{name} is given, but layout {self.a['layout']} has none")
        if not self.packed:
            p.q_lengths, _ = self._lengths("q_lengths", p.batch, p.len_q)
            p.kv_lengths, _ = self._lengths("kv_lengths", p.batch, p.len_k)
            return
        p.q_offsets, p.len_q, p.batch = self._offsets("q", p.total_q)
        p.kv_offsets, p.len_k, batch = self._offsets("k", p.total_k)
        if batch != p.batch:
            raise invalid(f"cu_seqlens_k has {batch + 1} elements, must have cu_seqlens_q's "
                          f"{p.batch + 1}")

    def _lengths(self, name, count, bound):
        """(address, values): values is None if they are on the GPU."""
        value = self.a[name]
        if value is None:
            return None, None
        if _tensors.device_of(value) is not None:
            if str(value.dtype).endswith("int32") and hasattr(value, "long"):
                value = value.long()
            tensor = _tensors.read(name, value, self.staging.stream, ("int64",))
            self._check_same(tensor, "device", tensor.device, self.q.device)
            if len(tensor.shape) != 1 or count is not None and tensor.shape[0] != count:
                raise invalid(f"{name} has shape {tensor.shape}, must be ({count or 'B + 1'},)")
            self._check_last(tensor)
            return self.staging.place(tensor).address, (None, tensor.shape[0])
        values, shape = _tensors.numbers(name, value, "q")
        if len(shape) != 1 or count is not None and shape[0] != count:
            raise invalid(f"{name} has shape {shape}, must be ({count or 'B + 1'},)")
        for n, length in enumerate(values):
            if not 0 <= length <= bound:
                raise invalid(f"{name}[{n}] is {length}, must be in [0, {bound}]")
        return self.staging.place_numbers(values), (values, shape[0])

    def _offsets(self, side, total):
        """(address, longest sequence, B) of cu_seqlens_q or _k."""
        name, longest = "cu_seqlens_" + side, self.a["max_seqlen_" + side]
        if self.a[name] is None:
            raise invalid(f"{name} is None, layout LHD needs it")
        address, (values, count) = self._lengths(name, None, total)
        if count < 1:
            raise invalid(f"{name} has no elements, must have B + 1")
        if values is None:
            if longest is None:
                raise invalid(f"max_seqlen_{side} is None, must be given if {name} is on the GPU")
            return address, longest, count - 1
        if values[0] != 0:
            raise invalid(f"{name}[0] is {values[0]}, must be 0")
        lengths = [after - before for before, after in zip(values, values[1:])]
        if lengths and min(lengths) < 0:
            raise invalid(f"{name} falls after element {lengths.index(min(lengths))}, must rise")
        found = max(lengths, default=0)
        if longest is not None and longest < found:
            raise invalid(f"max_seqlen_{side} is {longest}, must be at least {found}")
        return address, found if longest is None else longest, count - 1

    def _read_terms(self):
        p, window = self.params, self.a["window"]
        left, right = (-1, -1) if window is None else window
        for name, side in (("left", left), ("right", right)):
            if not -1 <= side <= INT64_MAX:
                raise invalid(f"window's {name} side is {side}, must be at least -1")
        p.window_left, p.window_right = left, 0 if self.a["causal"] else right
        scale = self.a["scale"]
        p.scale = 1 / math.sqrt(max(p.dim, 1)) if scale is None else scale
        p.softcap = self.a["softcap"]
        p.alibi_slopes, shape = self._floats("alibi_slopes", [(p.heads_q,), (p.batch, p.heads_q)])
        p.alibi_stride_b = p.heads_q if shape and len(shape) == 2 else 0
        p.sinks, _ = self._floats("sinks", [(p.heads_q,)])
        if self.a["bias"] is not None:
            self._read_bias()

    def _floats(self, name, shapes):
        """(address, shape) of float32 numbers per head, contiguous on the GPU."""
        value = self.a[name]
        if value is None:
            return None, None
        if _tensors.device_of(value) is not None:
            tensor = _tensors.read(name, value, self.staging.stream, ("float32",))
            self._check_same(tensor, "device", tensor.device, self.q.device)
            if tensor.strides != tensor.contiguous().strides:
                raise invalid(f"{name} has strides {tensor.strides}, must be contiguous")
            shape, place = tensor.shape, lambda: self.staging.place(tensor).address
        else:
            values, shape = _tensors.numbers(name, value, "f")
            place = lambda: self.staging.place_numbers(values)  # noqa: E731
        if shape not in shapes:
            raise invalid(f"{name} has shape {shape}, must be {' or '.join(map(str, shapes))}")
        return place(), shape

    def _read_bias(self):
        p = self.params
        bias = _tensors.read("bias", self.a["bias"], self.staging.stream)
        if bias.device is not None:
            self._check_same(bias, "device", bias.device, self.q.device)
        self._check_last(bias)
        bounds = (p.batch, p.heads_q, p.len_q)
        fits = 1 <= len(bias.shape) <= 4 and bias.shape[-1] == p.len_k and all(
            size in (1, bound) for size, bound in zip(reversed(bias.shape[:-1]), reversed(bounds)))
        if not fits:
            raise invalid(f"bias has shape {bias.shape}, must broadcast to {(*bounds, p.len_k)} "
                          f"with its last dimension whole")
        bias = self.staging.place(bias)
        strides = [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.strides)]
        strides = [0] * (4 - len(strides)) + strides
        p.bias, p.bias_dtype = bias.address or None, DTYPES[bias.dtype]
        p.bias_stride_b, p.bias_stride_h, p.bias_stride_q = strides[:3]

    def _make_outputs(self):
        p, stream = self.params, self.staging.stream
        shape = (*self.q.shape[:-1], p.dim_v)
        asking = isinstance(self.staging, _tensors.NoStaging)
        out = self.a["out"]
        if out is None and asking:
            fresh = _tensors.Tensor("out", self.q.kind, 0, shape, (), self.o_dtype, None, None)
            p.o = self._struct(self.staging.output(fresh.contiguous()))
            return
        if out is None:
            out = _tensors.empty_like(self.q, shape, self.o_dtype, stream)
            self.made.append(out)
        tensor = _tensors.read("out", out, stream)
        if tensor.dtype != self.o_dtype:
            raise invalid(f"out has dtype {tensor.dtype}, must have {self.o_dtype}")
        self._check_same(tensor, "device", tensor.device, self.q.device)
        if tensor.shape != shape:
            raise invalid(f"out has shape {tensor.shape}, must be {shape}")
        self._check_last(tensor)
        p.o = self._struct(self.staging.output(tensor))
        self.result = out
        if self.a["return_lse"] and not asking:
            self._make_lse()

    def _make_lse(self):
        p, rows = self.params, self.params.total_q if self.packed else self.params.len_q
        shape = (p.heads_q, rows) if self.packed else (p.batch, p.heads_q, rows)
        lse = _tensors.empty_like(self.q, shape, "float32", self.staging.stream)
        self.made.append(lse)
        placed = self.staging.output(_tensors.read("lse", lse, self.staging.stream))
        p.lse, p.lse_stride_h = placed.address or None, rows
        p.lse_stride_b = 0 if self.packed else p.heads_q * rows
        self.result = (self.result, lse)


def _prepare(arguments, label):
    """The calls and their staging. Error: an argument that cannot be, or two places in a batch."""
    device, stream = _place(arguments[0])
    staging, calls = _tensors.Staging(device, stream), []
    for n, one in enumerate(arguments):
        where = label.format(n)
        if _place(one) != (device, stream):
            raise invalid(f"{where}device and stream are {_place(one)}, must be calls[0]'s, "
                          f"{(device, stream)}")
        try:
            with allocating_on(one["stream"], stream, device, one.values()) as made:
                calls.append(_Call(one, staging))
                made += calls[-1].made
        except Error as failure:
            raise Error(failure.code, where + str(failure).partition(": ")[2]) from None
    return calls, staging


def _run(arguments, label):
    if not arguments:
        return []
    calls, staging = _prepare(arguments, label)
    params = (Params * len(calls))(*(call.params for call in calls))
    needed = ctypes.c_int64()
    check(library().attend_batch_workspace_bytes(params, len(calls), ctypes.byref(needed)))
    with _workspaces.use(staging.device, staging.stream, needed.value) as workspace:
        check(library().attend_run_batch(params, len(calls), workspace, needed.value,
                                         staging.stream or None))
    staging.finish()
    return [call.result for call in calls]


_workspaces = Workspaces()


def release_workspaces():
    """Waits for the streams that attention was called on, and frees the device memory kept for the
    next calls. An Error says that a stream had failed; the memory is free even so.

    Memory is kept for every stream by its handle. Call this before you destroy a stream that
    attention was called on (PyTorch never destroys its own): CUDA may give the handle to a new
    stream, whose calls would then use the memory while launches on the old one still do."""
    _workspaces.release()
