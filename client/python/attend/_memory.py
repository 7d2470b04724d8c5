# SPDX-License-Identifier: Apache-2.0
"""Memory of arrays: GPU streams, memory shared with a server, and copies of arrays that cannot be
sent as they are."""

from __future__ import annotations

import ctypes
import math
import re
import sys

from attend_kernels import DeviceArray, _checks, _tensors
from attend_kernels._library import CPU, DEVICE_TO_HOST, ITEM_BYTES, NotCopied
from attend_kernels._library import check as check_kernels
from attend_kernels._library import invalid
from attend_kernels._library import library as kernels_library
from attend_kernels._torch import current_stream as torchs_stream

from ._library import DTYPES, CallHandle, ClientHandle, MemoryHandle


def current_stream(device: int | None) -> int:
    """PyTorch's current stream of a GPU if PyTorch is loaded, else 0, the default stream."""
    return torchs_stream(device) if device is not None and "torch" in sys.modules else 0


def is_contiguous(tensor: _tensors.Tensor) -> bool:
    """Whether the elements are in C order without gaps."""
    return 0 in tensor.shape or all(
        size == 1 or one == other for size, one, other in zip(
            tensor.shape, tensor.strides, tensor.contiguous().strides))


def host_copy(tensor: _tensors.Tensor, stream: int | None):
    """A C-contiguous NumPy copy of the tensor, for any strides, taken after the work on `stream` of
    its GPU. Error: NumPy is missing."""
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


def device_number(device) -> int:
    """The CUDA ordinal of "cuda:0" or a torch device; CPU for "cpu"."""
    found = re.fullmatch(r"cpu(?::0)?|cuda(?::(\d{1,4}))?", str(device))
    if found is None:
        raise invalid(f"device is {str(device)!r}, must be 'cpu' or 'cuda:0'")
    return CPU if found[0].startswith("cpu") else int(found[1] or 0)


class _SharedMemory:
    """Allocated host memory for NumPy's __array_interface__."""

    def __init__(self, client: ClientHandle, byte_count: int):
        self.memory = MemoryHandle.allocated(client, byte_count)
        self.__array_interface__ = {"version": 3, "data": (int(self.memory), False),
                                    "shape": (byte_count,), "typestr": "|u1"}


class _LentMemory:
    """Allocated GPU memory in the form that DeviceArray takes."""

    def __init__(self, client: ClientHandle, byte_count: int, device: int):
        self.memory = MemoryHandle.allocated(client, byte_count, device)
        self.address, self.device = int(self.memory), device


def shared_array(client: ClientHandle, shape: tuple[int, ...], dtype, device: int):
    """Implements Client.empty."""
    if device == CPU:
        return _host_array(client, shape, dtype)
    name = getattr(dtype, "__name__", str(dtype)).rpartition(".")[2]
    _checks.one_of("dtype", name, DTYPES)
    memory = _LentMemory(client, _byte_count(shape, ITEM_BYTES[name]), device)
    return DeviceArray(memory, shape, name, current_stream(device))


def _byte_count(shape: tuple[int, ...], item: int) -> int:
    return _checks.integer("shape's bytes", item * math.prod(shape), 0, 2**63 - 1)


def _host_array(client: ClientHandle, shape: tuple[int, ...], dtype):
    import numpy
    kind = numpy.dtype(dtype)
    if kind.hasobject:
        raise invalid(f"dtype is {dtype!r}, must be one of plain bytes")
    memory = _SharedMemory(client, _byte_count(shape, kind.itemsize))
    return numpy.asarray(memory).view(kind).reshape(shape)


class AnswerMemory(NotCopied):
    """An answer's tensor in GPU memory, in the form that DeviceArray takes. It belongs to the
    stream that is current when the answer is read: the next user of the memory waits for that
    stream's work as of when this object is freed."""

    def __init__(self, call: CallHandle, address: int, device: int, stream: int):
        self.call, self.address, self.device, self.stream = call, address, device, stream

    def __del__(self) -> None:
        self.call.use("used", self.stream or None)
