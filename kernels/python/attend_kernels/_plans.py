# SPDX-License-Identifier: Apache-2.0
"""Calls like one before. Its arguments passed the checks and filled a struct: in a training loop
only addresses and the dropout's seed differ the next time."""

import ctypes
import sys

from . import _tensors
from ._library import CPU
from ._torch import current_stream

_PLAIN = frozenset((type(None), bool, int, float, str))
_MOST = 1024  # plans of one Plans


class Plan:
    """A call's struct, and the results that it makes: torch tensors or NumPy arrays."""

    def __init__(self, struct, results, device):
        self._struct, self.device = struct, device
        self._type = type(struct)
        self._results = [(made.shape, made.dtype) for made in results]

    def struct(self):
        """A copy, to be given the addresses of this call's tensors. The only other pointer in it is
        the kernel's name, which ctypes keeps with the plan's struct."""
        return self._type.from_buffer_copy(self._struct)

    def results(self, like):
        if _tensors.is_numpy(like):
            empty = sys.modules["numpy"].empty
            return [empty(shape, dtype) for shape, dtype in self._results]
        return [like.new_empty(shape, dtype=dtype) for shape, dtype in self._results]

    def stream(self):
        return 0 if self.device == CPU else current_stream(self.device)


def address(tensor):
    """Where a tensor or array that has a form begins."""
    if not _tensors.is_numpy(tensor):
        return tensor.data_ptr()
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(tensor))
    except (TypeError, ValueError):  # read-only, with gaps, empty; this takes three times as long
        return tensor.ctypes.data


def _form(tensor, torch, numpy):
    """All of a torch tensor or NumPy array but its address; None if it is another thing, or what
    checks refuse or is not used in place: it asks for a gradient, stands for the negative of its
    memory, or is not aligned."""
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
    """Whether a value can never change, so that equal ones are the same argument."""
    return type(value) in _PLAIN or type(value) is tuple and _PLAIN.issuperset(map(type, value))


def _types(values, window):
    """The arguments' types, and those of a window's sides: 1.0 equals 1, yet may be refused."""
    return tuple(map(type, values)), tuple(map(type, window)) if type(window) is tuple else ()


class Plans:
    """The process's plans of one kind of call. `tensors`: the arguments whose addresses a repeated
    call fills in. A call that points to anything else has no plan."""

    def __init__(self, tensors):
        self._tensors, self._by_key = tensors, {}

    def key(self, arguments):
        """A call without its addresses: its tensors' forms and its other arguments. None: there are
        no plans for such calls."""
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
        """The plan of a key, or None."""
        try:
            return self._by_key.get(key)
        except TypeError:  # a list among the arguments, or in one
            return None

    def keep(self, key, plan, staging):
        """From now on `plan` is the key's, if the key says all that the call depended on. `staging`
        is the call's, before it has finished: all addresses in the plan's struct came from it."""
        if key is None or not staging.holds_only({*self._tensors, "result"}) or \
                not all(map(_is_plain, key[1])):
            return
        if len(self._by_key) >= _MOST:
            self._by_key.clear()
        self._by_key[key] = plan
