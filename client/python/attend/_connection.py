# SPDX-License-Identifier: Apache-2.0
"""Which server computes: that of the innermost `connect` block of this thread or task, else of one
that is for all threads."""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING, Any, Iterator, overload

from attend_kernels import Error

from ._client import Client
from ._options import ClientOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_current: contextvars.ContextVar[Client | None] = contextvars.ContextVar("attend_connection")
# The last one's client is for threads and tasks without their own.
_for_all: list[tuple[object, Client | None]] = [(None, None)]


def connected() -> Client | None:
    """The client whose server computes what attend's functions are given here and now. None: they
    compute in this process."""
    return _current.get(_for_all[-1][1])


def required() -> Client:
    """The connected client. Error FAILED_PRECONDITION: there is none."""
    client = connected()
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
def connect(server: None, *,
            all_threads: bool = False) -> contextlib.AbstractContextManager[None]: ...


@overload
def connect(server: str | Client = "127.0.0.1:8001", *, all_threads: bool = False,
            **options: Unpack[ClientOptions]) -> contextlib.AbstractContextManager[Client]: ...


@contextlib.contextmanager
def connect(server: str | Client | None = "127.0.0.1:8001", *, all_threads: bool = False,
            **options: Any) -> Iterator[Any]:
    """Inside, attend's functions are computed by a server:

        with attend.connect("gpu-host:8001") as client:
            o = attend.torch.scaled_dot_product_attention(q, k, v)

    server: an address as Client takes it, with Client's options, closed at the end; a Client, which
    stays open; or None: in process again, within another block. The innermost block of a thread or
    an asyncio task counts. A new thread begins without one, unless all_threads: then the block
    counts in every thread and task that has none of its own, until it ends. attend.connected()
    says which client it is. backward() runs where its forward pass did: call it within the block,
    or connect to a Client that is still open."""
    with contextlib.ExitStack() as stack:
        if not isinstance(server, (Client, type(None))):
            client: Client | None = stack.enter_context(Client(server, **options))
        elif options:
            raise TypeError(f"connect has no argument {sorted(options)[0]!r} without an address")
        else:
            client = server
        stack.enter_context(use(client))
        if all_threads:
            entry = object(), client  # blocks of several threads end in any order
            _for_all.append(entry)
            stack.callback(_for_all.remove, entry)
        yield client
