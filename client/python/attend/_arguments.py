# SPDX-License-Identifier: Apache-2.0
"""Converts one call's Python arguments to attend_client_params: tensors by address, without a copy
if they are contiguous."""

from __future__ import annotations

import ctypes
import math
import sys

from attend_kernels import _checks, _tensors, _tree
from attend_kernels._call import LAYOUTS as _AXES
from attend_kernels._call import dropout_seed
from attend_kernels._library import CPU, ITEM_BYTES, invalid

from . import _memory
from ._library import (BIT, CAUSAL, DTYPES, LAYOUTS, TRANSPORTS, WANTED, WINDOW, FloatsStruct,
                       NumbersStruct, Params, TensorStruct, nanoseconds)
from ._options import DEFAULTS

_LENGTH_MAX = 1 << 30  # tokens of one sequence, the server's bound


def check_names(what, given):
    """TypeError: there is no such option."""
    unknown = given.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(f"{what} has no argument {sorted(unknown)[0]!r}")


def options_of(what, given):
    """DEFAULTS with what was given. TypeError: there is no such option."""
    check_names(what, given)
    return {**DEFAULTS, **given}


def check_answer(o, lse):
    """A backward pass takes both results of the forward pass, or neither."""
    if (o is None) != (lse is None):
        missing, given = ("o", "lse") if o is None else ("lse", "o")
        raise invalid(f"{missing} is None, must be given with {given}")


class Arguments:
    """A call's `params`, and `held`: the objects that they refer to."""

    def __init__(self, q, k, v, options, client_timeout=None):
        self.a = options
        self.held = []
        self.byte_count = 0  # of its tensors
        # q's GPU, on which other tensors may be too, and its current stream. None: q is on the
        # host.
        self.device = _tensors.device_of(q)
        self.stream = _memory.current_stream(self.device)
        self.params = Params(struct_bytes=ctypes.sizeof(Params))
        p = self.params
        p.stream = self.stream or None
        p.layout = _checks.one_of("layout", options["layout"], LAYOUTS)
        self.q = self._operand("q", q)
        if k is not None or v is not None:
            self._operand("k", k)
            self._operand("v", v)
        self._read_mask()
        self._read_lengths()
        self._read_terms()
        p.return_lse, p.check = bool(options["return_lse"]), bool(options["check"])
        self._read_o_dtype()
        p.priority = _checks.integer("priority", options["priority"], -100, 100)
        p.kernel = _checks.text("kernel", options["kernel"])
        p.request_id = _checks.text("request_id", options["request_id"]) or None
        timeout = client_timeout if options["timeout"] is None else options["timeout"]
        p.timeout_ns = nanoseconds("timeout", timeout)
        p.tenant = _checks.optional_text("tenant", options["tenant"])
        p.traceparent = _checks.optional_text("traceparent", options["traceparent"])
        p.transport = _checks.one_of("transport", options["transport"], TRANSPORTS)

    def ask_for_gradients(self, d_o, o, lse, d_lse, wanted):
        """Makes this the backward pass of the same attention."""
        p = self.params
        check_answer(o, lse)
        for name in _checks.names("wanted", wanted):
            p.wanted |= _checks.one_of("wanted", name, WANTED)
            if name in ("bias", "sinks") and self.a[name] is None:
                raise invalid(f"wanted has {name!r}, which the call does not have")
        if not p.wanted:
            raise invalid("wanted is empty, must have some of " + ", ".join(WANTED))
        if o is not None:
            self._tensor("o", o)
            self._tensor("lse", lse, ("float32",))
        self._tensor("d_o", d_o)
        if d_lse is not None:
            self._tensor("d_lse", d_lse, ("float32",))

    def _operand(self, name, value):
        tensor = self._tensor(name, value)
        dimensions = 4 - _AXES[self.a["layout"]].count(None)
        if len(tensor.shape) != dimensions:
            raise invalid(f"{name} has {len(tensor.shape)} dimensions, layout {self.a['layout']} "
                          f"needs {dimensions}")
        return tensor

    def _tensor(self, name, value, allowed=tuple(DTYPES)):
        """Sets the params' tensor of that name."""
        tensor = self._read(name, value, allowed)
        self.byte_count += math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        setattr(self.params, name, self._struct(tensor, DTYPES[tensor.dtype], tensor.shape))
        return tensor

    def _read(self, name, value, allowed):
        ours = self.device is not None and _tensors.device_of(value) == self.device
        return _tensors.read(name, value, self.stream if ours else 0, allowed)

    def _struct(self, tensor, dtype, shape):
        if not 1 <= len(shape) <= 4:
            raise invalid(f"{tensor.name} has {len(shape)} dimensions, must have 1 to 4")
        address, memory = self._place(tensor)
        return TensorStruct(address, dtype, len(shape), (ctypes.c_int64 * 4)(*shape), memory)

    def _place(self, tensor):
        """(address, memory) of the tensor's bytes, C-contiguous on the host or on q's GPU; not
        copied if they already are."""
        owner, device = tensor.owner, tensor.device
        if tensor.kind == "numpy":
            owner = sys.modules["numpy"].ascontiguousarray(owner)
            address, device = owner.__array_interface__["data"][0], CPU
        elif tensor.kind == "data_ptr":
            if device not in (CPU, self.device):
                owner, device = owner.cpu(), CPU
            owner = owner.contiguous()
            address = owner.data_ptr()
        elif _memory.is_contiguous(tensor) and device in (CPU, self.device):
            address = tensor.address
        else:
            owner = _memory.host_copy(tensor, self.stream if device == self.device else None)
            address, device = owner.ctypes.data, CPU
        self.held.append(owner)
        return address, device + 1

    def _read_mask(self):
        p, a = self.params, self.a
        p.window_left, p.window_right = _checks.window(a["window"])
        p.key_offset = _checks.integer("key_offset", a["key_offset"], 0, _LENGTH_MAX)
        p.keys_after = _checks.integer("keys_after", a["keys_after"], 0, _LENGTH_MAX)
        aligned = WINDOW if not a["causal"] else CAUSAL
        kind = _checks.one_of("alignment", a["alignment"], aligned)
        # ALiBi uses the mask's alignment, even if no key is hidden.
        if a["causal"] or a["window"] is not None or a["alibi_slopes"] is not None:
            p.mask = kind

    def _numbers(self, struct, name, code, *shapes):
        value = self.a[name]
        if value is None:
            return struct()
        numbers, shape = _tensors.numbers(name, value, code)
        if not numbers:
            raise invalid(f"{name} has no elements")
        _checks.shape(name, shape, *shapes)
        self.held.append(numbers)
        return struct(*numbers.buffer_info())

    def _read_lengths(self):
        p, packed = self.params, _AXES[self.a["layout"]][0] is None
        for name in ("q_lengths", "kv_lengths") if packed else ("cu_seqlens_q", "cu_seqlens_k"):
            if self.a[name] is not None:
                raise invalid(f"{name} is given, but layout {self.a['layout']} has none")
        batch = "B" if packed else self.q.shape[0]
        p.q_lengths = self._numbers(NumbersStruct, "q_lengths", "q", (batch,))
        p.kv_lengths = self._numbers(NumbersStruct, "kv_lengths", "q", (batch,))
        p.cu_q = self._numbers(NumbersStruct, "cu_seqlens_q", "q", ("B + 1",))
        p.cu_kv = self._numbers(NumbersStruct, "cu_seqlens_k", "q", ("B + 1",))
        self.batch = p.cu_q.count - 1 if packed else batch

    def _read_terms(self):
        p, a = self.params, self.a
        if a["scale"] is not None:
            p.has_scale, p.scale = 1, _checks.real("scale", a["scale"])
        p.softcap = _checks.real("softcap", a["softcap"])
        heads = self.q.shape[_AXES[a["layout"]][1]]
        p.alibi_slopes = self._numbers(FloatsStruct, "alibi_slopes", "f", (heads,),
                                       (self.batch, heads))
        p.sinks = self._numbers(FloatsStruct, "sinks", "f", (heads,))
        p.dropout_p = _checks.real("dropout_p", a["dropout_p"])
        if a["dropout_seed"] is not None:
            p.dropout_seed = dropout_seed(a["dropout_seed"])
        elif p.dropout_p > 0:
            raise invalid(f"dropout_seed is None, dropout_p {a['dropout_p']} needs one")
        if a["bias"] is not None:
            self._read_bias(a["bias"])
        tree = _tree.packed(a, self.batch)
        if tree is not None:
            bits, shape = tree
            p.tree = self._struct(self._read("tree", bits, ("uint8",)), BIT, shape)
            p.tree_lengths = self._numbers(NumbersStruct, "tree_lengths", "q", (self.batch,))

    def _read_bias(self, bias):
        masks = _tensors.is_mask(bias)
        tensor = None if masks else self._read("bias", bias, tuple(DTYPES))
        shape = tuple(bias.shape if tensor is None else tensor.shape)
        if not 1 <= len(shape) <= 4:
            raise invalid(f"bias has {len(shape)} dimensions, must have 1 to 4")
        if tensor is None:
            tensor = self._read("bias", _tensors.packed_mask(bias), ("uint8",))
        dtype = BIT if masks else DTYPES[tensor.dtype]
        self.bias_shape = shape
        self.params.bias = self._struct(tensor, dtype, (1,) * (4 - len(shape)) + shape)

    def _read_o_dtype(self):
        asked = self.a["o_dtype"]
        if asked not in (None, self.q.dtype, "float32"):
            raise invalid(f"o_dtype is {asked!r}, must be q's dtype or 'float32'")
        self.params.o_float32 = asked == "float32"
