# SPDX-License-Identifier: Apache-2.0
"""libattend_client.so: how it is found, and the structs of attend_client.h."""

from __future__ import annotations

import ctypes
import numbers
import os
import pathlib
import threading
from typing import Any

from attend_kernels import Error, _loading
from attend_kernels._library import NotCopied

LIBRARY_NAME = "libattend_client.so"
ENVIRONMENT = "ATTEND_CLIENT_LIBRARY"
DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3}
DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
BIT = 4  # the dtype of a mask bias
TRANSPORTS = {"auto": 0, "inline": 1, "chunked": 2, "shared": 3}

_int32, _int64, _address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_text = ctypes.c_char_p
DoneFunction = ctypes.CFUNCTYPE(None, _address)


class TensorStruct(ctypes.Structure):
    """attend_client_tensor."""
    _fields_ = [("data", _address), ("dtype", _int32), ("dims", _int32), ("shape", _int64 * 4),
                ("memory", _int32), ("reserved", _int32)]


class NumbersStruct(ctypes.Structure):
    """attend_client_numbers."""
    _fields_ = [("data", _address), ("count", _int64)]


class ListStruct(ctypes.Structure):
    """attend_client_list."""
    _fields_ = [("name", _text), ("data", _address), ("count", _int64)]


class Options(ctypes.Structure):
    """attend_client_options."""
    _fields_ = [
        ("struct_bytes", ctypes.c_uint64), ("server", _text), ("tenant", _text),
        ("connections", _int32), ("attempts_max", _int32), ("chunked_bytes_min", _int64),
        ("shared_memory_off", _int32), ("shared_memory_socket", _text), ("token", _text),
        ("token_file", _text), ("tls_ca", _text), ("tls_cert", _text), ("tls_key", _text),
        ("tls_server_name", _text), ("traceparent", _text),
    ]


class Params(ctypes.Structure):
    """attend_client_params."""
    _fields_ = [
        ("struct_bytes", ctypes.c_uint64), ("request", _text),
        ("lists", ctypes.POINTER(ListStruct)), ("lists_count", _int64),
        *((name, TensorStruct) for name in ("q", "k", "v", "bias", "tree", "o", "lse", "d_o",
                                            "d_lse")),
        ("transport", _int32), ("timeout_ns", _int64), ("tenant", _text),
        ("done", _address), ("user", _address), ("stream", _address), ("traceparent", _text),
    ]


class AnswerStruct(ctypes.Structure):
    """attend_client_answer."""
    _fields_ = [
        ("struct_bytes", ctypes.c_uint64), ("code", _int32), ("attempts", _int32),
        ("message", _text),
        *((name, TensorStruct) for name in ("o", "lse", "d_q", "d_k", "d_v", "d_bias", "d_sinks")),
        *((name, _int64) for name in ("receive_ns", "queue_ns", "copy_in_ns", "kernel_ns",
                                      "copy_out_ns", "check_ns", "total_ns", "batch_requests")),
        *((name, _text) for name in ("request_id", "kernel", "kernel_reason", "device",
                                     "transport")),
        ("checked", _int32), ("check_ok", _int32), ("check_undecided", _int32),
        ("reserved", _int32), ("rows_checked", _int64), ("rows_total", _int64),
        ("rows_wide", _int64), ("rows_unjudged", _int64), ("max_abs_error", ctypes.c_double),
        ("mean_abs_error", ctypes.c_double), ("error_bound", ctypes.c_double),
        ("check_detail", _text), ("session_lengths", NumbersStruct), ("sessions_ending", _int32),
    ]


class LayerShapeStruct(ctypes.Structure):
    """attend_client_layer_shape."""
    _fields_ = [("dtype", _int32), ("reserved", _int32), ("heads_kv", _int64), ("dim", _int64),
                ("dim_v", _int64)]


class SessionOptions(ctypes.Structure):
    """attend_client_session_options."""
    _fields_ = [
        ("struct_bytes", ctypes.c_uint64), ("shapes", ctypes.POINTER(LayerShapeStruct)),
        ("shapes_count", _int64), ("layers", _int32), ("pinned", _int32), ("device", _text),
        ("tenant", _text), ("lease_seconds", ctypes.c_double), ("timeout_ns", _int64),
        ("traceparent", _text), ("server", _text),
    ]


# Argument types of the functions that return a code, then of those that return nothing.
ARGUMENTS = {
    "open": [_address, _address],
    "prepare": [_address, _int64],
    "info": [_address, _int64, _address],
    "health": [_address, _text, _int64, _address],
    "allocate": [_address, _int32, _int64, _address],
    "release": [_address, _address],
    "start": [_address, _address, _address],
    "wait": [_address, _int64, _address],
    "get": [_address, _address],
    "copy": [_address, _address, _address, _int32, _address],
    "stream_open": [_address, _text, _text, _text, _int64, _address],
    "stream_start": [_address, _address, _address],
    "stream_finish": [_address],
    "session_create": [_address, _address, _address],
    "session_open": [_address, _text, _address, _address],
    "session_list": [_address, _text, _int64, _address],
    "session_fork": [_address, _int64, _address],
    "session_truncate": [_address, _int64],
    "session_keep_draft": [_address, _int64, _address, _int64],
    "session_keep_alive": [_address],
    "session_get": [_address, _address],
    "session_layers": [_address],
    "session_start": [_address, _int32, _int32, _address, _address, _address],
    "session_end": [_address],
}
VOID_ARGUMENTS = {
    "close": [_address], "shut_down": [_address], "string_free": [_address], "cancel": [_address],
    "used": [_address, _address], "call_free": [_address], "stream_cancel": [_address],
    "stream_close": [_address], "session_free": [_address, _int32],
}


class Library:
    """The functions of attend_client.h, without their prefix."""

    def __init__(self, loaded: ctypes.CDLL):
        try:
            for name, arguments in {**ARGUMENTS, **VOID_ARGUMENTS}.items():
                function = getattr(loaded, f"attend_client_{name}")
                function.argtypes = arguments
                function.restype = _int32 if name in ARGUMENTS else None
                setattr(self, name, function)
            self.last_error = loaded.attend_client_last_error
            self.last_error.restype = _text
            self.session_id = loaded.attend_client_session_id
            self.session_id.argtypes, self.session_id.restype = [_address], _text
            self.session_length = loaded.attend_client_session_length
            self.session_length.argtypes = [_address, _int32]
            self.session_length.restype = _int64
        except AttributeError as failure:
            raise Error(14, f"this library is not of this module's version: {failure}") from None

    def __getattr__(self, name: str):
        raise AttributeError(name)  # __init__ has set all functions


def candidates(module=__file__):
    """Paths where the library may be, in order of preference."""
    return _loading.candidates(module, LIBRARY_NAME, "client/c", ENVIRONMENT)


def load(path=None) -> Library:
    """Loads the library from `path`, from the first existing candidate, or through the system's
    loader. Error: it is not found, or is of another version."""
    paths = [pathlib.Path(path)] if path else candidates()
    try:
        loaded = _loading.load(paths, LIBRARY_NAME, ENVIRONMENT)
    except OSError as failure:
        raise Error(14, str(failure)) from None
    return Library(loaded)


_library: Library | None = None
_lock = threading.Lock()
_forked = False  # from a process with the library, whose threads this one lacks


def library() -> Library:
    """The loaded library, one for the process."""
    global _library
    if _library is None:
        with _lock:
            if _forked:
                raise Error(9, "this process was forked after attend's first client was made, and "
                               "lacks its threads: start processes by 'spawn'")
            if _library is None:
                _library = load()
    return _library


def _leave_to_the_parent() -> None:
    global _library, _lock, _forked
    _lock = threading.Lock()  # another thread may have held it
    _forked = _forked or _library is not None
    _library = None


os.register_at_fork(after_in_child=_leave_to_the_parent)


def is_there() -> bool:
    """False: the library is not loaded, the interpreter is ending, or the process is a fork."""
    return _library is not None


class Handle(NotCopied, int):
    """The address of an object of the library, freed with the last reference; callers of the
    library hold one during the call. It is an int because the garbage collector does not track
    ints: it would free a tracked handle before the other objects of its cycle are done with it."""
    __slots__ = ()
    _instead = "it is an object's of the library"
    _free: tuple[Any, ...]  # a function of the library, and its further arguments

    def use(self, name: str, *arguments: Any) -> None:
        """Calls a library function that cannot fail, if the library is loaded."""
        if _library is not None:
            getattr(_library, name)(self, *arguments)

    def __del__(self) -> None:
        self.use(*self._free)


class ClientHandle(Handle):
    __slots__ = ()
    _free = ("close",)


class CallHandle(Handle):
    __slots__ = ()
    _free = ("call_free",)


class StreamHandle(Handle):
    __slots__ = ()
    _free = ("stream_close",)


_kept: set[int] = set()  # sessions
_allocated: dict[int, ClientHandle] = {}  # the client of each address
_on_gpus: dict[int, int] = {}  # end address by start address, for GPU memory


class SessionHandle(Handle):
    """Freeing it ends the session on the server if it was made here."""
    __slots__ = ()

    def keep(self) -> None:
        """Leaves the session on the server when this handle is freed."""
        _kept.add(int(self))

    def __del__(self) -> None:
        keep = int(self) in _kept
        _kept.discard(int(self))
        self.use("session_free", keep)


class MemoryHandle(Handle):
    """Shared memory allocated by a client."""
    __slots__ = ()

    @classmethod
    def allocated(cls, client: ClientHandle, byte_count: int, device: int = -1) -> MemoryHandle:
        """Allocates on the host (-1), or on a GPU by CUDA ordinal."""
        address = ctypes.c_void_p()
        check(library().allocate(client, device + 1, byte_count, ctypes.byref(address)))
        memory = cls(address.value or 0)
        _allocated[int(memory)] = client
        if device >= 0:
            _on_gpus[int(memory)] = int(memory) + byte_count
        return memory

    def __del__(self) -> None:
        _on_gpus.pop(int(self), None)
        client = _allocated.pop(int(self), None)
        if client is not None:
            client.use("release", int(self))


def is_on_gpu(address: int | None) -> bool:
    """Whether the address is in GPU memory from MemoryHandle.allocated."""
    return any(begin <= (address or 0) < end for begin, end in list(_on_gpus.items()))


def check(code: int) -> None:
    """Raises Error unless `code` is ATTEND_CLIENT_OK."""
    if code != 0:
        raise Error(code, library().last_error().decode(errors="replace"))


def nanoseconds(name: str, seconds) -> int:
    """A timeout in seconds, None for none, in the C interface's form."""
    if seconds is None:
        return 0
    if not isinstance(seconds, numbers.Real) or not 0 < seconds < 9e9:
        raise Error(3, f"{name} is {seconds!r}, must be a number of seconds above 0 and below 9e9, "
                       f"or None")
    return max(1, int(float(seconds) * 1e9))
