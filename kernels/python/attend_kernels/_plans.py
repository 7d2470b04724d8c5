# SPDX-License-Identifier: Apache-2.0
"""Plans for calls like an earlier one. That call's arguments passed the checks and filled a struct;
in a training loop only addresses and dropout's seed change from then on."""

import ctypes
import sys

from . import _tensors
from ._library import CPU
from ._torch import current_stream

_PLAIN = frozenset((type(None), bool, int, float, str))
_MOST = 1024  # plans of one Plans object


class Plan:
    """A call's struct, and the shapes and dtypes of its results: torch tensors or NumPy arrays."""

    def __init__(self, struct, results, device):
        self._struct, self.device = struct, device
        self._type = type(struct)
        self._results = [(made.shape, made.dtype) for made in results]

    def struct(self):
        """A copy, for the addresses of this call's tensors. Its only other pointer is the kernel's
        name, which ctypes keeps alive with the plan's struct."""
        return self._type.from_buffer_copy(self._struct)

    def results(self, like):
        if _tensors.is_numpy(like):
            empty = sys.modules["numpy"].empty
            return [empty(shape, dtype) for shape, dtype in self._results]
        return [like.new_empty(shape, dtype=dtype) for shape, dtype in self._results]

    def stream(self):
        return 0 if self.device == CPU else current_stream(self.device)


def address(tensor):
    """The address of a tensor or array that has a form."""
    if not _tensors.is_numpy(tensor):
        return tensor.data_ptr()
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(tensor))
    except (TypeError, ValueError):  # read-only, with gaps or empty; takes three times as long
        return tensor.ctypes.data


def _form(tensor, torch, numpy):
    """Everything about a torch tensor or NumPy array except its address. None for other objects,
    and for tensors that the checks refuse or that are not used in place: they require grad, have
    the negative bit, or are not aligned."""
    if numpy is not None and type(tensor) is numpy.ndarray:
        return (tensor.shape, tensor.strides, tensor.dtype) if tensor.flags.aligned else None
    if torch is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.requires_grad and torch.is_grad_enabled():
        return None
    if tensor.is_neg():
        return None
    try:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except RuntimeError:  # sparse, nested
        return None


def _is_plain(value):
    """Whether the value is immutable and compared by value, so that equal values are equal
    arguments."""
    return type(value) in _PLAIN or type(value) is tuple and _PLAIN.issuperset(map(type, value))


def _types(values, window):
    """The types of the arguments and of a window's sides: 1.0 equals 1, but may be refused."""
    return tuple(map(type, values)), tuple(map(type, window)) if type(window) is tuple else ()


class Plans:
    """The process's plans for one function. `tensors`: the arguments whose addresses a repeated
    call fills in. A call with pointers to anything else has no plan."""

    def __init__(self, tensors):
        self._tensors, self._by_key = tensors, {}

    def key(self, arguments):
        """A call without its addresses: its tensors' forms and its other arguments. None: such
        calls have no plans."""
        modules = sys.modules
        torch, numpy = modules.get("torch"), modules.get("numpy")
        if not hasattr(torch, "nn"):
            torch = None
        if arguments["stream"] is not None or _tensors.in_forward_mode():
            return None
        others = {**arguments, "dropout_seed": arguments["dropout_seed"] is None}
        forms = []
        for name in self._tensors:
            tensor = others.pop(name)
            forms.append(None if tensor is None else _form(tensor, torch, numpy))
            if forms[-1] is None and tensor is not None:
                return None
        values = tuple(others.values())
        return tuple(forms), values, _types(values, arguments["window"])

    def find(self, key):
        """The key's plan, or None."""
        try:
            return self._by_key.get(key)
        except TypeError:  # a list among the arguments, or within one
            return None

    def keep(self, key, plan, staging):
        """Stores `plan` under the key, if the key contains everything that the call depended on.
        `staging` is the call's, before finish(): the struct's addresses all came from it."""
        if key is None or not staging.holds_only({*self._tensors, "result"}) or \
                not all(map(_is_plain, key[1])):
            return
        if len(self._by_key) >= _MOST:
            self._by_key.clear()
        self._by_key[key] = plan
