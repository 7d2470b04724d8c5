# SPDX-License-Identifier: Apache-2.0
"""The connected server: that of the innermost `connect` block of this thread or task, else of a
block for all threads."""

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
# The last entry's client serves threads and tasks without a block of their own.
_for_all: list[tuple[object, Client | None]] = [(None, None)]


def connected() -> Client | None:
    """The client whose server computes attend's functions here and now. None: this process computes
    them."""
    return _current.get(_for_all[-1][1])


def required() -> Client:
    """The connected client. Error FAILED_PRECONDITION: there is none."""
    client = connected()
    if client is None:
        raise Error(9, "no server is connected: call within `with attend.connect(...)`")
    return client


@contextlib.contextmanager
def use(client: Client | None) -> Iterator[Client | None]:
    """Inside the block, `client` is the connected one; None: none is."""
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
    """Inside the block, a server computes attend's functions:

        with attend.connect("gpu-host:8001") as client:
            o = attend.torch.scaled_dot_product_attention(q, k, v)

    server: an address as for Client, with Client's options; its client is closed at the end. Or a
    Client, which stays open. Or None: in process again, within another block. The innermost block
    of a thread or asyncio task counts. A new thread starts without one, unless all_threads is set:
    then the block, until it ends, counts in every thread and task without a block of its own.
    attend.connected() returns the client. backward() runs where its forward pass ran: call it
    within the block, or connect to a Client that is still open."""
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
