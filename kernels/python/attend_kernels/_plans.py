# SPDX-License-Identifier: Apache-2.0
"""Calls like one before. Its arguments passed the checks and filled a struct: in a training loop
only addresses and the dropout's seed differ the next time."""

import sys

from . import _tensors
from ._library import CPU
from ._torch import current_stream

_PLAIN = frozenset((type(None), bool, int, float, str))
_MOST = 1024  # plans of one Plans


class Plan:
    """A call's struct, and the results that it makes of torch tensors."""

    def __init__(self, struct, results, device):
        self._struct, self.device = struct, device
        self._results = [(made.shape, made.dtype) for made in results]

    def struct(self):
        """A copy, to be given the addresses of this call's tensors. The only other pointer in it is
        the kernel's name, which ctypes keeps with the plan's struct."""
        return type(self._struct).from_buffer_copy(self._struct)

    def results(self, like):
        return [like.new_empty(shape, dtype=dtype) for shape, dtype in self._results]

    def stream(self):
        return 0 if self.device == CPU else current_stream(self.device)


def _form(tensor, torch):
    """All of a torch tensor but its address; None if it is another thing, or what checks refuse:
    it asks for a gradient, or stands for the negative of its memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
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


class Plans:
    """The process's plans of one kind of call. `tensors`: the arguments whose addresses a repeated
    call fills in. A call that points to anything else has no plan."""

    def __init__(self, tensors):
        self._tensors, self._by_key = tensors, {}

    def key(self, arguments):
        """A call without its addresses: its tensors' forms and its other arguments. None: there are
        no plans for such calls."""
        torch = sys.modules.get("torch")
        if arguments["stream"] is not None or not hasattr(torch, "nn") or \
                _tensors.in_forward_mode():
            return None
        others = {**arguments, "dropout_seed": arguments["dropout_seed"] is None}
        forms = []
        for name in self._tensors:
            tensor = others.pop(name)
            forms.append(None if tensor is None else _form(tensor, torch))
            if forms[-1] is None and tensor is not None:
                return None
        return tuple(forms), tuple(others.values())

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
