# SPDX-License-Identifier: Apache-2.0
"""Keeps torch's allocator correct for calls on a stream of their own. Never imports torch: if a
tensor is torch's, torch is loaded."""

import contextlib
import sys

from ._tensors import device_of

_DEFAULT_HANDLES = (0, 1)  # CUDA's two handles of the default stream


def _stream_object(torch, stream, handle, device):
    if isinstance(stream, torch.cuda.Stream):
        return stream
    # ExternalStream takes 0 for "none given", and would make a new stream.
    if handle in _DEFAULT_HANDLES:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def current_stream(device):
    """The handle of torch's current stream on a GPU."""
    torch = sys.modules["torch"]
    # As Triton and torch.compile do, without creating a stream object.
    ask = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(device).cuda_stream if ask is None else ask(device)


def allocating_on(stream, handle, device, values):
    """A context in which torch allocates and converts on the stream of a call with torch tensors
    among its arguments, `values`. `stream` is the call's stream argument, None for the current one;
    `handle` is its address. Yields a list that the caller fills with the results it allocated.

    torch reuses freed memory in the order of the stream that it was allocated on. So memory made by
    the call is allocated on its own stream. Its results are then used on the current stream, and
    the caller's tensors, allocated there, on the call's: both uses are recorded with torch."""
    if stream is None or sys.modules.get("torch") is None:
        return contextlib.nullcontext([])
    return _allocating_on(stream, handle, device, values)


@contextlib.contextmanager
def _allocating_on(stream, handle, device, values):
    torch, made = sys.modules["torch"], []
    used = [value for value in values
            if isinstance(value, torch.Tensor) and device_of(value) is not None]
    current = torch.cuda.current_stream(device) if used else None
    if current is None or current.cuda_stream == handle:
        yield made
        return
    own = _stream_object(torch, stream, handle, device)
    if own is stream:
        # Not for a bare handle: its stream may be destroyed before torch frees the tensors.
        for tensor in used:
            tensor.record_stream(own)
    with torch.cuda.stream(own):
        yield made
    for tensor in made:
        if isinstance(tensor, torch.Tensor):
            tensor.record_stream(current)
