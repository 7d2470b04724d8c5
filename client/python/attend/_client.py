# SPDX-License-Identifier: Apache-2.0
"""A client of an attend server, over libattend_client.so."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attend_kernels import Error
from attend_kernels._checks import integer, names, optional_text, text
from attend_kernels._library import invalid

from . import _memory, _session
from ._arguments import Arguments, options_of
from ._call import Call, Plan, arrays_of, gradients_of
from ._library import ClientHandle, Options, check, is_there, library, nanoseconds
from ._options import Array, Attention, CallOptions, Wanted, named
from ._stream import Stream
from ._tenants import Tenants

if TYPE_CHECKING:
    from typing_extensions import Unpack

_HEALTH = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_clients() -> None:
    """gRPC's threads must not outlive the interpreter."""
    for client in list(_open_clients):
        client.close()


def taken_text(address: ctypes.c_void_p) -> Any:
    """JSON text of the library's, parsed and freed."""
    try:
        return json.loads(ctypes.string_at(address.value or 0))
    finally:
        library().string_free(address)


def _made_again(kind: type[Client], arguments: dict[str, Any]) -> Client:
    """An unpickled client. One that cannot be made here says so when it is used: a pool whose
    worker cannot unpickle its task would wait for ever."""
    made = kind.__new__(kind)
    made.server, made.timeout = arguments["server"], arguments["timeout"]
    made._arguments = arguments
    try:
        kind.__init__(made, **arguments)
    except Exception as failure:
        Client.close(made)
        made._failure = failure if isinstance(failure, Error) else Error(
            9, f"this {kind.__name__} could not be made again from the arguments of attend.Client: "
               f"{type(failure).__name__}: {failure}; give the class a __reduce__ of its own")
    return made


class Client:
    """Attention from an attend server. Thread-safe. A context manager that closes it.

    server: "HOST:PORT", "HOST" (port 8001), "[IPV6]:PORT" or "unix:PATH". Connects on first use.
        Several servers: IP addresses with commas between them, or a name with several addresses.
        Calls go in turn to those that serve; a session and its calls to one.
    connections: sockets to the server, in [1, 1024]. A large call is sent over all of them.
    tenant: whose share of the server the calls use, unless they name one.
    timeout: seconds that a call may take, retries included, unless it names them; None: no bound.
    attempts: of a call, the first included. UNAVAILABLE, and RESOURCE_EXHAUSTED if the server says
        when, are retried with its pushback or with backoff.
    tls_ca: a PEM file of authorities, or "system" for the system's: TLS over TCP, with a server
        whose certificate is of one of them. tls_cert, tls_key: PEM files to show to a server that
        asks for a certificate. tls_server_name: for whom the server's certificate must be, if not
        for the host of `server`. None: as $ATTEND_TLS_CA, $ATTEND_TLS_CERT, $ATTEND_TLS_KEY and
        $ATTEND_TLS_SERVER_NAME say; "": none.
    shared_memory: whether calls of 64 KiB or more go through memory that is shared with a server
        on this host, if it shares any (--shared-memory); or the path of its socket.
    token, token_file: says who calls, where the server asks (--tokens), itself or as a file's first
        line; None: the environment's ATTEND_TOKEN, if there is one. Without TLS it goes to loopback
        and Unix sockets alone.
    traceparent: the span that makes the calls, streams and sessions that name none, as W3C Trace
        Context writes it, "00-TRACE-SPAN-01".
    Error: an argument is out of bounds.

    A copy, or what comes out of a pickle, is a client of its own that is made from these arguments.
    One that was given `token` is neither copied nor pickled, so that no pickle holds the token."""

    _failure: Error | None = None  # why an unpickled one could not be made
    _handle: ClientHandle | None = None  # None: closed, or not made
    _tenant: str | None = None
    _has_token = False

    def __init__(self, server: str = "127.0.0.1:8001", *, connections: int = 4,
                 tenant: str | None = None, timeout: float | None = None, attempts: int = 5,
                 shared_memory: bool | str = True, token: str | None = None,
                 token_file: str | os.PathLike[str] | None = None,
                 tls_ca: str | None = None, tls_cert: str | None = None,
                 tls_key: str | None = None, tls_server_name: str | None = None,
                 traceparent: str | None = None):
        self._arguments = {name: value for name, value in locals().items()
                           if name not in ("self", "token")}
        self.server, self.timeout = server, timeout
        self._tenant, self._has_token, self._tenants = tenant, bool(token), Tenants()
        self._handle = None
        nanoseconds("timeout", timeout)
        if not (token is None or isinstance(token, str) and "\0" not in token):
            raise invalid("token must be a str without NUL")  # and is in no error
        options = Options(struct_bytes=ctypes.sizeof(Options), server=text("server", server),
                          tenant=optional_text("tenant", tenant),
                          connections=integer("connections", connections, 1, 1024),
                          attempts_max=integer("attempts", attempts, 1, 2**31 - 1),
                          token=optional_text("token", token))
        if token_file is not None:
            options.token_file = text("token_file", os.fspath(token_file))
        options.tls_ca = optional_text("tls_ca", tls_ca)
        options.tls_cert = optional_text("tls_cert", tls_cert)
        options.tls_key = optional_text("tls_key", tls_key)
        options.tls_server_name = optional_text("tls_server_name", tls_server_name)
        options.traceparent = optional_text("traceparent", traceparent)
        options.shared_memory_off = shared_memory is False
        if isinstance(shared_memory, str):
            options.shared_memory_socket = text("shared_memory", shared_memory)
        handle = ctypes.c_void_p()
        check(library().open(ctypes.byref(options), ctypes.byref(handle)))
        self._handle = ClientHandle(handle.value or 0)
        _open_clients.add(self)

    def close(self) -> None:
        """Cancels what is unanswered, and waits until it has ended. Twice is fine. A warning of an
        unknown tenant that is yet to come may take a second of it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            if is_there():  # in a fork there is no thread to wait for
                self._tenants.wait()
            handle.use("shut_down")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_handle") is not None:
            self.close()

    def __repr__(self) -> str:
        return f"attend.Client({self.server!r})"

    def __reduce__(self) -> Any:
        if self._has_token:
            raise TypeError("an attend.Client that was given token is neither copied nor pickled, "
                            "so that no pickle holds the token: give it token_file, or set "
                            "ATTEND_TOKEN")
        return _made_again, (type(self), {**self._arguments, "timeout": self.timeout})

    def _open_handle(self) -> ClientHandle:
        handle = self._handle
        if handle is None:
            failure = self._failure or Error(9, "the client is closed")
            raise Error(failure.code, failure.message)
        return handle

    @Attention.of
    def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """softmax(scale * q k^T, capped, plus bias, minus ALiBi, under the mask) v, exactly.

        q, k, v: float16, bfloat16 or float32, all alike: [B, Hq, Lq, D], [B, Hkv, Lk, D] and
            [B, Hkv, Lk, Dv] for layout "BHLD", heads and rows swapped for "BLHD", [rows, H, D] for
            "LHD". Hq is a multiple of Hkv; D and Dv are 1 to 256. NumPy arrays (bfloat16 is
            ml_dtypes'), torch tensors, or anything with DLPack or __cuda_array_interface__. They
            are sent from where they are if they are C-contiguous, else copied first, and must not
            change until the call has ended. A GPU's are read in the current stream's order.

        Options (those up to `kernel` as attend_kernels.attention has them):
        causal, alignment ("bottom_right", "top_left"), window (left, right), scale, softcap: the
            mask and the scores. With causal, right is 0 whatever it says.
        key_offset, keys_after: k and v are a part of the keys, with so many before and after it,
            as the mask, ALiBi and dropout count them; merge_partial merges the parts' answers.
        bias: [B|1, Hq|1, Lq|1, Lk], leading ones optional, of numbers, or of bool: a mask, True
            keeps the key.
        alibi_slopes [Hq] or [B, Hq]; sinks [Hq].
        q_lengths, kv_lengths: [B] true lengths; rows beyond are ignored, O there is 0.
        cu_seqlens_q, cu_seqlens_k: [B + 1], of "LHD". max_seqlen_q, max_seqlen_k: not needed.
        layout; return_lse; o_dtype "float32"; dropout_p and dropout_seed; kernel: a name from
            server_info(), or "auto".
        check: the server recomputes a sample of rows in double precision; Error if it disagrees,
        not if rows of gradients cannot be judged, of which it warns (Answer.check.undecided).
        priority: in [-100, 100], higher ones first. request_id: for logs, at most 128 bytes.
        timeout: in seconds. tenant, traceparent: as the client's.
        transport: "auto"; "inline", one message; "chunked", over all connections; "shared", or
            an error.

        Returns O in the layout of q with Dv, or (O, LSE float32 [B, Hq, Lq], packed [Hq, rows]) if
        return_lse: NumPy's, torch's or a DeviceArray for DLPack, where q is. In host memory they
        are the memory that the answer was received in, or was written to by the server.
        Error: `code` is gRPC's number, `status` its name; the message names field, value and
        bound."""
        answer = self.submit(q, k, v, **options).result()
        return arrays_of(answer, bool(options.get("return_lse")))

    @named
    def submit(self, q: Array, k: Array, v: Array, **options: Unpack[CallOptions]) -> Call:
        """Starts `attention` and returns the call: `result()` is the Answer, with timings, kernel,
        check and all else that came back. Before the first call of 64 KiB or more it waits for the
        server's limits."""
        return Call(self._attention_plan(q, k, v, options))

    def _plan(self, arguments: Arguments) -> Plan:
        handle = self._open_handle()
        return Plan(arguments, lambda *places: library().start(handle, *places), self,
                    self._after(arguments.a["tenant"]))

    def _after(self, tenant: str | None) -> Callable[[], None] | None:
        """For the end of a call of the tenant's: a warning, if the server is known to have no such
        tenant. The first call of a tenant's asks, in a thread."""
        name = tenant or self._tenant
        return self._tenants.check(name, self.server_info) if name else None

    def _attention_plan(self, q: Array, k: Array, v: Array, options: Any) -> Plan:
        return self._plan(Arguments(q, k, v, options_of("attention", options), self.timeout))

    def _backward_plan(self, d_o: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
                       d_lse: Array, wanted: Wanted, options: Any) -> Plan:
        arguments = Arguments(q, k, v, options_of("backward", options), self.timeout)
        arguments.ask_for_gradients(d_o, o, lse, d_lse, wanted)
        return self._plan(arguments)

    def attention_batch(self, calls: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Several attentions of any shapes, all in flight at once: the server batches them. calls:
        dicts with the arguments of `attention`. Returns its results in order. Error: that of the
        first that failed; the others have ended too."""
        calls = list(calls)
        started: list[Call] = []
        try:
            for call in calls:
                started.append(self.submit(**call))
        except BaseException:
            for each in started:
                each.cancel()
            raise
        finally:
            for each in started:
                each.wait()
        return [arrays_of(call.result(), bool(given.get("return_lse")))
                for call, given in zip(started, calls)]

    @named
    def backward(self, d_o: Array, q: Array, k: Array, v: Array, o: Array = None,
                 lse: Array = None, *, d_lse: Array = None, wanted: Wanted = ("q", "k", "v"),
                 **options: Unpack[CallOptions]) -> tuple[Any, ...]:
        """The gradients of a loss by what went into `attention`, from those by its O and LSE.

        d_o: the loss's gradient by o, in its shape and dtype. d_lse: by lse; None for 0.
        o, lse: what attention(q, k, v, ..., return_lse=True) gave; without them the server computes
            them first. All other arguments as there, and as they were in that call.
        wanted: what to differentiate by: "q", "k", "v", "bias", "sinks"; not by a bias of bool.

        Returns a tuple in the order of `wanted`: of q, k and v in their dtype, of bias and sinks in
        float32; summed over the dimensions that bias broadcasts."""
        wanted = names("wanted", wanted)
        answer = self.submit_backward(d_o, q, k, v, o, lse, d_lse=d_lse, wanted=wanted,
                                      **options).result()
        return gradients_of(answer, wanted)

    @named
    def submit_backward(self, d_o: Array, q: Array, k: Array, v: Array, o: Array = None,
                        lse: Array = None, *, d_lse: Array = None,
                        wanted: Wanted = ("q", "k", "v"), **options: Unpack[CallOptions]) -> Call:
        """Starts `backward`: `result().gradients` has them by name."""
        return Call(self._backward_plan(d_o, q, k, v, o, lse, d_lse, wanted, options))

    def stream(self, *, tenant: str | None = None, timeout: float | None = None,
               traceparent: str | None = None, server: str | None = None) -> Stream:
        """One stream, for many small calls at once, to one server. timeout: of the whole stream, in
        seconds. tenant, traceparent: of all its calls, as the client's. server: of several, the one
        that it goes to, for calls on sessions there."""
        return Stream(self, tenant, timeout, traceparent, server)

    def session(self, heads_kv: int, dim: int, dim_v: int = 0, *, dtype: str = "float32",
                layers: int = 1, device: str = "", lease: float = 0.0, pinned: bool = False,
                tenant: str | None = None, timeout: float = 10.0,
                traceparent: str | None = None, server: str | None = None) -> _session.Session:
        """K and V of a sequence that stay on the server: Session. heads_kv, dim, dim_v (0: dim) and
        dtype are each layer's. device: "cuda:0", "cpu", or "": the server chooses. lease: seconds
        from the last use to the session's end, 0: the server's default. pinned: loses no tokens to
        other sessions. timeout: seconds, of each call that is no attention. tenant, traceparent:
        also of calls on it that name none. server: of several, the one to be on, as Session.server
        has it; None: any that serves."""
        shape = _session.LayerShape(dtype, heads_kv, dim, dim_v)
        return self.session_of([shape], layers=layers, device=device, lease=lease, pinned=pinned,
                               tenant=tenant, timeout=timeout, traceparent=traceparent,
                               server=server)

    def session_of(self, shapes: Iterable[_session.LayerShape], *, layers: int = 0,
                   device: str = "", lease: float = 0.0, pinned: bool = False,
                   tenant: str | None = None, timeout: float = 10.0,
                   traceparent: str | None = None,
                   server: str | None = None) -> _session.Session:
        """`session` with a shape for each layer, or one for all of `layers`."""
        options = _session.options_struct(shapes, layers, device, lease, pinned, tenant, timeout,
                                          traceparent, server)
        made = _session.Session(self, lambda place: library().session_create(
            self._open_handle(), ctypes.byref(options), place), owned=True)
        if (after := self._after(tenant)) is not None:
            after()
        return made

    def open_session(self, session_id: str, shapes: Iterable[_session.LayerShape] = (), *,
                     tenant: str | None = None, timeout: float = 10.0,
                     traceparent: str | None = None) -> _session.Session:
        """A session that was made elsewhere, by its id, which stays there when this object goes.
        Error NOT_FOUND: there is none."""
        options = _session.options_struct(shapes, 0, "", 0.0, False, tenant, timeout, traceparent,
                                          None)
        named = text("session_id", session_id)
        return _session.Session(self, lambda place: library().session_open(
            self._open_handle(), named, ctypes.byref(options), place), owned=False)

    def sessions(self, *, tenant: str | None = None,
                 timeout: float | None = 10.0) -> list[dict[str, Any]]:
        """The tenant's sessions, each as Session.info() has it."""
        json_text = ctypes.c_void_p()
        check(library().session_list(self._open_handle(), optional_text("tenant", tenant),
                                     nanoseconds("timeout", timeout), ctypes.byref(json_text)))
        return taken_text(json_text)["sessions"]

    @named
    def attend_sessions(self, sessions: Iterable[_session.Session], q: Array, k: Array = None,
                        v: Array = None, *, layer: int = 0,
                        **options: Unpack[CallOptions]) -> Any:
        """`Session.attend` for B sequences, each with its session: q, k and v have B of them."""
        answer = Call(_session.plan(list(sessions), q, k, v, layer, options)).result()
        return arrays_of(answer, bool(options.get("return_lse")))

    def server_info(self, *, timeout: float | None = 10.0) -> dict[str, Any]:
        """What the server is, has and allows: GetServerInfoResponse in attention.proto, by its
        names."""
        json_text = ctypes.c_void_p()
        check(library().info(self._open_handle(), nanoseconds("timeout", timeout),
                             ctypes.byref(json_text)))
        return taken_text(json_text)

    def health(self, service: str = "", *, timeout: float | None = 10.0) -> str:
        """"SERVING", "NOT_SERVING" or "UNKNOWN", as grpc.health.v1 has it."""
        health = ctypes.c_int32()
        check(library().health(self._open_handle(), text("service", service),
                               nanoseconds("timeout", timeout), ctypes.byref(health)))
        return _HEALTH[health.value]

    def empty(self, shape: int | Iterable[int], dtype: Any = "float32",
              device: Any = "cpu") -> Any:
        """An array in memory that is shared with a server on this host: calls send nothing of it,
        and copy nothing. Freed with its last view, however long the client is closed.

        device: "cpu": a NumPy array, zero at first, which torch.from_numpy takes as it is.
            "cuda:0" or torch's: a DeviceArray of "float16", "bfloat16" or "float32", not
            initialised, which torch.from_dlpack and cupy.from_dlpack take as it is; also
            __cuda_array_interface__. Answers of calls whose q is there stay where the server wrote
            them. It is the current stream's: what runs on others must be over when it goes.
        Error FAILED_PRECONDITION: the server shares none, or not that GPU's (--cuda-ipc)."""
        shape = tuple(integer("shape", size, 0, 2**63 - 1)
                      for size in (shape if isinstance(shape, Iterable) else (shape,)))
        return _memory.shared_array(self._open_handle(), shape, dtype,
                                    _memory.device_number(device))
