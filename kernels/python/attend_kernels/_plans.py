# SPDX-License-Identifier: Apache-2.0
"""Calls like one before. Its arguments passed the checks and filled a struct: in a training loop
only addresses and the dropout's seed differ the next time."""

import sys

from . import _tensors
from ._library import CPU
from ._torch import current_stream

_PLAIN = frozenset((type(None), bool, int, float, str, tuple))
_MOST = 1024  # plans of one Plans


class Plan:
    """A call's struct, and the results that it makes of torch tensors."""

    def __init__(self, struct, results, device):
        self._struct, self.device = struct, device
        self._results = [(made.shape, made.dtype) for made in results]

    def struct(self):
        """A copy, to be given addresses. What it points to lives as long as this plan."""
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


class Plans:
    """The process's plans of one kind of call, whose tensors are the arguments named `tensors`."""

    def __init__(self, tensors):
        self._tensors, self._by_key = tensors, {}

    def key(self, arguments):
        """What a call is but for addresses. None: there are no plans for such calls."""
        torch = sys.modules.get("torch")
        if arguments["stream"] is not None or not hasattr(torch, "nn") or \
                _tensors.in_forward_mode():
            return None
        key = {**arguments, "dropout_seed": arguments["dropout_seed"] is None}
        for name in self._tensors:
            if key[name] is not None:
                key[name] = _form(key[name], torch)
                if key[name] is None:
                    return None
        return tuple(key.values())

    def find(self, key):
        """The plan of a key, or None."""
        try:
            return self._by_key.get(key)
        except TypeError:  # a list among the arguments
            return None

    def keep(self, key, plan):
        """From now on `plan` is the key's, if nothing in it can change: no other arrays."""
        if key is None or not _PLAIN.issuperset(map(type, key)):
            return
        if len(self._by_key) >= _MOST:
            self._by_key.clear()
        self._by_key[key] = plan
