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
    """Closes all clients: gRPC's threads must not outlive the interpreter."""
    for client in list(_open_clients):
        client.close()


def taken_text(address: ctypes.c_void_p) -> Any:
    """Parses and frees a JSON text of the library."""
    try:
        return json.loads(ctypes.string_at(address.value or 0))
    finally:
        library().string_free(address)


def _made_again(kind: type[Client], arguments: dict[str, Any]) -> Client:
    """Unpickles a client. If it cannot be made here, the failure is raised on first use, because a
    process pool whose worker fails to unpickle a task would wait forever."""
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
        Several servers: comma-separated IP addresses, or a name with several addresses. Calls go in
        turn to those that serve; a session and its calls go to one.
    connections: sockets to the server, in [1, 1024]. A large call is sent over all of them.
    tenant: the tenant of calls that set none.
    timeout: seconds that a call may take, retries included, if it sets none; None: no limit.
    attempts: per call, the first included. UNAVAILABLE, and RESOURCE_EXHAUSTED with a pushback time
        from the server, are retried, with that pushback or with backoff.
    tls_ca: a PEM file of authorities, or "system" for the system's: TLS over TCP, to a server whose
        certificate is from one of them. tls_cert, tls_key: PEM files of the client's certificate,
        for a server that requires one. tls_server_name: the name that the server's certificate must
        have, if not the host of `server`. None: the value of $ATTEND_TLS_CA, $ATTEND_TLS_CERT,
        $ATTEND_TLS_KEY or $ATTEND_TLS_SERVER_NAME; "": none.
    shared_memory: whether calls of 64 KiB or more use memory shared with a server on this host, if
        it shares any (--shared-memory); or the path of its socket.
    token, token_file: the caller's credential, for servers with --tokens, itself or in a file's
        first line; None: the environment's ATTEND_TOKEN, if set. Without TLS it is sent to loopback
        and Unix sockets only.
    traceparent: the span of calls, streams and sessions that set none, in W3C Trace Context's form,
        "00-TRACE-SPAN-01".
    Error: an argument is out of bounds.

    A copied or unpickled client is a new client made from the same arguments. A client that was
    given `token` refuses both, so that no pickle contains the token."""

    _failure: Error | None = None  # why an unpickled client could not be made
    _handle: ClientHandle | None = None  # None: closed, or could not be made
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
            raise invalid("token must be a str without NUL")  # the error does not contain it
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
        """Cancels unanswered calls, and waits until they have ended. May be called twice. Waits up
        to a second for a pending warning about an unknown tenant."""
        handle, self._handle = self._handle, None
        if handle is not None:
            if is_there():  # a forked child has no thread to wait for
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

        q, k, v: float16, bfloat16 or float32, all of one dtype: [B, Hq, Lq, D], [B, Hkv, Lk, D] and
            [B, Hkv, Lk, Dv] for layout "BHLD", heads and rows swapped for "BLHD", [rows, H, D] for
            "LHD". Hq is a multiple of Hkv; D and Dv are 1 to 256. NumPy arrays (bfloat16 is
            ml_dtypes'), torch tensors, or anything with DLPack or __cuda_array_interface__.
            C-contiguous ones are sent without a copy, others are copied first; they must not change
            until the call has ended. GPU tensors are read in the current stream's order.

        Options (those up to `kernel` as in attend_kernels.attention):
        causal, alignment ("bottom_right", "top_left"), window (left, right), scale, softcap: the
            mask and the scores. With causal, right counts as 0.
        key_offset, keys_after: if k and v are a part of the keys, the number of keys before and
            after it; mask, ALiBi and dropout use key positions in the whole. merge_partial merges
            the parts' answers.
        bias: [B|1, Hq|1, Lq|1, Lk], leading dimensions optional; numeric, or bool: a mask, where
            True keeps the key.
        tree: bool [B|1, T, T], in place of a bias: the mask of a draft of T tokens, each sequence's
            last queries and keys. tree_from_parents makes it. tree_lengths: [B] tokens of each
            draft, if not all have T.
        alibi_slopes [Hq] or [B, Hq]; sinks [Hq].
        q_lengths, kv_lengths: [B] true lengths; rows beyond are ignored, and their O is 0.
        cu_seqlens_q, cu_seqlens_k: [B + 1], for "LHD". max_seqlen_q, max_seqlen_k: ignored.
        layout; return_lse; o_dtype "float32"; dropout_p and dropout_seed; kernel: a name from
            server_info(), or "auto".
        check: the server recomputes a sample of rows in double precision. Error if it disagrees;
            only a warning if rows of gradients cannot be judged (Answer.check.undecided).
        priority: in [-100, 100], higher first. request_id: for logs, at most 128 bytes.
        timeout: in seconds. tenant, traceparent: as the client's.
        transport: "auto"; "inline", one message; "chunked", over all connections; "shared", which
            fails without shared memory.

        Returns O in the layout of q with Dv, or (O, LSE float32 [B, Hq, Lq], packed [Hq, rows]) if
        return_lse: NumPy arrays, torch tensors or a DeviceArray for DLPack, on q's device. In host
        memory they are the memory into which the answer was received, or the server wrote it.
        Error: `code` is gRPC's number, `status` its name; the message names field, value and
        bound."""
        answer = self.submit(q, k, v, **options).result()
        return arrays_of(answer, bool(options.get("return_lse")))

    @named
    def submit(self, q: Array, k: Array, v: Array, **options: Unpack[CallOptions]) -> Call:
        """Starts `attention` and returns the call: `result()` is the Answer, with timings, kernel,
        check and the other fields. Before the first call of 64 KiB or more it waits for the
        server's limits."""
        return Call(self._attention_plan(q, k, v, options))

    def _plan(self, arguments: Arguments) -> Plan:
        handle = self._open_handle()
        return Plan(arguments, lambda *places: library().start(handle, *places), self,
                    self._after(arguments.a["tenant"]))

    def _after(self, tenant: str | None) -> Callable[[], None] | None:
        """A function to run after a call of the tenant: it warns if the server has no such tenant.
        The tenant's first call starts a thread that asks the server."""
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
        """Several attentions of any shapes, all in flight at once, so that the server can batch
        them. calls: dicts with the arguments of `attention`. Returns the results in order. Error:
        that of the first failed call; the others have ended too."""
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
        """Gradients of a loss with respect to the inputs of `attention`.

        d_o: the loss's gradient with respect to O, in its shape and dtype. d_lse: with respect to
            LSE; None: 0.
        o, lse: the results of attention(q, k, v, ..., return_lse=True); without them the server
            computes them first. All other arguments as in that call.
        wanted: the inputs to differentiate by: "q", "k", "v", "bias", "sinks"; not a bool bias.

        Returns a tuple in the order of `wanted`: q's, k's and v's in their dtype, bias's and sinks'
        in float32; summed over the dimensions that bias broadcasts."""
        wanted = names("wanted", wanted)
        answer = self.submit_backward(d_o, q, k, v, o, lse, d_lse=d_lse, wanted=wanted,
                                      **options).result()
        return gradients_of(answer, wanted)

    @named
    def submit_backward(self, d_o: Array, q: Array, k: Array, v: Array, o: Array = None,
                        lse: Array = None, *, d_lse: Array = None,
                        wanted: Wanted = ("q", "k", "v"), **options: Unpack[CallOptions]) -> Call:
        """Starts `backward`; `result().gradients` has the gradients by name."""
        return Call(self._backward_plan(d_o, q, k, v, o, lse, d_lse, wanted, options))

    def stream(self, *, tenant: str | None = None, timeout: float | None = None,
               traceparent: str | None = None, server: str | None = None) -> Stream:
        """A stream for many small calls at once, to one server. timeout: of the whole stream, in
        seconds. tenant, traceparent: of all its calls, as the client's. server: with several
        servers, the one to use, as for calls on sessions there."""
        return Stream(self, tenant, timeout, traceparent, server)

    def session(self, heads_kv: int, dim: int, dim_v: int = 0, *, dtype: str = "float32",
                layers: int = 1, device: str = "", lease: float = 0.0, pinned: bool = False,
                tenant: str | None = None, timeout: float = 10.0,
                traceparent: str | None = None, server: str | None = None) -> _session.Session:
        """Makes a session: K and V of a sequence, kept on the server. heads_kv, dim, dim_v (0: dim)
        and dtype are those of every layer. device: "cuda:0", "cpu", or "": the server chooses.
        lease: seconds from the last use to the session's end, 0: the server's default. pinned: its
        tokens are not evicted for other sessions. timeout: seconds, of each call but attention.
        tenant, traceparent: also of its calls that set none. server: with several servers, the one
        to use, as Session.server returns it; None: any that serves."""
        shape = _session.LayerShape(dtype, heads_kv, dim, dim_v)
        return self.session_of([shape], layers=layers, device=device, lease=lease, pinned=pinned,
                               tenant=tenant, timeout=timeout, traceparent=traceparent,
                               server=server)

    def session_of(self, shapes: Iterable[_session.LayerShape], *, layers: int = 0,
                   device: str = "", lease: float = 0.0, pinned: bool = False,
                   tenant: str | None = None, timeout: float = 10.0,
                   traceparent: str | None = None,
                   server: str | None = None) -> _session.Session:
        """`session` with one shape per layer, or one for all of `layers`."""
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
        """Opens an existing session by its id; it is not freed with this object. Error NOT_FOUND:
        no such session."""
        options = _session.options_struct(shapes, 0, "", 0.0, False, tenant, timeout, traceparent,
                                          None)
        named = text("session_id", session_id)
        return _session.Session(self, lambda place: library().session_open(
            self._open_handle(), named, ctypes.byref(options), place), owned=False)

    def sessions(self, *, tenant: str | None = None,
                 timeout: float | None = 10.0) -> list[dict[str, Any]]:
        """The tenant's sessions, each as Session.info() returns it."""
        json_text = ctypes.c_void_p()
        check(library().session_list(self._open_handle(), optional_text("tenant", tenant),
                                     nanoseconds("timeout", timeout), ctypes.byref(json_text)))
        return taken_text(json_text)["sessions"]

    @named
    def attend_sessions(self, sessions: Iterable[_session.Session], q: Array, k: Array = None,
                        v: Array = None, *, layer: int = 0,
                        **options: Unpack[CallOptions]) -> Any:
        """`Session.attend` for B sequences, with one session each; q, k and v have batch size B."""
        answer = Call(_session.plan(list(sessions), q, k, v, layer, options)).result()
        return arrays_of(answer, bool(options.get("return_lse")))

    def server_info(self, *, timeout: float | None = 10.0) -> dict[str, Any]:
        """Version, devices, kernels and limits of the server: GetServerInfoResponse in
        attention.proto, with its field names."""
        json_text = ctypes.c_void_p()
        check(library().info(self._open_handle(), nanoseconds("timeout", timeout),
                             ctypes.byref(json_text)))
        return taken_text(json_text)

    def health(self, service: str = "", *, timeout: float | None = 10.0) -> str:
        """Returns "SERVING", "NOT_SERVING" or "UNKNOWN", as in grpc.health.v1."""
        health = ctypes.c_int32()
        check(library().health(self._open_handle(), text("service", service),
                               nanoseconds("timeout", timeout), ctypes.byref(health)))
        return _HEALTH[health.value]

    def empty(self, shape: int | Iterable[int], dtype: Any = "float32",
              device: Any = "cpu") -> Any:
        """An array in memory shared with a server on this host: calls neither send nor copy it.
        Freed with its last view, even long after the client was closed.

        device: "cpu": a NumPy array, zeroed, which torch.from_numpy takes without a copy. "cuda:0"
            or a torch device: a DeviceArray of "float16", "bfloat16" or "float32", uninitialised,
            which torch.from_dlpack and cupy.from_dlpack take without a copy; it has
            __cuda_array_interface__ too. Answers of calls whose q is there stay where the server
            wrote them. It belongs to the current stream: work on other streams must have ended
            before it is freed.
        Error FAILED_PRECONDITION: the server shares no memory, or not that GPU's (--cuda-ipc)."""
        shape = tuple(integer("shape", size, 0, 2**63 - 1)
                      for size in (shape if isinstance(shape, Iterable) else (shape,)))
        return _memory.shared_array(self._open_handle(), shape, dtype,
                                    _memory.device_number(device))
