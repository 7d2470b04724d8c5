# SPDX-License-Identifier: Apache-2.0
"""libattend_kernels.so: finding it, the structs of attend_c.h, and its errors as exceptions."""

import ctypes
import pathlib
import threading

from . import _loading
from ._printable import printable

LIBRARY_NAME = "libattend_kernels.so"
ENVIRONMENT = "ATTEND_KERNELS_LIBRARY"
DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 64}
BIT = 4  # the dtype of a mask bias
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8, "uint8": 1}
CPU = -1  # as a device; GPUs are CUDA's ordinals
ALIGNMENTS = {"bottom_right": 0, "top_left": 1}
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
WORKSPACE_ZERO_BYTES = 16384  # at its start, before the first use
# gRPC's codes: errors of a server's client are of this class too.
CODES = {1: "CANCELLED", 2: "UNKNOWN", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED",
         5: "NOT_FOUND", 6: "ALREADY_EXISTS", 7: "PERMISSION_DENIED", 8: "RESOURCE_EXHAUSTED",
         9: "FAILED_PRECONDITION", 10: "ABORTED", 11: "OUT_OF_RANGE", 12: "UNIMPLEMENTED",
         13: "INTERNAL", 14: "UNAVAILABLE", 15: "DATA_LOSS", 16: "UNAUTHENTICATED"}


class Error(RuntimeError):
    """An error of the library or of this module. `code` is gRPC's number, `status` its name,
    `message` the text. Depending on its code it is also a ValueError (INVALID_ARGUMENT,
    OUT_OF_RANGE), a TimeoutError (DEADLINE_EXCEEDED) or a ConnectionError (UNAVAILABLE). It can be
    pickled, and so can subclasses with their own constructors. str() escapes characters that a
    terminal would obey or not show; `message` does not."""

    def __new__(cls, code=2, message="", *_, **__):
        kind = _KINDS.get(code, Error) if cls is Error else cls
        base = OSError if issubclass(kind, OSError) else RuntimeError
        return base.__new__(kind, message)

    def __init__(self, code, message):
        self.code, self.message = code, message
        self.status = CODES.get(code, str(code))
        self.args = (f"{self.status}: {printable(message)}",)

    def __reduce__(self):
        kind = Error if type(self) in _KINDS.values() else type(self)
        return _unpickled, (kind, self.__dict__.get("code", 2), self.args), self.__dict__


def _unpickled(kind, code, args):
    """An error without its fields, which pickle sets afterwards. It bypasses __init__, because a
    subclass's may take other arguments."""
    made = Error.__new__(kind, code)
    made.args = args
    return made


class _ValueError(Error, ValueError):
    pass


class _TimeoutError(Error, TimeoutError):
    pass


class _ConnectionError(Error, ConnectionError):
    pass


_KINDS = {3: _ValueError, 4: _TimeoutError, 11: _ValueError, 14: _ConnectionError}
for _kind in _KINDS.values():  # programs name only Error
    _kind.__name__ = _kind.__qualname__ = "Error"


class NotCopied:
    """Refuses to be copied or pickled, because two objects would then own one object of the
    library."""
    __slots__ = ()
    _instead = ""  # advice for the caller

    def __reduce_ex__(self, protocol):
        raise TypeError(f"{type(self).__module__.partition('.')[0]}.{type(self).__name__} is "
                        f"neither copied nor pickled: {self._instead}")


def invalid(message):
    """The exception for an invalid argument; the message names it, its value and the bound."""
    return Error(3, message)


def unimplemented(message):
    """The exception for an operation that does not exist."""
    return Error(12, message)


class TensorStruct(ctypes.Structure):
    """attend_tensor: address and strides in elements."""
    _fields_ = [("data", ctypes.c_void_p), ("stride_b", ctypes.c_int64),
                ("stride_h", ctypes.c_int64), ("stride_l", ctypes.c_int64)]


class Params(ctypes.Structure):
    """attend_params, field by field; struct_bytes detects another version."""
    _fields_ = [
        ("struct_bytes", ctypes.c_uint64), ("device", ctypes.c_int32), ("dtype", ctypes.c_int32),
        ("o_dtype", ctypes.c_int32),
        ("batch", ctypes.c_int64), ("heads_q", ctypes.c_int64), ("heads_kv", ctypes.c_int64),
        ("len_q", ctypes.c_int64), ("len_k", ctypes.c_int64), ("dim", ctypes.c_int64),
        ("dim_v", ctypes.c_int64), ("packed", ctypes.c_int32), ("alignment", ctypes.c_int32),
        ("total_q", ctypes.c_int64), ("total_k", ctypes.c_int64), ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64), ("key_offset", ctypes.c_int64),
        ("keys_after", ctypes.c_int64), ("scale", ctypes.c_double), ("softcap", ctypes.c_double),
        ("q", TensorStruct), ("k", TensorStruct), ("v", TensorStruct), ("o", TensorStruct),
        ("lse", ctypes.c_void_p), ("lse_stride_b", ctypes.c_int64),
        ("lse_stride_h", ctypes.c_int64), ("bias", ctypes.c_void_p),
        ("bias_stride_b", ctypes.c_int64), ("bias_stride_h", ctypes.c_int64),
        ("bias_stride_q", ctypes.c_int64), ("bias_dtype", ctypes.c_int32),
        ("config", ctypes.c_int32), ("alibi_slopes", ctypes.c_void_p),
        ("alibi_stride_b", ctypes.c_int64), ("sinks", ctypes.c_void_p),
        ("q_lengths", ctypes.c_void_p), ("kv_lengths", ctypes.c_void_p),
        ("q_offsets", ctypes.c_void_p), ("kv_offsets", ctypes.c_void_p),
        ("kv_pages", ctypes.c_void_p), ("kv_pages_stride", ctypes.c_int64),
        ("page_rows", ctypes.c_int64), ("dropout_p", ctypes.c_float),
        ("dropout_seed", ctypes.c_uint64), ("dropout_sequence", ctypes.c_int64),
        ("dropout_head", ctypes.c_int64), ("dropout_row", ctypes.c_int64),
        ("kernel", ctypes.c_char_p), ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
    ]


class TreeStruct(ctypes.Structure):
    """attend_tree."""
    _fields_ = [("struct_bytes", ctypes.c_uint64), ("bits", ctypes.c_void_p),
                ("tokens", ctypes.c_int64), ("stride_b", ctypes.c_int64),
                ("lengths", ctypes.c_void_p)]


class BackwardParams(ctypes.Structure):
    """attend_backward_params, field by field."""
    _fields_ = [
        ("struct_bytes", ctypes.c_uint64), ("attention", Params), ("d_o", TensorStruct),
        ("d_lse", ctypes.c_void_p), ("d_q", TensorStruct), ("d_k", TensorStruct),
        ("d_v", TensorStruct), ("d_bias", ctypes.c_void_p), ("d_bias_stride_b", ctypes.c_int64),
        ("d_bias_stride_h", ctypes.c_int64), ("d_bias_stride_q", ctypes.c_int64),
        ("d_sinks", ctypes.c_void_p),
    ]


_int32, _int64, _address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS = {
    "attend_run": [_address, _address],
    "attend_run_batch": [_address, _int32, _address, _int64, _address],
    "attend_workspace_bytes": [_address, _address],
    "attend_batch_workspace_bytes": [_address, _int32, _address],
    "attend_select": [_address, _address, _address],
    "attend_run_backward": [_address, _address],
    "attend_backward_workspace_bytes": [_address, _address],
    "attend_select_backward": [_address, _address, _address],
    "attend_write_tree": [_address, _address, _address, _int64],
    "attend_configs": [_address, _address],
    "attend_device_count": [_address],
    "attend_malloc": [_int32, _int64, _address],
    "attend_free": [_int32, _address],
    "attend_memcpy": [_int32, _address, _address, _int64, _int32, _address],
    "attend_memset": [_int32, _address, _int32, _int64, _address],
    "attend_synchronize": [_int32, _address],
}


def declare(library):
    """Declares the signatures of attend_c.h to ctypes and returns the library. Error: it lacks a
    function, so it is of another version."""
    try:
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
            getattr(library, name).restype = _int32
        library.attend_config_name.argtypes = [_address, _int32]
        library.attend_config_name.restype = ctypes.c_char_p
        library.attend_last_error.argtypes = []
        library.attend_last_error.restype = ctypes.c_char_p
    except AttributeError as failure:
        raise Error(14, f"this library is not of this module's version: {failure}") from None
    return library


def candidates(module=__file__):
    """Paths where the library may be, in order of preference."""
    return _loading.candidates(module, LIBRARY_NAME, "kernels/c", ENVIRONMENT)


def load(path=None):
    """Loads the library from `path`, from the first existing candidate, or through the system's
    loader. Error: it is not found, or is of another version."""
    paths = [pathlib.Path(path)] if path else candidates()
    try:
        loaded = _loading.load(paths, LIBRARY_NAME, ENVIRONMENT)
    except OSError as failure:
        raise Error(14, str(failure)) from None
    return declare(loaded)


_library = None
_lock = threading.Lock()


def library():
    """The loaded library, one for the process."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = load()
    return _library


def check(code):
    """Raises Error unless `code` is ATTEND_OK."""
    if code != 0:
        raise Error(code, library().attend_last_error().decode(errors="replace"))


def device_count():
    """Number of GPUs that CUDA reports; 0 without a driver, or without CUDA in the library."""
    count = ctypes.c_int32()
    check(library().attend_device_count(ctypes.byref(count)))
    return count.value


class Memory(NotCopied):
    """Uninitialised device memory, freed when its last reference is dropped."""
    _instead = "copy the arrays in it"

    def __init__(self, device, byte_count):
        self.device, self.bytes = device, byte_count
        self._library = library()  # at exit this module may no longer have it
        self.address = 0
        address = ctypes.c_void_p()
        check(self._library.attend_malloc(device, byte_count, ctypes.byref(address)))
        self.address = address.value or 0

    def __del__(self):
        if getattr(self, "address", 0):
            self._library.attend_free(self.device, self.address)
