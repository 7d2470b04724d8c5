# SPDX-License-Identifier: Apache-2.0
"""What a call on a stream of its own owes to torch's allocator. Never imports torch: where a tensor
of torch's is, torch is."""

import contextlib
import sys

from ._tensors import device_of

_DEFAULT_HANDLES = (0, 1)  # CUDA's two names of the default stream


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
    # As Triton and torch.compile ask: without an object for the stream.
    ask = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(device).cuda_stream if ask is None else ask(device)


def allocating_on(stream, handle, device, values):
    """While entered, torch allocates and converts on the stream of a call with torch tensors among
    its arguments, `values`. `stream` is that stream as it was asked for, None for the current one;
    `handle` its address. Yields a list, to be given the results that were allocated.

    torch gives freed memory away in the order of the stream that it was allocated on. So what the
    call makes is made on its own stream. Its results are then used on the current stream, and the
    caller's tensors, made there, on the call's: torch is told of both."""
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
        # A bare handle's stream may be destroyed before they are freed, and torch would ask it.
        for tensor in used:
            tensor.record_stream(own)
    with torch.cuda.stream(own):
        yield made
    for tensor in made:
        if isinstance(tensor, torch.Tensor):
            tensor.record_stream(current)
