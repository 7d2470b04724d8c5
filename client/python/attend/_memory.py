# SPDX-License-Identifier: Apache-2.0
"""Where arrays are: streams of GPUs, and copies of what cannot be sent from where it is."""

from __future__ import annotations

import ctypes
import sys

from attend_kernels import _tensors
from attend_kernels._library import CPU, DEVICE_TO_HOST, ITEM_BYTES
from attend_kernels._library import check as check_kernels
from attend_kernels._library import invalid
from attend_kernels._library import library as kernels_library
from attend_kernels._torch import current_stream as torchs_stream


def current_stream(device: int | None) -> int:
    """PyTorch's current stream of a GPU if it is loaded, else 0, the default one."""
    return torchs_stream(device) if device is not None and "torch" in sys.modules else 0


def is_contiguous(tensor: _tensors.Tensor) -> bool:
    """Whether its bytes are in C's order without gaps."""
    return 0 in tensor.shape or all(
        size == 1 or one == other for size, one, other in zip(
            tensor.shape, tensor.strides, tensor.contiguous().strides))


def host_copy(tensor: _tensors.Tensor, stream: int | None):
    """A C-contiguous NumPy array of the tensor's elements, whatever its strides, once `stream` of
    its GPU has run. Error: there is no NumPy."""
    try:
        import numpy
    except ImportError:
        raise invalid(f"{tensor.name} has strides {tensor.strides}, must be C-contiguous: there "
                      f"is no NumPy to copy it") from None
    item = ITEM_BYTES[tensor.dtype]
    ends = [stride * (size - 1) for size, stride in zip(tensor.shape, tensor.strides)]
    low = sum(min(end, 0) for end in ends)
    byte_count = item * (sum(max(end, 0) for end in ends) - low + 1)
    address = tensor.address + item * low
    if 0 in tensor.shape:
        return numpy.empty(tensor.shape, f"V{item}")
    if tensor.device == CPU:
        memory = numpy.frombuffer((ctypes.c_char * byte_count).from_address(address), f"V{item}")
    else:
        memory = numpy.empty(byte_count // item, f"V{item}")
        check_kernels(kernels_library().attend_memcpy(
            tensor.device, memory.ctypes.data, address, byte_count, DEVICE_TO_HOST, stream or None))
        check_kernels(kernels_library().attend_synchronize(tensor.device, stream or None))
    strided = numpy.lib.stride_tricks.as_strided(
        memory[-low:], tensor.shape, [item * stride for stride in tensor.strides])
    return numpy.array(strided, order="C")
