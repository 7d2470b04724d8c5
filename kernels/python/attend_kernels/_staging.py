# SPDX-License-Identifier: Apache-2.0
"""Where a call's arrays are while it runs: in place, or copied to a GPU and back."""

import ctypes
import dataclasses
import sys

from . import _tensors
from ._library import CPU, DEVICE_TO_HOST, DTYPES, HOST_TO_DEVICE, Memory, check, library


def _fresh(array):
    """A C-contiguous array of the same shape and dtype, uninitialised."""
    return sys.modules["numpy"].empty_like(array, order="C", subok=False)


def staging_for(device, stream):
    """A Staging for calls on `device`, CPU or a CUDA ordinal."""
    return (HostStaging if device == CPU else Staging)(device, stream)


class Staging:
    """Copies host memory to one device and back, on one stream. Holds everything that a call uses
    until `finish`."""

    def __init__(self, device, stream):
        self.device, self.stream = device, stream
        self._held, self._downloads, self._waits = [], [], False

    def read(self, name, value, allowed=tuple(DTYPES)):
        """_tensors.read for this stream."""
        return _tensors.read(name, value, self.stream, allowed)

    def device_of(self, tensor):
        """The device of a tensor, for comparison with others."""
        return tensor.device

    def _allocate(self, byte_count):
        memory = Memory(self.device, byte_count)
        self._held.append(memory)
        return memory.address

    def _copy_in(self, host, host_address, byte_count):
        address = self._allocate(byte_count)
        self._held.append(host)
        self._waits = True  # the source must outlive the copy, and the target the kernel
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
        """The tensor that the kernel writes; `finish` copies a NumPy array's content back."""
        self._held.append(tensor)
        if tensor.device is not None:
            return tensor
        host = tensor.owner if tensor.owner.flags.c_contiguous else _fresh(tensor.owner)
        address = self._allocate(host.nbytes)
        self._downloads.append((address, host, tensor.owner))
        return dataclasses.replace(tensor, address=address, device=self.device)

    def holds_only(self, names):
        """Whether every address given out so far belongs to a caller's tensor or a result with one
        of these names, and not to a copy or to a list's numbers."""
        return all(getattr(held, "name", None) in names for held in self._held)

    def finish(self):
        """Copies outputs back. Waits for the stream if anything was copied."""
        for address, host, _ in self._downloads:
            check(library().attend_memcpy(self.device, ctypes.c_void_p(host.ctypes.data), address,
                                          host.nbytes, DEVICE_TO_HOST, self.stream or None))
        if self._downloads or self._waits:
            check(library().attend_synchronize(self.device, self.stream or None))
        for _, host, target in self._downloads:
            if host is not target:
                target[...] = host
        self._held.clear()


class HostStaging(Staging):
    """For the CPU: uses host memory in place. Copies only NumPy arrays that are not aligned or
    whose last dimension is not contiguous."""

    def device_of(self, tensor):
        return CPU if tensor.device is None else tensor.device

    @staticmethod
    def _in_place(tensor):
        array, item = tensor.owner, tensor.owner.itemsize
        whole = array.flags.aligned and all(stride % item == 0 for stride in array.strides)
        if not whole or array.ndim and array.shape[-1] > 1 and array.strides[-1] != item:
            return None
        return dataclasses.replace(tensor, address=array.ctypes.data, device=CPU,
                                   strides=tuple(stride // item for stride in array.strides))

    def place(self, tensor):
        self._held.append(tensor)
        if tensor.device is not None:
            return tensor
        placed = self._in_place(tensor)
        if placed is None:
            copy = sys.modules["numpy"].array(tensor.owner, order="C", subok=False)
            placed = dataclasses.replace(tensor, owner=copy, address=copy.ctypes.data, device=CPU)
            self._held.append(copy)
        return placed

    def place_numbers(self, values):
        self._held.append(values)
        return values.buffer_info()[0]

    def output(self, tensor):
        self._held.append(tensor)
        if tensor.device is not None:
            return tensor
        placed = self._in_place(tensor)
        if placed is None:
            copy = _fresh(tensor.owner)
            self._downloads.append((copy, tensor.owner))
            placed = dataclasses.replace(tensor, address=copy.ctypes.data, device=CPU)
        return placed

    def finish(self):
        for copy, target in self._downloads:
            target[...] = copy
        self._held.clear()


class NoStaging(Staging):
    """For selecting a kernel only: copies nothing, and uses a dummy address for memory that is not
    on the device."""
    _SOMEWHERE = 4096

    def device_of(self, tensor):
        return CPU if tensor.device is None and self.device == CPU else tensor.device

    def place(self, tensor):
        return dataclasses.replace(tensor, address=tensor.address or self._SOMEWHERE)

    def place_numbers(self, values):
        return self._SOMEWHERE

    def output(self, tensor):
        return self.place(tensor)
