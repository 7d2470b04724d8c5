# SPDX-License-Identifier: Apache-2.0
"""DLPack with ctypes: reading other libraries' capsules, and making our own.

https://dmlc.github.io/dlpack/latest/: `tensor.__dlpack__(stream=...)` returns a PyCapsule named
"dltensor" over a DLManagedTensor. The consumer renames the capsule to "used_dltensor" and calls the
tensor's deleter when done.
"""

import ctypes

from ._library import CPU, ITEM_BYTES, NotCopied, check, invalid, library

CPU_TYPE, CUDA, CUDA_MANAGED = 1, 2, 13
LEGACY_DEFAULT_STREAM = 1  # DLPack's number for CUDA's stream 0
_NAME, _USED_NAME = b"dltensor", b"used_dltensor"
_DTYPES = {(2, 16): "float16", (4, 16): "bfloat16", (2, 32): "float32", (2, 64): "float64",
           (0, 64): "int64", (0, 32): "int32"}
_CODES = {name: key for key, name in _DTYPES.items()}


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p),
                            ("deleter", ctypes.c_void_p)]

# An address, not an object: the destructor runs when nothing refers to the capsule any more.
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor)(
    ("PyCapsule_New", ctypes.pythonapi))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi))
_is_valid_at = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))


def packed_strides(shape):
    """Strides in elements of a C-contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Import(NotCopied):
    """A consumed capsule: address, shape, strides (elements), dtype's name, device. Calls the
    producer's deleter when its last reference is dropped."""

    def __init__(self, name, capsule):
        self._managed = None
        if not _is_valid(capsule, _NAME):
            raise invalid(f"{name}.__dlpack__() returned no capsule named dltensor, or a used one")
        managed = DLManagedTensor.from_address(_pointer(capsule, _NAME))
        _rename(capsule, _USED_NAME)
        self._managed = managed  # owned from here on, even if refused below
        tensor = managed.dl_tensor
        if tensor.device_type not in (CPU_TYPE, CUDA, CUDA_MANAGED):
            raise invalid(f"{name} is on DLPack device type {tensor.device_type}, must be on "
                          f"CUDA, {CUDA}, or the CPU, {CPU_TYPE}")
        self.dtype = _DTYPES.get((tensor.code, tensor.bits))
        if self.dtype is None or tensor.lanes != 1:
            raise invalid(f"{name} has DLPack type code {tensor.code}, {tensor.bits} bits, "
                          f"{tensor.lanes} lanes, must be float16, bfloat16, float32 or "
                          f"float64")
        self.shape = tuple(tensor.shape[:tensor.ndim])
        self.strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides else \
            packed_strides(self.shape)
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.device = CPU if tensor.device_type == CPU_TYPE else tensor.device_id

    def __del__(self):
        managed, self._managed = self._managed, None
        if managed is not None and managed.deleter:
            _Deleter(managed.deleter)(ctypes.byref(managed))


class _Export:
    """The memory that an exported DLManagedTensor points to. Lives until its deleter is called."""

    def __init__(self, array):
        self.array = array
        size = len(array.shape)
        self.shape = (ctypes.c_int64 * size)(*array.shape)
        self.strides = (ctypes.c_int64 * size)(*packed_strides(array.shape))
        code, bits = _CODES[array.dtype]
        tensor = DLTensor(array.data_ptr(), *array.__dlpack_device__(), size, code, bits, 1,
                          self.shape, self.strides, 0)
        self.managed = DLManagedTensor(tensor, None, ctypes.cast(_delete, ctypes.c_void_p))
        self.address = ctypes.addressof(self.managed)


_exports: dict = {}  # by the address of their DLManagedTensor


@_Deleter
def _delete(managed):
    _exports.pop(ctypes.addressof(managed.contents), None)


@_CapsuleDestructor
def _destroy(capsule):
    # A capsule that was not consumed still owns its tensor.
    if _is_valid_at(capsule, _NAME):
        _exports.pop(_pointer_at(capsule, _NAME), None)


class DeviceArray(NotCopied):
    """A C-contiguous array on a GPU or the CPU that other libraries take by DLPack without a copy
    (torch.from_dlpack(o), cupy.from_dlpack(o)). Frees its memory when its last reference is
    dropped.

    shape: tuple; dtype: "float16", "bfloat16" or "float32"; device_index: CUDA ordinal, -1 for the
    CPU."""
    _instead = "copy the array that torch.from_dlpack or cupy.from_dlpack makes of it"

    def __init__(self, memory, shape, dtype, stream):
        self._memory, self._stream = memory, stream
        self.shape, self.dtype = tuple(shape), dtype
        self.device_index = memory.device

    def __repr__(self):
        place = "cpu" if self.device_index == CPU else f"cuda:{self.device_index}"
        return f"<attend_kernels.DeviceArray {self.dtype} {self.shape} on {place}>"

    @property
    def nbytes(self):
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count

    def data_ptr(self):
        return self._memory.address

    def __dlpack_device__(self):
        return (CPU_TYPE, 0) if self.device_index == CPU else (CUDA, self.device_index)

    def __dlpack__(self, *, stream=None, **_):
        # The consumer's stream must see the kernel's writes. Waiting here ensures that for any
        # stream. -1: the consumer does not want synchronization.
        consumer = LEGACY_DEFAULT_STREAM if stream is None else stream
        if self.device_index != CPU and consumer not in (-1, self._stream or LEGACY_DEFAULT_STREAM):
            self.synchronize()
        export = _Export(self)
        _exports[export.address] = export
        return _new(export.address, _NAME, _destroy)

    @property
    def __cuda_array_interface__(self):
        if self.device_index == CPU or self.dtype == "bfloat16":
            raise AttributeError("__cuda_array_interface__ is of a GPU's float16 and float32")
        kind = {"float16": "<f2", "float32": "<f4"}[self.dtype]
        return {"version": 3, "data": (self.data_ptr(), False), "shape": self.shape,
                "strides": None, "typestr": kind,
                "stream": self._stream or LEGACY_DEFAULT_STREAM}

    def synchronize(self):
        """Waits until the stream that writes this array has run."""
        check(library().attend_synchronize(self.device_index, self._stream or None))
