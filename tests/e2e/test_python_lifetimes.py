# SPDX-License-Identifier: Apache-2.0
"""Lifetimes of attend.Client's objects: calls in cycles, closing during calls, memory that outlives
its client, forks, and the interpreter's exit. Tests that might crash run in separate processes."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import attend
import numpy as np
import pytest

import harness

pytestmark = pytest.mark.usefixtures("libraries")

SECONDS_MAX = 60  # of a process


@pytest.fixture(scope="module")
def server(shared_server):
    return shared_server


def long_call():
    """Takes some seconds."""
    return [np.ones((1, 8, 4096, 64), np.float32) for _ in range(3)]


def still_works(client):
    x = np.ones((1, 2, 3, 8), np.float32)
    assert np.array_equal(client.attention(x, x, x), x)


def run(server, script, *more):
    """Runs the script in a separate process with `address` and the arrays x (small), large (1 MiB)
    and long."""
    begin = f"""
import faulthandler, gc, os, sys, threading, time
faulthandler.enable()
sys.path[:0] = {sys.path!r}
import attend, numpy as np
address = sys.argv[1]
x, large, long = (np.ones((1, 8, rows, 64), np.float32) for rows in (1, 512, 4096))
"""
    done = subprocess.run([sys.executable, "-c", begin + script, server.address, *map(str, more)],
                          capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert done.stderr == "", done.stderr
    return done.stdout


def test_a_call_in_a_cycle_is_cancelled_and_the_next_ones_work(client):
    class Layer:
        def __init__(self):
            self.pending = client.submit(*long_call())
            self.itself = self

    def fails():
        pending = client.submit(*long_call())  # noqa: F841
        try:
            raise ValueError("the caller's")
        except ValueError as failure:
            kept = failure  # noqa: F841: frame, error, traceback, frame

    for leave in (Layer, fails):
        leave()
        gc.collect()
        still_works(client)


def test_garbage_collection_may_run_anywhere(client):
    x = np.ones((1, 2, 3, 8), np.float32)
    before = gc.get_threshold()
    gc.set_threshold(1)

    def work():
        for _ in range(50):
            cycle = [client.submit(x, x, x)]
            cycle.append(cycle)

    try:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS_MAX)
            assert not thread.is_alive()
    finally:
        gc.set_threshold(*before)
    still_works(client)


def test_a_dropped_call_keeps_its_arrays_until_it_has_ended(client):
    q, k, v = long_call()
    kept = weakref.ref(q)
    call = client.submit(q, k, v, transport="inline")
    del q, k, v
    del call
    assert kept() is not None, "the call that was cancelled a moment ago may still read it"

    def let_go():
        still_works(client)
        return kept() is None

    harness.wait_for("the cancelled call's end", let_go, 30)


def test_close_while_threads_start_calls(server):
    run(server, """
for n in range(20):
    client = attend.Client(address)
    stream, session = client.stream(), client.session(8, 64, dtype="float32")
    def work(start):
        try:
            while True:
                start()
        except attend.Error as failure:
            assert failure.status in ("CANCELLED", "FAILED_PRECONDITION", "NOT_FOUND",
                                  "UNAVAILABLE"), failure
    starts = [lambda: client.attention(large, large, large), lambda: stream.attention(x, x, x),
              lambda: session.attend(x), lambda: session.append(x, x), client.health]
    threads = [threading.Thread(target=work, args=(start,)) for start in starts * 2]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    for each in ((session.free, stream.close, client.close), (client.close,))[n % 2]:
        try:
            each()
        except attend.Error as failure:
            assert failure.status == "UNAVAILABLE", failure  # an append is in progress
    client.close()
    for thread in threads:
        thread.join()
""")


def test_close_before_the_executor_starts_a_call(server):
    run(server, """
import asyncio, concurrent.futures
async def main():
    loop = asyncio.get_running_loop()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
    for leave in ("close", "cancel"):
        client = attend.aio.Client(address)
        loop.run_in_executor(None, time.sleep, 0.5)
        task = asyncio.ensure_future(client.attention(large, large, large))
        await asyncio.sleep(0.05)
        if leave == "cancel":
            task.cancel()
        client._client.close()
        others = [attend.Client(address) for _ in range(3)]  # at the address of the freed one
        try:
            await task
            assert False
        except attend.Error as failure:
            assert failure.status in ("CANCELLED", "FAILED_PRECONDITION"), failure
        except asyncio.CancelledError:
            assert leave == "cancel"
asyncio.run(main())
""")


def test_memory_outlives_its_client_and_its_server(start_server, tmp_path):
    port, path = harness.free_port(), tmp_path / "s.sock"
    server = start_server("--shared-memory", "--shared-memory-socket", path,
                          listen=f"127.0.0.1:{port}")
    run(server, """
with attend.Client(address) as client:
    kept = client.empty((64 << 20,), np.uint8)
gc.collect()
kept[5] = 7
assert kept[:10].sum() == 7
del kept, client
client = attend.Client(address, timeout=5)
again = client.empty((1, 8, 512, 64))
again[...] = 1
assert client.submit(again, again, again).result().transport == "shm"
os.kill(int(sys.argv[2]), 9)
for _ in range(3):
    try:
        client.attention(again, again, again)
    except attend.Error:
        pass
assert again.sum() == again.size
cycle = [client, again]
cycle.append(cycle)
""", server.process.pid)


def test_a_failed_allocation_prints_no_further_error(server):
    with attend.Client(server.address, shared_memory="/nowhere/s.sock") as client:
        with pytest.raises(attend.Error) as caught:
            client.empty((5,))
        assert caught.value.status == "FAILED_PRECONDITION"
    run(server, """
client = attend.Client(address, shared_memory="/nowhere/s.sock")
try:
    client.empty((5,))
except attend.Error:
    pass
""")


def test_a_forked_child_does_not_disturb_the_parents_client(server):
    run(server, """
client = attend.Client(address)
session = client.session(8, 64, dtype="float32")
session.append(large, large)
stream, array = client.stream(), client.empty((100,))
pending = client.submit(long, long, long)
child = os.fork()
if child == 0:
    for use in (lambda: client.attention(x, x, x, timeout=3), lambda: attend.Client(address),
                lambda: session.length(), pending.result, lambda: stream.attention(x, x, x)):
        try:
            use()
            os._exit(3)
        except attend.Error as failure:
            if failure.status != "FAILED_PRECONDITION" or "spawn" not in str(failure):
                os._exit(4)
    array[3] = 5
    del session, pending, stream, array
    client.close()
    gc.collect()
    sys.exit(7)
begin = time.monotonic()
while True:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    assert time.monotonic() < begin + 20, "the child hangs"
    time.sleep(0.01)
assert os.waitstatus_to_exitcode(status) == 7
assert session.attend(x).shape == x.shape and session.length() == 512
assert pending.result().o.shape == long.shape
assert stream.attention(x, x, x).shape == x.shape and array[3] == 5
""")


def test_a_fork_before_the_first_client_may_use_it(server):
    run(server, """
child = os.fork()
assert attend.Client(address).attention(x, x, x).shape == x.shape
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def test_the_interpreter_can_end_during_calls(server):
    begin = time.monotonic()
    run(server, """
client = attend.Client(address)
calls = [client.submit(long, long, long) for _ in range(8)]
client.submit(long, long, long)
stream, session = client.stream(), client.session(8, 64, dtype="float32")
calls.append(stream.submit(long, long, long))
calls.append(session.submit(x, large, large))
kept = client.empty((1, 8, 512, 64))
kept.flags.writeable = False
answer = client.attention(x, x, x)
cycle = [calls, client, stream, session]
cycle.append(cycle)
""")
    assert time.monotonic() - begin < 30


def test_after_close_calls_to_the_server_are_refused(server):
    x = np.ones((1, 2, 3, 8), np.float32)
    with attend.Client(server.address) as client:
        session, other = (client.session(2, 8, dtype="float32") for _ in range(2))
        stream = client.stream()
        session.append(x, x)
    for use in (lambda: session.append(x, x), lambda: session.attend(x), lambda: session.fork(),
                lambda: session.truncate(0), lambda: session.keep_draft(0, []),
                session.keep_alive, session.info, session.free,
                lambda: stream.attention(x, x, x), stream.finish,
                lambda: client.attend_sessions([other], x)):
        with pytest.raises(attend.Error, match="FAILED_PRECONDITION: the client is closed"):
            use()
    assert session.length() == 3 and len(session.id) == 32  # known without the server
    assert session.release() and stream.close() is None
