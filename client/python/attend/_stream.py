# SPDX-License-Identifier: Apache-2.0
"""Many calls on one AttendStream."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from attend_kernels import Error
from attend_kernels._checks import optional_text
from attend_kernels._library import NotCopied

from ._arguments import Arguments, options_of
from ._call import Call, Plan, arrays_of
from ._library import StreamHandle, check, library, nanoseconds
from ._options import Array, Attention, CallOptions, named

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._client import Client


class Stream(NotCopied):
    """One AttendStream: many calls in flight on one connection, answered in any order. A failed
    call fails alone. No retries. A context manager that finishes the stream."""
    _instead = "open another by Client.stream"

    def __init__(self, client: Client, tenant: str | None, timeout: float | None,
                 traceparent: str | None, server: str | None):
        self._client, self._tenant = client, tenant
        handle = ctypes.c_void_p()
        self._handle: StreamHandle | None = None
        check(library().stream_open(client._open_handle(), optional_text("tenant", tenant),
                                    optional_text("traceparent", traceparent),
                                    optional_text("server", server),
                                    nanoseconds("timeout", timeout), ctypes.byref(handle)))
        self._handle = StreamHandle(handle.value or 0)

    def __repr__(self) -> str:
        return f"<attend.Stream{', closed' if self._handle is None else ''} of {self._client}>"

    def _open_handle(self) -> StreamHandle:
        self._client._open_handle()
        handle = self._handle
        if handle is None:
            raise Error(9, "the stream is closed")
        return handle

    @named
    def submit(self, q: Array, k: Array, v: Array, **options: Unpack[CallOptions]) -> Call:
        """As Client.submit; timeout, tenant, traceparent and transport are the stream's."""
        return Call(self._plan(q, k, v, options))

    def _plan(self, q: Array, k: Array, v: Array, options: Any) -> Plan:
        handle = self._open_handle()
        arguments = Arguments(q, k, v, options_of("attention", options))
        return Plan(arguments, lambda *places: library().stream_start(handle, *places), self,
                    self._client._after(self._tenant))

    @Attention.of
    def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """As Client.attention."""
        answer = self.submit(q, k, v, **options).result()
        return arrays_of(answer, bool(options.get("return_lse")))

    def finish(self) -> None:
        """Half-closes the stream and waits until all calls are answered. Error: the stream
        failed."""
        check(library().stream_finish(self._open_handle()))

    def close(self) -> None:
        """Cancels unanswered calls. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.use("stream_cancel")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        try:
            if failure is None:
                self.finish()
        finally:
            self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_handle") is not None:
            self.close()
