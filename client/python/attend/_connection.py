# SPDX-License-Identifier: Apache-2.0
"""Which server computes: that of the innermost `connect` block of this thread or task."""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any, Iterator, overload

from attend_kernels import Error

from ._client import Client

_current: contextvars.ContextVar[Client | None] = contextvars.ContextVar("attend_connection",
                                                                         default=None)


def current() -> Client | None:
    """The connected client, or None: attention is computed in process."""
    return _current.get()


def required() -> Client:
    """The connected client. Error FAILED_PRECONDITION: there is none."""
    client = _current.get()
    if client is None:
        raise Error(9, "no server is connected: call within `with attend.connect(...)`")
    return client


@contextlib.contextmanager
def use(client: Client | None) -> Iterator[Client | None]:
    """Inside, `client` is the connected one, or none is."""
    token = _current.set(client)
    try:
        yield client
    finally:
        _current.reset(token)


@overload
def connect(server: None) -> contextlib.AbstractContextManager[None]: ...


@overload
def connect(server: str | Client = "127.0.0.1:8001",
            **options: Any) -> contextlib.AbstractContextManager[Client]: ...


@contextlib.contextmanager
def connect(server: str | Client | None = "127.0.0.1:8001",
            **options: Any) -> Iterator[Any]:
    """Inside, attend's functions are computed by a server:

        with attend.connect("gpu-host:8001") as client:
            o = attend.torch.scaled_dot_product_attention(q, k, v)

    server: an address as Client takes it, with Client's options, closed at the end; a Client, which
    stays open; or None: in process again, within another block. The innermost block of a thread or
    an asyncio task counts. A new thread begins without one. backward() runs where its forward pass
    did: call it within the block, or connect to a Client that is still open."""
    if server is None or isinstance(server, Client):
        if options:
            raise TypeError(f"connect has no argument {sorted(options)[0]!r} without an address")
        with use(server):
            yield server
        return
    with Client(server, **options) as client, use(client):
        yield client
