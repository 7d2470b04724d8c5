# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library as address, shape, strides and dtype; copies of host arrays on the GPU."""

import array
import ctypes
import dataclasses
import sys

from . import _dlpack
from ._library import (DEVICE_TO_HOST, DTYPES, HOST_TO_DEVICE, ITEM_BYTES, Memory, check, invalid,
                       library)


@dataclasses.dataclass
class Tensor:
    """One array. `device` is a CUDA ordinal, or None for a NumPy array, which then has address 0
    until it is copied. Strides count elements. `owner` keeps the memory alive."""
    name: str
    kind: str  # "numpy", "data_ptr" or "dlpack": what a result is made to match
    address: int
    shape: tuple
    strides: tuple
    dtype: str
    device: object
    owner: object

    def contiguous(self):
        return dataclasses.replace(self, strides=_dlpack.packed_strides(self.shape))


def _is_numpy(value):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _has_data_ptr(value):
    return hasattr(value, "data_ptr") and hasattr(value, "stride")


def device_of(value):
    """The CUDA ordinal where `value` is, or None if that is host memory (or no array)."""
    if _has_data_ptr(value):
        return value.device.index or 0 if value.device.type == "cuda" else None
    if not _is_numpy(value) and hasattr(value, "__dlpack_device__"):
        kind, index = value.__dlpack_device__()
        return int(index) if int(kind) in (_dlpack.CUDA, _dlpack.CUDA_MANAGED) else None
    return None


def _check_dtype(name, dtype, allowed):
    if dtype not in allowed:
        raise invalid(f"{name} has dtype {dtype}, must be {' or '.join(allowed)}")


def read(name, value, stream, allowed=tuple(DTYPES)):
    """A Tensor over `value` without copying it. Error: no array, a dtype that is not `allowed`, or
    on neither the host (NumPy) nor CUDA."""
    if _is_numpy(value):
        _check_dtype(name, value.dtype.name, allowed)
        return Tensor(name, "numpy", 0, value.shape, _dlpack.packed_strides(value.shape),
                      value.dtype.name, None, value)
    if _has_data_ptr(value):
        dtype = str(value.dtype).rpartition(".")[2]
        _check_dtype(name, dtype, allowed)
        if value.device.type != "cuda":
            raise invalid(f"{name} is on {value.device}, must be on a CUDA device or a NumPy array")
        return Tensor(name, "data_ptr", value.data_ptr(), tuple(value.shape),
                      tuple(value.stride()), dtype, device_of(value), value)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        if device_of(value) is None:
            raise invalid(f"{name} is on DLPack device {value.__dlpack_device__()}, must be on "
                          f"CUDA or a NumPy array")
        taken = _dlpack.Import(name, value.__dlpack__(
            stream=stream or _dlpack.LEGACY_DEFAULT_STREAM))
        _check_dtype(name, taken.dtype, allowed)
        return Tensor(name, "dlpack", taken.address, taken.shape, taken.strides, taken.dtype,
                      taken.device, taken)
    raise invalid(f"{name} is a {type(value).__name__}, must be a NumPy array, or have data_ptr() "
                  f"or __dlpack__()")


def numbers(name, value, code):
    """A host sequence (list, NumPy array, CPU tensor; nested or not) as array.array of `code` and
    its shape."""
    value = value.tolist() if hasattr(value, "tolist") else list(value)
    shape = (len(value),)
    if value and isinstance(value[0], (list, tuple)):
        shape = (len(value), len(value[0]))
        if any(len(row) != shape[1] for row in value):
            raise invalid(f"{name} has rows of different lengths")
        value = [number for row in value for number in row]
    try:
        return array.array(code, value), shape
    except (TypeError, OverflowError) as failure:
        raise invalid(f"{name} holds no plain numbers: {failure}") from None


def empty_like(tensor, shape, dtype, stream):
    """An uninitialised C-contiguous array of the same library on the same device; for DLPack a
    DeviceArray."""
    if tensor.kind == "numpy":
        numpy = sys.modules["numpy"]
        return numpy.empty(shape, numpy.float32 if dtype == "float32" else tensor.owner.dtype)
    if tensor.kind == "data_ptr":
        if dtype == tensor.dtype:
            return tensor.owner.new_empty(shape)
        package = sys.modules[type(tensor.owner).__module__.partition(".")[0]]
        return tensor.owner.new_empty(shape, dtype=getattr(package, dtype))
    count = ITEM_BYTES[dtype]
    for size in shape:
        count *= size
    return _dlpack.DeviceArray(Memory(tensor.device, count), shape, dtype, stream)


class Staging:
    """Copies of host memory on one device, made and read back on one stream. Holds everything that
    a call uses until `finish`."""

    def __init__(self, device, stream):
        self.device, self.stream = device, stream
        self._held, self._downloads, self._waits = [], [], False

    def _allocate(self, byte_count):
        memory = Memory(self.device, byte_count)
        self._held.append(memory)
        return memory.address

    def _copy_in(self, host, host_address, byte_count):
        address = self._allocate(byte_count)
        self._held.append(host)
        self._waits = True  # the copy must not outlive what it reads, nor its target the kernel
        check(library().attend_memcpy(self.device, address, host_address, byte_count,
                                      HOST_TO_DEVICE, self.stream or None))
        return address

    def place(self, tensor):
        """The tensor on the device: itself, or a contiguous copy of a NumPy array."""
        self._held.append(tensor)
        if tensor.device is not None:
            return tensor
        host = sys.modules["numpy"].ascontiguousarray(tensor.owner)
        address = self._copy_in(host, host.ctypes.data, host.nbytes)
        return dataclasses.replace(tensor, address=address, device=self.device)

    def place_numbers(self, values):
        """The address of a copy of an array.array."""
        address, count = values.buffer_info()
        return self._copy_in(values, address, count * values.itemsize)

    def output(self, tensor):
        """Where the kernel writes `tensor`; `finish` brings a NumPy array's content back."""
        self._held.append(tensor)
        if tensor.device is not None:
            return tensor
        numpy = sys.modules["numpy"]
        host = tensor.owner if tensor.owner.flags.c_contiguous else numpy.empty_like(
            tensor.owner, order="C", subok=False)
        address = self._allocate(host.nbytes)
        self._downloads.append((address, host, tensor.owner))
        return dataclasses.replace(tensor, address=address, device=self.device)

    def finish(self):
        """Brings outputs back. Waits for the stream if anything was copied."""
        for address, host, _ in self._downloads:
            check(library().attend_memcpy(self.device, ctypes.c_void_p(host.ctypes.data), address,
                                          host.nbytes, DEVICE_TO_HOST, self.stream or None))
        if self._downloads or self._waits:
            check(library().attend_synchronize(self.device, self.stream or None))
        for _, host, target in self._downloads:
            if host is not target:
                target[...] = host
        self._held.clear()


class NoStaging(Staging):
    """Copies nothing, and gives what is not on the device an address that nobody follows: enough to
    ask what would run."""
    _SOMEWHERE = 4096

    def place(self, tensor):
        return dataclasses.replace(tensor, address=tensor.address or self._SOMEWHERE)

    def place_numbers(self, values):
        return self._SOMEWHERE

    def output(self, tensor):
        return self.place(tensor)
