# SPDX-License-Identifier: Apache-2.0
"""attend.Client for asyncio: the same methods, awaited.

    async with attend.aio.Client("host:8001") as client:
        o = await client.attention(q, k, v, causal=True)

Calls run on the client's own threads. Work that may block before a call is in flight (the first
request for the server's limits, copies of large tensors) runs in the loop's executor. Cancelling a
task cancels its call.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping

from attend_kernels._checks import names

from . import _client, _session
from ._call import Answer, Call, Plan, arrays_of, gradients_of
from ._library import NotCopied
from ._options import Array, Attention, CallOptions, SessionAttention, Wanted, as_in, named
from ._session import LayerShape

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Client", "Session", "Stream"]

_LARGE_BYTES = 64 << 10  # from here on a call may ask the server first, and copies take time


async def _elsewhere(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The function's result; it runs in the executor because it may block."""
    bound = functools.partial(function, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(None, bound)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _answer(plan: Plan, may_wait: bool = False) -> Answer:
    """Starts the call and returns its answer."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def ended() -> None:
        try:
            loop.call_soon_threadsafe(_wake, future)
        except RuntimeError:  # the loop is closed: no task is waiting
            pass

    if may_wait or plan.arguments.byte_count >= _LARGE_BYTES:
        call = await _elsewhere(Call, plan, ended)
    else:
        call = Call(plan, ended)
    try:
        await future
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call.result()


class Client:
    """attend.Client for asyncio, with the same arguments. Belongs to one loop at a time. An
    asynchronous context manager that closes it. Copied and pickled like attend.Client."""

    @as_in(_client.Client.__init__)
    def __init__(self, *arguments: Any, **options: Any):
        self._client = _client.Client(*arguments, **options)

    async def close(self) -> None:
        """As Client.close."""
        await _elsewhere(self._client.close)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"attend.aio.Client({self._client.server!r})"

    def __copy__(self) -> Client:
        return copy.deepcopy(self)

    @Attention.awaited
    async def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """As Client.attention."""
        return arrays_of(await self.answer(q, k, v, **options), bool(options.get("return_lse")))

    @named
    async def answer(self, q: Array, k: Array, v: Array,
                     **options: Unpack[CallOptions]) -> Answer:
        """`attention`, but returns the whole Answer, as Client.submit(...).result() does."""
        return await _answer(self._client._attention_plan(q, k, v, options))

    async def attention_batch(self, calls: Iterable[Mapping[str, Any]]) -> list[Any]:
        """As Client.attention_batch."""
        results = await asyncio.gather(*(self.attention(**call) for call in calls),
                                       return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return list(results)

    @named
    async def backward(self, d_o: Array, q: Array, k: Array, v: Array, o: Array = None,
                       lse: Array = None, *, d_lse: Array = None,
                       wanted: Wanted = ("q", "k", "v"),
                       **options: Unpack[CallOptions]) -> tuple[Any, ...]:
        """As Client.backward."""
        wanted = names("wanted", wanted)
        plan = self._client._backward_plan(d_o, q, k, v, o, lse, d_lse, wanted, options)
        return gradients_of(await _answer(plan, may_wait=o is None), wanted)

    @as_in(_client.Client.stream)
    def stream(self, **options: Any) -> Stream:
        """As Client.stream."""
        return Stream(self._client.stream(**options))

    @as_in(_client.Client.session)
    async def session(self, *arguments: Any, **options: Any) -> Session:
        """As Client.session."""
        return Session(await _elsewhere(self._client.session, *arguments, **options))

    @as_in(_client.Client.session_of)
    async def session_of(self, *arguments: Any, **options: Any) -> Session:
        """As Client.session_of."""
        return Session(await _elsewhere(self._client.session_of, *arguments, **options))

    @as_in(_client.Client.open_session)
    async def open_session(self, *arguments: Any, **options: Any) -> Session:
        """As Client.open_session."""
        return Session(await _elsewhere(self._client.open_session, *arguments, **options))

    @as_in(_client.Client.sessions)
    async def sessions(self, **options: Any) -> list[dict[str, Any]]:
        """As Client.sessions."""
        return await _elsewhere(self._client.sessions, **options)

    @named
    async def attend_sessions(self, sessions: Iterable[Session], q: Array, k: Array = None,
                              v: Array = None, *, layer: int = 0,
                              **options: Unpack[CallOptions]) -> Any:
        """As Client.attend_sessions."""
        plan = _session.plan([each._session for each in sessions], q, k, v, layer, options)
        return arrays_of(await _answer(plan), bool(options.get("return_lse")))

    @as_in(_client.Client.server_info)
    async def server_info(self, **options: Any) -> dict[str, Any]:
        """As Client.server_info."""
        return await _elsewhere(self._client.server_info, **options)

    @as_in(_client.Client.health)
    async def health(self, *arguments: Any, **options: Any) -> str:
        """As Client.health."""
        return await _elsewhere(self._client.health, *arguments, **options)

    async def empty(self, shape: int | Iterable[int], dtype: Any = "float32",
                    device: Any = "cpu") -> Any:
        """As Client.empty."""
        return await _elsewhere(self._client.empty, shape, dtype, device)


class Stream(NotCopied):
    """attend.Stream for asyncio. An asynchronous context manager that finishes the stream."""
    _instead = _client.Stream._instead

    def __init__(self, stream: _client.Stream):
        self._stream = stream

    def __repr__(self) -> str:
        return repr(self._stream).replace("attend.", "attend.aio.")

    @Attention.awaited
    async def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """As Client.attention."""
        return arrays_of(await self.answer(q, k, v, **options), bool(options.get("return_lse")))

    @named
    async def answer(self, q: Array, k: Array, v: Array,
                     **options: Unpack[CallOptions]) -> Answer:
        """As aio.Client.answer."""
        return await _answer(self._stream._plan(q, k, v, options))

    async def finish(self) -> None:
        """As Stream.finish."""
        await _elsewhere(self._stream.finish)

    async def close(self) -> None:
        """As Stream.close."""
        await _elsewhere(self._stream.close)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, failure: object, *_: object) -> None:
        try:
            if failure is None:
                await self.finish()
        finally:
            await self.close()


class Session(NotCopied):
    """attend.Session for asyncio. An asynchronous context manager that frees the session."""
    _instead = _session.Session._instead

    def __init__(self, session: _session.Session):
        self._session = session

    def __repr__(self) -> str:
        return repr(self._session).replace("attend.", "attend.aio.")

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def server(self) -> str | None:
        return self._session.server

    @property
    def layers(self) -> int:
        return self._session.layers

    def length(self, layer: int = 0) -> int:
        """As Session.length; does not ask the server."""
        return self._session.length(layer)

    @named
    async def answer(self, q: Array, k: Array = None, v: Array = None, *, layer: int = 0,
                     stream: Stream | None = None, **options: Unpack[CallOptions]) -> Answer:
        """As Session.submit(...).result()."""
        onto = None if stream is None else stream._stream
        return await _answer(_session.plan([self._session], q, k, v, layer, options, onto))

    @SessionAttention.awaited
    async def attend(self, q: Array, k: Array = None, v: Array = None, *, layer: int = 0,
                     **options: Any) -> Any:
        """As Session.attend."""
        answer = await self.answer(q, k, v, layer=layer, **options)
        return arrays_of(answer, bool(options.get("return_lse")))

    async def decode(self, q: Array, k: Array, v: Array, *, layer: int = 0,
                     **options: Unpack[CallOptions]) -> Any:
        """As Session.decode."""
        options.setdefault("causal", True)
        return await self.attend(q, k, v, layer=layer, **options)

    @named
    async def append(self, k: Array, v: Array, *, layer: int = 0,
                     **options: Unpack[CallOptions]) -> None:
        """As Session.append."""
        none = _session.no_rows(k, options.get("layout", "BHLD"))
        await self.answer(none, k, v, layer=layer, **options)

    async def fork(self, length: int | None = None) -> Session:
        """As Session.fork."""
        return Session(await _elsewhere(self._session.fork, length))

    async def truncate(self, length: int) -> None:
        """As Session.truncate."""
        await _elsewhere(self._session.truncate, length)

    async def keep_draft(self, length: int, kept: Iterable[int]) -> None:
        """As Session.keep_draft."""
        await _elsewhere(self._session.keep_draft, length, list(kept))

    async def keep_alive(self) -> None:
        """As Session.keep_alive."""
        await _elsewhere(self._session.keep_alive)

    async def info(self) -> dict[str, Any]:
        """As Session.info."""
        return await _elsewhere(self._session.info)

    async def free(self) -> None:
        """As Session.free."""
        await _elsewhere(self._session.free)

    def release(self) -> str:
        """As Session.release."""
        return self._session.release()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _elsewhere(self._session.__exit__)


named(Session.decode, causal=True)
