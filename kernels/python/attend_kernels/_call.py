# SPDX-License-Identifier: Apache-2.0
"""Checks one attention's Python arguments and converts them to attend_params."""

import ctypes
import math
import operator

from . import _checks, _tensors, _tree
from ._library import ALIGNMENTS, BIT, CPU, DTYPES, Params, TensorStruct, invalid
from ._staging import NoStaging

_LENGTH_MAX = 2**30  # kLengthMax
# Positions of B, H and L in a shape; packed tensors have no B.
LAYOUTS = {"BHLD": (0, 1, 2), "BLHD": (0, 2, 1), "LHD": (None, 1, 0)}


def dropout_seed(arguments):
    """An integer in [0, 2^64), or None if there is no dropout. Error: it is missing or another."""
    value = arguments["dropout_seed"]
    if value is None:
        if _checks.real("dropout_p", arguments["dropout_p"]) > 0:
            raise invalid(f"dropout_seed is None, dropout_p {arguments['dropout_p']} needs one")
        return None
    try:
        seed = operator.index(value)
    except TypeError as failure:
        raise invalid(f"dropout_seed is not an integer: {failure}") from None
    if not 0 <= seed < 2**64:
        raise invalid(f"dropout_seed is {value}, must be in [0, 2^64)")
    return seed


def o_dtype(asked, q):
    """O's dtype: q's, or float32."""
    if asked not in (None, q.dtype, "float32"):
        raise invalid(f"o_dtype is {asked!r}, must be q's dtype or 'float32'")
    return asked or q.dtype


class Call:
    """One attention: checks its arguments and fills `params` with memory from `staging`."""

    def __init__(self, arguments, staging):
        self.a, self.staging = arguments, staging
        self.made = []  # arrays allocated here for the caller
        # Lengths that were given, by field of `params`: (name, values or None if on the GPU).
        self.host_lengths = {}
        self.axes = _checks.one_of("layout", arguments["layout"], LAYOUTS)
        self.packed = self.axes[0] is None
        alignment = _checks.one_of("alignment", arguments["alignment"], ALIGNMENTS)
        self.params = Params(struct_bytes=ctypes.sizeof(Params), device=staging.device, config=-1,
                             packed=self.packed, alignment=alignment,
                             kernel=_checks.text("kernel", arguments["kernel"]))
        self.q = self._operand("q")
        self.k, self.v = self._operand("k"), self._operand("v")
        self._read_shape()
        self._read_lengths()
        self._read_terms()
        self._make_outputs()

    def _operand(self, name):
        tensor = self.staging.read(name, self.a[name])
        self._check_form(tensor)
        if name != "q":
            self._check_same(tensor, "dtype", tensor.dtype, self.q.dtype)
            self._check_place(tensor)
        return tensor

    def _check_form(self, tensor):
        """Checks that it has the layout's dimensions."""
        name = tensor.name
        dimensions = 3 if self.packed else 4
        if len(tensor.shape) != dimensions:
            raise invalid(f"{name} has {len(tensor.shape)} dimensions, layout {self.a['layout']} "
                          f"needs {dimensions}")
        self._check_last(tensor)

    def _check_place(self, tensor):
        self._check_same(tensor, "device", self.staging.device_of(tensor),
                         self.staging.device_of(self.q))

    @staticmethod
    def _check_last(tensor):
        several = tensor.shape and tensor.shape[-1] > 1 and 0 not in tensor.shape
        if several and tensor.strides[-1] != 1:
            raise invalid(f"{tensor.name} has stride {tensor.strides[-1]} in its last dimension, "
                          f"must be 1")

    @staticmethod
    def _check_same(tensor, what, value, wanted):
        if value != wanted:
            names = ({None: "the host", CPU: "the CPU"}.get(x, x) for x in (value, wanted))
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
        self.o_dtype = o_dtype(self.a["o_dtype"], self.q)
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
        """`pages`: the number of pages, or None if the layout cannot have them."""
        p, value = self.params, self.a["page_table"]
        if pages is None:
            raise invalid(f"page_table is given, but layout {self.a['layout']} has none")
        if _tensors.device_of(value) is not None:
            table = self.staging.read("page_table", value, ("int32",))
            self._check_place(table)
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
            for name, longest in (("q_lengths", p.len_q), ("kv_lengths", p.len_k)):
                address, given = self._lengths(name, p.batch, longest)
                setattr(p, name, address)
                if given is not None:
                    self.host_lengths[name] = name, given[0]
            return
        p.q_offsets, p.len_q, p.batch = self._offsets("q", p.total_q)
        p.kv_offsets, p.len_k, batch = self._offsets("k", p.total_k)
        if batch != p.batch:
            raise invalid(f"cu_seqlens_k has {batch + 1} elements, must have cu_seqlens_q's "
                          f"{p.batch + 1}")

    def _lengths(self, name, count, bound):
        """(address, (values, count)); values is None if they are on the GPU. (None, None) if not
        given."""
        value = self.a[name]
        if value is None:
            return None, None
        if _tensors.device_of(value) is not None:
            if str(value.dtype).endswith("int32") and hasattr(value, "long"):
                value = value.long()
            tensor = self.staging.read(name, value, ("int64",))
            self._check_place(tensor)
            if len(tensor.shape) != 1 or count is not None and tensor.shape[0] != count:
                raise invalid(f"{name} has shape {tensor.shape}, must be ({count or 'B + 1'},)")
            self._check_last(tensor)
            return self.staging.place(tensor).address, (None, tensor.shape[0])
        values, shape = _tensors.numbers(name, value, "q")
        _checks.shape(name, shape, ("B + 1" if count is None else count,))
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
        self.host_lengths["q_offsets" if side == "q" else "kv_offsets"] = name, values
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
        p = self.params
        left, right = _checks.window(self.a["window"])
        p.window_left, p.window_right = left, 0 if self.a["causal"] else right
        for name in ("key_offset", "keys_after"):
            setattr(p, name, _checks.integer(name, self.a[name], 0, _LENGTH_MAX))
        scale = self.a["scale"]
        p.scale = 1 / math.sqrt(max(p.dim, 1)) if scale is None else _checks.real("scale", scale)
        p.softcap = _checks.real("softcap", self.a["softcap"])
        p.alibi_slopes, shape = self._floats("alibi_slopes", [(p.heads_q,), (p.batch, p.heads_q)])
        p.alibi_stride_b = p.heads_q if shape and len(shape) == 2 else 0
        p.sinks, _ = self._floats("sinks", [(p.heads_q,)])
        if self.a["bias"] is not None:
            self._read_bias()
        self._read_tree()
        p.dropout_p = _checks.real("dropout_p", self.a["dropout_p"])
        p.dropout_seed = dropout_seed(self.a) or 0

    def _floats(self, name, shapes):
        """(address, shape) of float32 numbers per head, contiguous on the GPU."""
        value = self.a[name]
        if value is None:
            return None, None
        if _tensors.device_of(value) is not None:
            tensor = self.staging.read(name, value, ("float32",))
            self._check_place(tensor)
            if tensor.strides != tensor.contiguous().strides:
                raise invalid(f"{name} has strides {tensor.strides}, must be contiguous")
            shape, place = tensor.shape, lambda: self.staging.place(tensor).address
        else:
            values, shape = _tensors.numbers(name, value, "f")
            place = lambda: self.staging.place_numbers(values)  # noqa: E731
        _checks.shape(name, shape, *shapes)
        return place(), shape

    def _read_bias(self):
        p = self.params
        given = self.a["bias"]
        self.masks = _tensors.is_mask(given)
        if self.masks and len(given.shape) > 0:
            bias = self.staging.read("bias", _tensors.packed_mask(given), ("uint8",))
        else:
            bias = self.staging.read("bias", given)
        shape = tuple(given.shape)
        if bias.dtype == "float64" != self.q.dtype:
            raise invalid(f"bias has dtype float64, must be float16, bfloat16 or float32 for q of "
                          f"{self.q.dtype}")
        if bias.device is not None:
            self._check_place(bias)
        self._check_last(bias)
        bounds = (p.batch, p.heads_q, p.len_q)
        fits = 1 <= len(shape) <= 4 and shape[-1] == p.len_k and all(
            size in (1, bound) for size, bound in zip(reversed(shape[:-1]), reversed(bounds)))
        if not fits:
            raise invalid(f"bias has shape {shape}, must broadcast to {(*bounds, p.len_k)} "
                          f"with its last dimension whole")
        self.bias_shape = shape
        bias = self.staging.place(bias)
        each = 8 if self.masks else 1  # elements per unit of the strides
        strides = [0 if size == 1 else each * stride
                   for size, stride in zip(bias.shape, bias.strides)]
        strides = [0] * (4 - len(strides)) + strides
        p.bias, p.bias_dtype = bias.address or None, BIT if self.masks else DTYPES[bias.dtype]
        p.bias_stride_b, p.bias_stride_h, p.bias_stride_q = strides[:3]

    def _read_tree(self):
        if self.a.get("tree") is not None or self.a.get("tree_lengths") is not None:
            self.masks = _tree.set_bias(self.params, self.a, self.host_lengths, self.staging)

    def _make_outputs(self):
        p, out = self.params, self.a["out"]
        shape = (*self.q.shape[:-1], p.dim_v)
        if out is None:
            out, placed = self._make(shape, self.o_dtype)
        else:
            placed = self.staging.output(self._read_out(out, shape))
        p.o = self._struct(placed)
        self.result = out
        if self.a["return_lse"] and not isinstance(self.staging, NoStaging):
            self._make_lse()

    def _read_out(self, out, shape):
        tensor = self.staging.read("out", out)
        if tensor.dtype != self.o_dtype:
            raise invalid(f"out has dtype {tensor.dtype}, must have {self.o_dtype}")
        self._check_place(tensor)
        if tensor.shape != shape:
            raise invalid(f"out has shape {tensor.shape}, must be {shape}")
        self._check_last(tensor)
        numpys = tensor.kind == "numpy"
        strides, item = (out.strides, out.itemsize) if numpys else (tensor.strides, 1)
        if _tensors.overlaps_itself(shape, strides, item):
            raise invalid(f"out has strides {tuple(strides)} for shape {shape}, by which it may "
                          f"overlap itself: each must step over all that the smaller ones reach")
        if numpys and not out.flags.writeable:
            raise invalid("out is read-only, must be writable")
        return tensor

    def _lse_shape(self):
        p = self.params
        return (p.heads_q, p.total_q) if self.packed else (p.batch, p.heads_q, p.len_q)

    def _make(self, shape, dtype):
        """A new array for the caller, and the tensor that the kernel writes. None if it only
        selects."""
        if isinstance(self.staging, NoStaging):
            fresh = _tensors.Tensor("result", self.q.kind, 0, shape, (), dtype, None, None)
            return None, self.staging.output(fresh.contiguous())
        made = _tensors.empty_like(self.q, shape, dtype, self.staging.stream)
        self.made.append(made.owner)
        return made.owner, self.staging.output(made)

    def _make_lse(self):
        lse, placed = self._make(self._lse_shape(), "float32")
        self._set_lse(placed)
        self.result = (self.result, lse)

    def _set_lse(self, tensor):
        p = self.params
        p.lse, p.lse_stride_h = tensor.address or None, tensor.strides[-2]
        p.lse_stride_b = 0 if self.packed else tensor.strides[0]
