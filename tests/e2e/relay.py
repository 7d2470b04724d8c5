# SPDX-License-Identifier: Apache-2.0
"""A relay between clients and a server that disturbs their connections as networks do."""

import asyncio
import contextlib
import random
import socket
import struct
import threading

_PIECE_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


class _Connection:
    """The two halves of one connection."""

    def __init__(self, client, server):
        self.writers = [client, server]  # to the client, to the server
        self.halves = []                 # tasks

    def reset(self, which=(0, 1)):
        for i in which:
            peer = self.writers[i].get_extra_info("socket")
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.writers[i].transport.abort()


class Relay:
    """Listens on `address`, a port of 127.0.0.1, and forwards bytes to the server's HOST:PORT or
    unix:PATH. Its faults apply to all connections, from whichever thread they are set."""

    def __init__(self, server):
        self._server = server
        self._connections = set()
        self._loop = asyncio.new_event_loop()
        self._delay = 0.0
        self._jitter = random.Random(0)
        self._passes = asyncio.Event()
        self._passes.set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self._listener.sockets[0].getsockname()[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # The faults.

    def delay(self, seconds):
        """Forwards a random part of each piece, up to all of it; all bytes arrive, in order."""
        self._delay = seconds

    def stall(self):
        """Forwards nothing and reports nothing; connections are accepted."""
        self._soon(self._passes.clear)

    def resume(self):
        self._soon(self._passes.set)

    def reset(self):
        """All connections, on both sides."""
        self._soon(lambda: [each.reset() for each in list(self._connections)])

    def half_open(self):
        """Simulates clients that are gone without the server being told: nothing arrives from them
        any more, until forget()."""
        def leave():
            for each in self._connections:
                for half in each.halves:
                    half.cancel()
                each.reset((0,))
        self._soon(leave)

    def forget(self):
        """Drops the connections of half_open()."""
        self.reset()

    def connections(self):
        return len(self._connections)

    # The rest runs in the loop's thread.

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def _soon(self, function):
        async def call():
            function()
        self._do(call())

    async def _close(self):
        self._listener.close()
        for each in list(self._connections):
            each.reset()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        try:
            if self._server.startswith("unix:"):
                upstream = await asyncio.open_unix_connection(self._server.removeprefix("unix:"))
            else:
                upstream = await asyncio.open_connection(*self._server.rsplit(":", 1))
        except OSError:
            writer.transport.abort()
            return
        each = _Connection(writer, upstream[1])
        each.halves = [asyncio.ensure_future(self._pass(reader, upstream[1])),
                       asyncio.ensure_future(self._pass(upstream[0], writer))]
        self._connections.add(each)
        try:
            await asyncio.gather(*each.halves)
            each.reset()
        except OSError:
            each.reset()
        except asyncio.CancelledError:  # half open, or the relay ends
            with contextlib.suppress(asyncio.CancelledError):
                while not upstream[1].is_closing():
                    await asyncio.sleep(0.05)
        finally:
            self._connections.discard(each)

    async def _pass(self, reader, writer):
        while data := await reader.read(_PIECE_BYTES):
            if self._delay:
                await asyncio.sleep(self._jitter.uniform(0, self._delay))
            await self._passes.wait()
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
