# SPDX-License-Identifier: Apache-2.0
"""Sessions: K and V of a sequence, kept on the server."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import TYPE_CHECKING, Any, Callable, Iterable

from attend_kernels import Error
from attend_kernels._checks import integer, one_of, optional_text, real, text
from attend_kernels._library import NotCopied, invalid
from attend_kernels._printable import printable

from ._arguments import Arguments, options_of
from ._call import Call, Plan, arrays_of
from ._library import (DTYPES, LayerShapeStruct, SessionHandle, SessionOptions, check, library,
                       nanoseconds)
from ._options import Array, CallOptions, SessionAttention, named

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._client import Client
    from ._stream import Stream


_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Shape of a layer's K, [heads_kv, tokens, dim], and V, [heads_kv, tokens, dim_v]. dtype:
    "float16", "bfloat16" or "float32". dim_v 0: dim."""
    dtype: str
    heads_kv: int
    dim: int
    dim_v: int = 0


def options_struct(shapes: Iterable[LayerShape], layers: int, device: str, lease: float,
                   pinned: bool, tenant: str | None, timeout: float,
                   traceparent: str | None, server: str | None) -> SessionOptions:
    """attend_client_session_options."""
    shapes = list(shapes)
    structs = (LayerShapeStruct * len(shapes))(
        *[LayerShapeStruct(one_of("dtype", shape.dtype, DTYPES), 0,
                           integer("heads_kv", shape.heads_kv, 1, _INT64_MAX),
                           integer("dim", shape.dim, 1, _INT64_MAX),
                           integer("dim_v", shape.dim_v, 0, _INT64_MAX)) for shape in shapes])
    return SessionOptions(ctypes.sizeof(SessionOptions), structs, len(shapes),
                          integer("layers", layers, 0, _INT32_MAX), bool(pinned),
                          text("device", device) or None, optional_text("tenant", tenant),
                          real("lease", lease), nanoseconds("timeout", timeout),
                          optional_text("traceparent", traceparent),
                          optional_text("server", server))


def plan(sessions: list[Session], q: Array, k: Array, v: Array, layer: int, options: Any,
         stream: Stream | None = None) -> Plan:
    """The plan of an attention over a layer of B sessions."""
    if not sessions:
        raise Error(3, "sessions has 0 entries, must have at least 1")
    client = sessions[0]._client
    for other in (*sessions, *(() if stream is None else (stream,))):
        if other._client is not client:
            raise invalid(f"the {type(other).__name__.lower()} is of {other._client}, must be of "
                          f"sessions[0]'s client, {client}")
    layer = integer("layer", layer, 0, _INT32_MAX)
    client._open_handle()
    arguments = Arguments(q, k, v, options_of("attend", options), client.timeout)
    handles = [each._open_handle() for each in sessions]
    onto = None if stream is None else stream._open_handle()

    def start(*places: Any) -> int:
        addresses = (ctypes.c_void_p * len(handles))(*handles)
        return library().session_start(addresses, len(handles), layer, onto, *places)

    return Plan(arguments, start, (sessions, stream), client._after(arguments.a["tenant"]))


def no_rows(k: Array, layout: str) -> Array:
    """A q without rows, made from k, for a call that only appends."""
    dimensions = len(getattr(k, "shape", ()))
    if dimensions != 4:
        raise invalid(f"k has {dimensions} dimensions, must have 4")
    rows = 1 if layout == "BLHD" else 2
    return k[tuple(slice(0, 0) if axis == rows else slice(None) for axis in range(4))]


class Session(NotCopied):
    """The KV cache of one sequence on the server, made by Client.session. Tracks the length of each
    layer, and never appends twice when the client retries. One call at a time per layer. A context
    manager that frees the session, as does dropping the last reference."""
    _instead = ("fork() makes another one with its tokens; for another process, release() it here "
                "and Client.open_session(id) it there")

    def __init__(self, client: Client, make: Callable[[Any], int], owned: bool):
        self._client = client
        self._owned = owned
        self._handle: SessionHandle | None = None
        handle = ctypes.c_void_p()
        check(make(ctypes.byref(handle)))
        self._handle = SessionHandle(handle.value or 0)

    def _own_handle(self) -> SessionHandle:
        handle = self._handle
        if handle is None:
            raise Error(9, "the session is freed")
        return handle

    def _open_handle(self) -> SessionHandle:
        """The handle, for functions that ask the server."""
        self._client._open_handle()
        return self._own_handle()

    def __repr__(self) -> str:
        if self._handle is None:
            return f"<attend.Session, freed, of {self._client}>"
        try:
            lengths = sorted({self.length(layer) for layer in range(self.layers)})
            tokens = " to ".join(map(str, [lengths[0], *lengths[1:][-1:]]))
            return (f"<attend.Session {printable(self.id)} of {self._client}, "
                    f"layers: {self.layers}, tokens: {tokens}>")
        except Error:
            return f"<attend.Session of {self._client}, which another process made>"

    @property
    def id(self) -> str:
        """32 hexadecimal digits, followed by @HOST:PORT if the client has several servers; for
        Client.open_session."""
        return library().session_id(self._own_handle()).decode()

    @property
    def server(self) -> str | None:
        """With several servers, this session's server, for Client.session and Client.stream; else
        None."""
        return self.id.partition("@")[2] or None

    @property
    def layers(self) -> int:
        return library().session_layers(self._own_handle())

    def length(self, layer: int = 0) -> int:
        """Tokens of the layer as of the last answer. Error: there is no such layer."""
        length = library().session_length(self._own_handle(),
                                          integer("layer", layer, 0, _INT32_MAX))
        if length < 0:
            raise Error(3, f"layer is {layer}, must be in [0, {self.layers - 1}]")
        return length

    @SessionAttention.of
    def attend(self, q: Array, k: Array = None, v: Array = None, *, layer: int = 0,
               **options: Any) -> Any:
        """Attention over a layer's tokens. q: [1, Hq, Lq, D] (layout "BLHD": [1, Lq, Hq, D]). k and
        v: the rows to append before q reads them, [1, Hkv, n, D] and [1, Hkv, n, Dv], or None.
        Options and results are those of Client.attention, except layout "LHD", kv_lengths and
        dropout.

        All rows are appended or none. After Error OUT_OF_RANGE (tokens were evicted: append again
        from length() on) and FAILED_PRECONDITION (another client appended or truncated) length() is
        up to date."""
        answer = self.submit(q, k, v, layer=layer, **options).result()
        return arrays_of(answer, bool(options.get("return_lse")))

    def decode(self, q: Array, k: Array, v: Array, *, layer: int = 0,
               **options: Unpack[CallOptions]) -> Any:
        """`attend` with causal=True: each new row of q reads the rows before it and its own."""
        options.setdefault("causal", True)
        return self.attend(q, k, v, layer=layer, **options)

    @named
    def append(self, k: Array, v: Array, *, layer: int = 0,
               **options: Unpack[CallOptions]) -> None:
        """Appends rows, [1, Hkv, n, D] and [1, Hkv, n, Dv], without a query."""
        none = no_rows(k, options.get("layout", "BHLD"))
        self.submit(none, k, v, layer=layer, **options).result()

    @named
    def submit(self, q: Array, k: Array = None, v: Array = None, *, layer: int = 0,
               stream: Stream | None = None, **options: Unpack[CallOptions]) -> Call:
        """Starts `attend` and returns the call; on `stream` if one is given."""
        return Call(plan([self], q, k, v, layer, options, stream))

    def fork(self, length: int | None = None) -> Session:
        """Another session with the same first `length` tokens, or all. Full pages are shared on the
        server. Error OUT_OF_RANGE: a layer has fewer. FAILED_PRECONDITION: no length, and the
        layers differ in length."""
        handle = self._open_handle()
        tokens = -1 if length is None else integer("length", length, 0, _INT64_MAX)
        return Session(self._client, lambda place: library().session_fork(handle, tokens, place),
                       owned=True)

    def truncate(self, length: int) -> None:
        """Cuts layers longer than `length` to that length."""
        check(library().session_truncate(self._open_handle(),
                                         integer("length", length, 0, _INT64_MAX)))

    def keep_draft(self, length: int, kept: Iterable[int]) -> None:
        """Keeps some tokens of a draft in all layers. length: the tokens before it; what follows
        them, at most 1024, is the draft. kept: the indices, in ascending order and counted from 0,
        of its tokens that stay. They move up to follow the first `length` tokens, the rest is
        removed, and nothing is sent again."""
        indices = [integer("kept", index, 0, _INT64_MAX) for index in kept]
        check(library().session_keep_draft(self._open_handle(),
                                           integer("length", length, 0, _INT64_MAX),
                                           (ctypes.c_int64 * len(indices))(*indices), len(indices)))

    def keep_alive(self) -> None:
        """Renews the lease, as every use does."""
        check(library().session_keep_alive(self._open_handle()))

    def info(self) -> dict[str, Any]:
        """The session's state: Session in session.proto, with its field names. Updates the
        lengths."""
        from ._client import taken_text
        json_text = ctypes.c_void_p()
        check(library().session_get(self._open_handle(), ctypes.byref(json_text)))
        return taken_text(json_text)

    def free(self) -> None:
        """Ends the session on the server, even one opened by its id."""
        handle = self._open_handle()
        try:
            check(library().session_end(handle))
        finally:
            self._handle = None

    def release(self) -> str:
        """Leaves the session on the server until its lease ends. Returns its id."""
        session_id = self.id
        self._own_handle().keep()
        self._handle = None
        return session_id

    def _leave(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None and (not self._owned or self._client._handle is None):
            handle.keep()  # a closed client cannot free it; its lease ends it

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def __del__(self) -> None:
        if self.__dict__.get("_handle") is not None:
            self._leave()


named(Session.decode, causal=True)
