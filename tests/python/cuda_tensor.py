# SPDX-License-Identifier: Apache-2.0
"""Fake GPU tensors in host memory: one with torch's data_ptr(), one with DLPack."""

import ctypes
import dataclasses

import numpy as np

from attend_kernels import _dlpack

float32 = np.float32  # attend_kernels looks for dtypes in a tensor's package, as in torch


@dataclasses.dataclass(frozen=True)
class Device:
    type: str = "cuda"
    index: int = 0

    def __str__(self):
        return f"{self.type}:{self.index}"


class PtrTensor:
    """A NumPy array with the attributes of a torch CUDA tensor that attend_kernels uses."""

    def __init__(self, values, device=Device()):
        self.values, self.device, self.shape = values, device, values.shape
        self.dtype = f"torch.{values.dtype.name}"

    def data_ptr(self):
        return self.values.ctypes.data

    def stride(self):
        return tuple(s // self.values.itemsize for s in self.values.strides)

    def new_empty(self, shape, dtype=None):
        return PtrTensor(np.full(shape, np.nan, dtype or self.values.dtype), self.device)

    def long(self):
        return PtrTensor(self.values.astype(np.int64), self.device)

    def cpu(self):
        return PtrTensor(self.values, Device("cpu"))

    def contiguous(self):
        return PtrTensor(np.ascontiguousarray(self.values), self.device)


class Bfloat16(PtrTensor):
    """A bfloat16 tensor, whose bits are in a NumPy array of uint16."""

    def __init__(self, bits):
        super().__init__(bits, Device("cpu"))
        self.dtype = "torch.bfloat16"

    def new_empty(self, shape, dtype=None):
        return super().new_empty(shape, dtype) if dtype else Bfloat16(np.zeros(shape, np.uint16))


class DlpackTensor:
    """Exports a NumPy array as DLPack capsules and counts calls of their deleter."""
    TYPES = {"float16": (2, 16), "float32": (2, 32), "int64": (0, 64), "float64": (2, 64),
             "int16": (0, 16)}

    def __init__(self, values, device_type=_dlpack.CUDA, with_strides=True, byte_offset=0):
        self.values, self.device_type = values, device_type
        self.asked, self.deleted = [], 0
        size = values.ndim
        self.shape = (ctypes.c_int64 * size)(*values.shape)
        self.strides = (ctypes.c_int64 * size)(*(s // values.itemsize for s in values.strides))
        code, bits = self.TYPES[values.dtype.name]
        strides = self.strides if with_strides else None
        tensor = _dlpack.DLTensor(values.ctypes.data - byte_offset, device_type, 0, size, code,
                                  bits, 1, self.shape, strides, byte_offset)
        self.deleter = _dlpack._Deleter(self._delete)
        self.managed = _dlpack.DLManagedTensor(
            tensor, None, ctypes.cast(self.deleter, ctypes.c_void_p))

    def _delete(self, managed):
        assert ctypes.addressof(managed.contents) == ctypes.addressof(self.managed)
        self.deleted += 1

    def __dlpack_device__(self):
        return self.device_type, 0

    def __dlpack__(self, *, stream=None):
        self.asked.append(stream)
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p,
                                ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))
        return new(ctypes.addressof(self.managed), b"dltensor", None)
