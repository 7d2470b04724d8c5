# SPDX-License-Identifier: Apache-2.0
"""A call to a server, from start to answer, and the answer's tensors as arrays."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import itertools
import math
import sys
import warnings
from typing import Any, Callable, NamedTuple

from attend_kernels import DeviceArray, Error, _tensors
from attend_kernels._checks import real
from attend_kernels._library import CPU, ITEM_BYTES, NotCopied, invalid
from attend_kernels._printable import printable

from . import _memory
from ._library import (DTYPE_NAMES, AnswerStruct, CallHandle, DoneFunction, check, is_on_gpu,
                       is_there, library)

_SLICE_NS = 200_000_000  # longest wait during which Python cannot handle signals such as Ctrl-C


@dataclasses.dataclass(frozen=True)
class Timings:
    """Time of each phase, in nanoseconds of the server's clock (Timings in attention.proto)."""
    receive_ns: int
    queue_ns: int
    copy_in_ns: int
    kernel_ns: int
    copy_out_ns: int
    check_ns: int
    total_ns: int


@dataclasses.dataclass(frozen=True)
class Check:
    """The server's reference check (CheckReport in attention.proto)."""
    ok: bool
    rows_checked: int
    rows_total: int
    rows_wide: int
    max_abs_error: float
    mean_abs_error: float
    bound: float
    detail: str
    rows_unjudged: int = 0
    undecided: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class Answer:
    """An answer. o: O in q's layout with Dv, or None after a backward pass. lse: float32 [B, Hq,
    Lq], packed [Hq, rows], or None. gradients: of a backward pass, by name, "q", "k", "v", "bias",
    "sinks". check: None if nothing was checked. session_lengths: tokens of each sequence's layer.
    sessions_ending: the server is draining, and its sessions will end."""
    o: Any
    lse: Any
    gradients: dict[str, Any]
    timings: Timings
    check: Check | None
    kernel: str
    kernel_reason: str
    device: str
    transport: str
    batch_requests: int
    request_id: str
    attempts: int
    session_lengths: tuple[int, ...]
    sessions_ending: bool

    def __repr__(self) -> str:
        arrays = {"o": self.o, "lse": self.lse,
                  **{f"gradients[{name!r}]": array for name, array in self.gradients.items()}}
        words = [f"{name} {array.dtype} {tuple(array.shape)}" for name, array in arrays.items()
                 if array is not None]
        if self.check is not None:
            words.append("checked" if self.check.ok else
                         "check undecided" if self.check.undecided else "check failed")
        words += [f"{self.kernel} on {self.device}", self.transport,
                  f"{self.timings.total_ns / 1e6:.3g} ms"]
        return printable(f"<attend.Answer {', '.join(words)}>")


class _ArrayMemory:
    """An answer's tensor for NumPy's __array_interface__."""

    def __init__(self, owner, address, shape, kind):
        self.owner = owner
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": shape,
                                    "typestr": kind}


class _HostMemory:
    """Host memory in the form that DeviceArray takes."""
    device = CPU

    def __init__(self, owner, address):
        self.owner, self.address = owner, address


def _numpy_array(handle, address, shape, name, like):
    numpy = sys.modules["numpy"]
    if name == "bfloat16":  # ml_dtypes' dtype, taken from q's array
        plain = numpy.asarray(_ArrayMemory(handle, address, shape, "<V2"))
        return plain.view(like.owner.dtype)
    return numpy.asarray(_ArrayMemory(handle, address, shape,
                                      "<f2" if name == "float16" else "<f4"))


def _torch_tensor(handle, address, shape, name, like):
    package = sys.modules[type(like.owner).__module__.partition(".")[0]]
    dtype = getattr(package, name)
    count = math.prod(shape)
    if count == 0:
        return like.owner.new_empty(shape, dtype=dtype)
    memory = (ctypes.c_char * (count * ITEM_BYTES[name])).from_address(address)
    memory.owner = handle
    return package.frombuffer(memory, dtype=dtype).reshape(shape)


def _device_array(handle, struct, shape, name, like):
    """An array on q's GPU: a copy, in the order of the current stream, or the memory that the
    server wrote to, if the answer is in GPU memory and q is in shared memory too."""
    stream = _memory.current_stream(like.device)
    if struct.memory != 0 and 0 not in shape and is_on_gpu(like.address):
        memory = _memory.AnswerMemory(handle, struct.data, like.device, stream)
        array = DeviceArray(memory, shape, name, stream)
        if like.kind != "data_ptr":
            return array
        return sys.modules[type(like.owner).__module__.partition(".")[0]].from_dlpack(array)
    made = _tensors.empty_like(like, shape, name, stream)
    if 0 not in shape:
        check(library().copy(handle, ctypes.byref(struct), made.address, like.device + 1,
                             stream or None))
    return made.owner


def _array(handle, struct, like, shape=None):
    """An answer's tensor as an array of q's library, on q's device; host memory is not copied."""
    if struct.dtype == 0:
        return None
    if shape is None:
        shape = tuple(struct.shape[:struct.dims])
    name = DTYPE_NAMES[struct.dtype]
    if like.device not in (None, CPU):
        return _device_array(handle, struct, shape, name, like)
    if like.kind == "numpy":
        if 0 in shape:
            dtype = like.owner.dtype if name == like.dtype else "float32"
            return sys.modules["numpy"].empty(shape, dtype)
        return _numpy_array(handle, struct.data, shape, name, like)
    if like.kind == "data_ptr":
        return _torch_tensor(handle, struct.data, shape, name, like)
    return DeviceArray(_HostMemory(handle, struct.data or 0), shape, name, 0)


# Calls in flight, and the objects that they read. The garbage collector finalizes the arrays and
# the call of a cycle in any order, but nothing that is referenced from here.
_in_flight: set = set()
_orphans: collections.deque = collections.deque()  # those without a Call object


def _drop_ended():
    for _ in range(len(_orphans)):
        try:
            started = _orphans.popleft()
        except IndexError:  # emptied by another thread
            return
        if not started.wait(0):
            _orphans.append(started)


_callbacks: dict[int, Callable[[], None]] = {}
_callback_ids = itertools.count(1)


@DoneFunction
def _on_done(user):
    _callbacks.pop(user)()


class Plan(NamedTuple):
    """A call ready to be started. start: starts it, given the addresses of its params and of the
    handle. keep: objects that must live until it has ended. after: called once when the answer has
    arrived; must not block."""
    arguments: Any
    start: Callable[..., int]
    keep: Any
    after: Callable[[], None] | None = None


class _Started:
    """A started call and the objects that it reads until it has ended."""

    def __init__(self, held):
        self.handle, self.held = None, held
        _in_flight.add(self)

    def over(self):
        self.held = None
        _in_flight.discard(self)

    def wait(self, nanoseconds):
        ended = ctypes.c_int32()
        check(library().wait(self.handle, nanoseconds, ctypes.byref(ended)))
        if ended.value:
            self.over()
        return bool(ended.value)

    def abandon(self):
        if is_there() and not self.wait(0):
            self.handle.use("cancel")
            _orphans.append(self)


class Call(NotCopied):
    """A call in flight. Thread-safe. Cancelled when its last reference is dropped."""
    _instead = "wait for its result()"

    def __init__(self, plan: Plan, on_done: Callable[[], None] | None = None):
        """on_done: called once, when the call has ended, on any thread, possibly before this
        returns; must not block."""
        _drop_ended()
        self._arguments, self._after = plan.arguments, plan.after
        params, address, user = plan.arguments.params(), ctypes.c_void_p(), next(_callback_ids)
        if on_done is not None:
            _callbacks[user] = on_done
            params.done, params.user = ctypes.cast(_on_done, ctypes.c_void_p), user
        self._started = _Started((plan.arguments.held, plan.keep))
        self._answer: Answer | None = None
        try:
            check(plan.start(ctypes.byref(params), ctypes.byref(address)))
        finally:  # the call may be in flight when Ctrl-C comes
            if address.value:
                self._started.handle = CallHandle(address.value)
            else:
                self._started.over()
                _callbacks.pop(user, None)

    def __del__(self):
        started = self.__dict__.get("_started")
        if started is not None and started.held is not None and is_there is not None:
            started.abandon()

    def __repr__(self) -> str:
        return f"<attend.Call, {'ended' if self._started.held is None else 'in flight'}>"

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._started.held is None or self._started.wait(0)

    def cancel(self) -> None:
        """Ends the call soon, with CANCELLED or with the answer that it already has."""
        self._started.handle.use("cancel")

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the call has ended, at most `timeout` seconds. Returns whether it has."""
        left = math.inf if timeout is None else real("timeout", timeout) * 1e9
        if math.isnan(left):
            raise invalid(f"timeout is {timeout!r}, must be a number of seconds, or None")
        if self._started.held is None:
            return True
        while not self._started.wait(int(max(0, min(left, _SLICE_NS)))):
            left -= _SLICE_NS
            if left <= 0:
                return False
        return True

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the answer, at most `timeout` seconds. Error: the call failed, with the status
        of the server or the client. TimeoutError: it has not ended, and continues. A call that
        failed with DEADLINE_EXCEEDED raises an Error that is a TimeoutError too: catch attend.Error
        first, or ask done(), to distinguish it from one that continues."""
        try:
            ended = self.wait(timeout)
        except BaseException:  # Ctrl-C: the caller may change the arrays afterwards
            self.cancel()
            self.wait()
            raise
        if not ended:
            raise TimeoutError(f"no answer in {timeout} s")
        if self._answer is None:
            self._answer = self._read()
            after, self._after = self._after, None
            if after is not None:
                after()
        return self._answer

    def _read(self):
        raw = AnswerStruct(struct_bytes=ctypes.sizeof(AnswerStruct))
        handle = self._started.handle
        check(library().get(handle, ctypes.byref(raw)))
        lengths = ctypes.cast(raw.session_lengths.data, ctypes.POINTER(ctypes.c_int64))
        lengths = tuple(lengths[:raw.session_lengths.count]) if raw.session_lengths.count else ()
        if raw.code != 0:
            failure = Error(raw.code, raw.message.decode(errors="replace"))
            failure.attempts, failure.session_lengths = raw.attempts, lengths
            raise failure
        q = self._arguments.q
        gradients = {name: _array(handle, getattr(raw, "d_" + name), q,
                                  self._arguments.bias_shape if name == "bias" else None)
                     for name in ("q", "k", "v", "bias", "sinks")
                     if getattr(raw, "d_" + name).dtype}
        report = Check(bool(raw.check_ok), raw.rows_checked, raw.rows_total, raw.rows_wide,
                       raw.max_abs_error, raw.mean_abs_error, raw.error_bound,
                       raw.check_detail.decode(errors="replace"), raw.rows_unjudged,
                       bool(raw.check_undecided)) if raw.checked else None
        return Answer(
            o=_array(handle, raw.o, q), lse=_array(handle, raw.lse, q), gradients=gradients,
            timings=Timings(*(getattr(raw, field.name) for field in dataclasses.fields(Timings))),
            check=report, kernel=raw.kernel.decode(), kernel_reason=raw.kernel_reason.decode(),
            device=raw.device.decode(), transport=raw.transport.decode(),
            batch_requests=raw.batch_requests, request_id=raw.request_id.decode(errors="replace"),
            attempts=raw.attempts, session_lengths=lengths,
            sessions_ending=bool(raw.sessions_ending))


def arrays_of(answer: Answer, return_lse: bool):
    """O, or (O, LSE). Error: the requested reference check failed. Warns if the check could not
    judge every row it looked at."""
    if answer.check is not None and answer.check.undecided:
        warnings.warn(f"the server's reference check could not judge all: {answer.check.detail}",
                      RuntimeWarning, stacklevel=3)
    elif answer.check is not None and not answer.check.ok:
        raise Error(13, f"the server's reference check failed: {answer.check.detail}")
    return (answer.o, answer.lse) if return_lse else answer.o


def gradients_of(answer: Answer, wanted):
    """The gradients in the order of `wanted`."""
    arrays_of(answer, False)
    return tuple(answer.gradients[name] for name in wanted)
