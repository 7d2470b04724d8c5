# SPDX-License-Identifier: Apache-2.0
"""Converts one call's Python arguments to attend_client_params: the options as AttendRequest in
Protobuf's text format, tensors by address, without a copy if they are contiguous."""

from __future__ import annotations

import ctypes
import math
import sys

from attend_kernels import _checks, _tensors, _tree
from attend_kernels._call import LAYOUTS as _AXES
from attend_kernels._call import dropout_seed, o_dtype
from attend_kernels._library import CPU, ITEM_BYTES, invalid

from . import _memory
from ._library import BIT, DTYPES, TRANSPORTS, ListStruct, Params, TensorStruct, nanoseconds
from ._options import DEFAULTS

_LENGTH_MAX = 1 << 30  # tokens of one sequence, the server's bound
_ALIGNMENTS = {"bottom_right": "BOTTOM_RIGHT", "top_left": "TOP_LEFT"}
_WANTED = {name: "TENSOR_NAME_D_" + name.upper() for name in ("q", "k", "v", "bias", "sinks")}


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
    """A call's params, and `held`: the objects that they refer to."""

    def __init__(self, q, k, v, options, client_timeout=None):
        self.a = options
        self.held = []
        self.byte_count = 0  # of its tensors
        # q's GPU, on which other tensors may be too, and its current stream. None: q is on the
        # host.
        self.device = _tensors.device_of(q)
        self.stream = _memory.current_stream(self.device)
        self.request = ""  # AttendRequest's fields, without those that have their defaults
        self.lists = []
        self._params = p = Params(struct_bytes=ctypes.sizeof(Params))
        p.stream = self.stream or None
        self.axes = _checks.one_of("layout", options["layout"], _AXES)
        if options["layout"] != "BHLD":
            self._set("layout", "LAYOUT_" + options["layout"])
        self.q = self._operand("q", q)
        if k is not None or v is not None:
            self._operand("k", k)
            self._operand("v", v)
        self._read_mask()
        self._read_lengths()
        self._read_terms()
        if o_dtype(options["o_dtype"], self.q) != self.q.dtype:
            self._set("o_dtype", "DTYPE_FLOAT32")
        for name in ("return_lse", "check"):
            self._set(name, "true" if options[name] else "")
        self._set("priority", _checks.integer("priority", options["priority"], -100, 100))
        for name, default in (("kernel", b"auto"), ("request_id", b"")):
            if (text := _checks.text(name, options[name])) != default:
                self._set(name, '"' + "".join(f"\\{byte:03o}" for byte in text) + '"')
        timeout = client_timeout if options["timeout"] is None else options["timeout"]
        p.timeout_ns = nanoseconds("timeout", timeout)
        p.tenant = _checks.optional_text("tenant", options["tenant"])
        p.traceparent = _checks.optional_text("traceparent", options["traceparent"])
        p.transport = _checks.one_of("transport", options["transport"], TRANSPORTS)

    def ask_for_gradients(self, d_o, o, lse, d_lse, wanted):
        """Makes this the backward pass of the same attention."""
        check_answer(o, lse)
        names = _checks.names("wanted", wanted)
        tensors = [_checks.one_of("wanted", name, _WANTED) for name in names]
        for name in names:
            if name in ("bias", "sinks") and self.a[name] is None:
                raise invalid(f"wanted has {name!r}, which the call does not have")
        if not tensors:
            raise invalid("wanted is empty, must have some of " + ", ".join(_WANTED))
        self._set("backward", f"{{wanted:[{','.join(tensors)}]}}")
        if o is not None:
            self._tensor("o", o)
            self._tensor("lse", lse, ("float32",))
        self._tensor("d_o", d_o)
        if d_lse is not None:
            self._tensor("d_lse", d_lse, ("float32",))

    def params(self):
        """The struct, once nothing is added to the call."""
        p = self._params
        if self.request:
            p.request = self.request.encode()
        if self.lists:
            p.lists, p.lists_count = (ListStruct * len(self.lists))(*self.lists), len(self.lists)
        return p

    def _set(self, name, value):
        if value:
            self.request += f"{name}:{value} "

    def _operand(self, name, value):
        tensor = self._tensor(name, value)
        dimensions = 4 - self.axes.count(None)
        if len(tensor.shape) != dimensions:
            raise invalid(f"{name} has {len(tensor.shape)} dimensions, layout {self.a['layout']} "
                          f"needs {dimensions}")
        return tensor

    def _tensor(self, name, value, allowed=tuple(DTYPES)):
        """Sets the params' tensor of that name."""
        tensor = self._read(name, value, allowed)
        self.byte_count += math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        setattr(self._params, name, self._struct(tensor, DTYPES[tensor.dtype], tensor.shape))
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
        a, mask = self.a, ""
        left, right = _checks.window(a["window"])
        alignment = _checks.one_of("alignment", a["alignment"], _ALIGNMENTS)
        # ALiBi uses the mask's alignment, even if no key is hidden.
        if a["causal"] or a["window"] is not None or a["alibi_slopes"] is not None:
            kind = "CAUSAL" if a["causal"] else "WINDOW"
            mask = f"kind:KIND_{kind}_{alignment} window_left:{left} "
            if not a["causal"]:
                mask += f"window_right:{right} "
        for name in ("key_offset", "keys_after"):
            if number := _checks.integer(name, a[name], 0, _LENGTH_MAX):
                mask += f"{name}:{number} "
        self._set("mask", mask and f"{{{mask}}}")

    def _add_list(self, name, field, code, *shapes):
        """Returns how many numbers were given."""
        value = self.a[name]
        if value is None:
            return 0
        numbers, shape = _tensors.numbers(name, value, code)
        _checks.shape(name, shape, *shapes)
        if not numbers:
            if shape not in shapes:
                raise invalid(f"{name} has no elements")
            return 0
        self.held.append(numbers)
        self.lists.append(ListStruct(field, *numbers.buffer_info()))
        return len(numbers)

    def _read_lengths(self):
        packed = self.axes[0] is None
        for name in ("q_lengths", "kv_lengths") if packed else ("cu_seqlens_q", "cu_seqlens_k"):
            if self.a[name] is not None:
                raise invalid(f"{name} is given, but layout {self.a['layout']} has none")
        batch = "B" if packed else self.q.shape[0]
        self._add_list("q_lengths", b"q_lengths", "q", (batch,))
        self._add_list("kv_lengths", b"kv_lengths", "q", (batch,))
        ends = self._add_list("cu_seqlens_q", b"cu_q", "q", ("B + 1",))
        self._add_list("cu_seqlens_k", b"cu_kv", "q", ("B + 1",))
        self.batch = ends - 1 if packed else batch

    def _read_terms(self):
        a = self.a
        if a["scale"] is not None:
            self._set("scale", str(_checks.real("scale", a["scale"])))
        # Not 0, which is off: it is refused.
        softcap = _checks.real("softcap", a["softcap"])
        self._set("softcap", softcap and (ctypes.c_float(softcap).value or 2.0**-149))
        heads = self.q.shape[self.axes[1]]
        self._add_list("alibi_slopes", b"alibi_slopes", "f", (heads,), (self.batch, heads))
        self._add_list("sinks", b"sinks", "f", (heads,))
        self._set("dropout_p", _checks.real("dropout_p", a["dropout_p"]))
        self._set("dropout_seed", dropout_seed(a))
        if a["bias"] is not None:
            self._read_bias(a["bias"])
        tree = _tree.packed(a, self.batch)
        if tree is not None:
            bits, shape = tree
            self._params.tree = self._struct(self._read("tree", bits, ("uint8",)), BIT, shape)
            self._add_list("tree_lengths", b"tree_lengths", "q", (self.batch,))

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
        self._params.bias = self._struct(tensor, dtype, (1,) * (4 - len(shape)) + shape)
