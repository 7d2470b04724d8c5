# SPDX-License-Identifier: Apache-2.0
"""attend.attention gives the same bits in process, on a server and through attend.aio."""

import asyncio
import concurrent.futures
import threading

import attend
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("libraries")


def some(random, rows=40, heads=4, dim=16, batch=2):
    q = random.standard_normal((batch, heads, rows, dim), np.float32)
    k, v = (random.standard_normal((batch, 2, rows, dim), np.float32) for _ in range(2))
    return q, k, v


OPTIONS = [{}, dict(causal=True, return_lse=True), dict(window=(3, 1), softcap=5.0),
           dict(sinks=[0.1, 0.2, 0.3, 0.4], kv_lengths=[40, 5]),
           dict(dropout_p=0.5, dropout_seed=7, o_dtype="float32"),
           dict(causal=True, key_offset=7, keys_after=3, return_lse=True, o_dtype="float32")]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kernel", ["cpu_flash", "cpu_reference"])
def test_attention_has_the_same_bits_both_ways(server, random, options, kernel):
    q, k, v = some(random)
    here = attend.attention(q, k, v, kernel=kernel, **options)
    with attend.connect(server.address) as client:
        there = attend.attention(q, k, v, kernel=kernel, **options)
        assert client.health() == "SERVING"
    with pytest.raises(attend.Error, match="closed"):
        client.health()
    for one, other in zip(*((each if isinstance(each, tuple) else (each,))
                            for each in (here, there))):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


# Head dims for which 1 / sqrt(D) in float32 does or does not depend on where it is rounded.
@pytest.mark.parametrize("dim", [24, 64, 72, 96, 112, 127])
def test_the_default_scale_has_the_same_bits_both_ways(server, random, dim):
    q, k, v = some(random, dim=dim)
    here = attend.attention(q, k, v)
    assert here.tobytes() == attend.attention(q, k, v, scale=1 / dim**0.5).tobytes()
    with attend.connect(server.address):
        assert attend.attention(q, k, v, check=True).tobytes() == here.tobytes()


@pytest.mark.parametrize("options", [{}, dict(key_offset=7, keys_after=3)])
def test_backward_has_the_same_bits_both_ways(server, random, options):
    q, k, v = some(random)
    d_o = random.standard_normal(q.shape, np.float32)
    options = dict(causal=True, **options)
    here = attend.backward(d_o, q, k, v, wanted=("v", "q"), **options)
    o, lse = attend.attention(q, k, v, return_lse=True, **options)
    with attend.connect(server.address):
        there = attend.backward(d_o, q, k, v, o, lse, wanted=("v", "q"), **options)
    assert [x.tobytes() for x in here] == [x.tobytes() for x in there]


@pytest.mark.parametrize("bad,words", [
    (dict(wanted="qk"), "wanted is 'qk', must be a tuple or list of names"),
    (dict(lse=np.zeros((2, 4, 40), np.float32)), "o is None, must be given with lse")])
def test_backward_refuses_the_same_both_ways(server, random, bad, words):
    q, k, v = some(random)
    for way in (None, server.address):
        with attend.connect(way), pytest.raises(attend.Error, match=words):
            attend.backward(q, q, k, v, **bad)


def test_connect_applies_to_its_thread_and_the_innermost_wins(server, random):
    q, k, v = some(random)
    with attend.Client(server.address, tenant="outer") as client:
        with attend.connect(client), attend.connect(server.address) as inner:
            assert inner is not client
            assert attend.attention(q, k, v, check=True).shape == q.shape
            seen = []

            def elsewhere():
                try:
                    attend.attention(q, k, v, check=True)
                except attend.Error as failure:
                    seen.append(failure.status)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert seen == ["UNIMPLEMENTED"], "in process there is no check"
            assert attend.connected() is inner
        assert client.health() == "SERVING", "a client that was given stays open"
    with pytest.raises(TypeError, match="no argument 'causl'"):
        attend.attention(q, k, v, causl=True)
    with pytest.raises(TypeError, match="no argument 'attempts'"), attend.connect(None, attempts=3):
        pass


def test_connect_may_apply_to_all_threads(server, random):
    q, k, v = some(random)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, \
            concurrent.futures.ThreadPoolExecutor(1) as another:
        def elsewhere(function=attend.connected, thread=pool):
            return thread.submit(function).result()

        def within(client):
            with attend.connect(client):
                return attend.connected()

        assert elsewhere() is attend.connected() is None
        with attend.connect(server.address, all_threads=True) as first:
            assert elsewhere() is attend.connected() is first
            assert elsewhere(lambda: attend.attention(q, k, v, check=True)).shape == q.shape
            with attend.connect(None):
                assert attend.connected() is None and elsewhere() is first
            with attend.Client(server.address) as other:
                assert elsewhere(lambda: within(other)) is other and elsewhere() is first
                with attend.connect(other, all_threads=True):
                    assert elsewhere() is attend.connected() is other
                    with attend.connect(None, all_threads=True):
                        assert elsewhere() is attend.connected() is None
                    assert elsewhere() is other
                assert elsewhere() is first
                blocks = [(pool, attend.connect(other, all_threads=True)),
                          (another, attend.connect(first, all_threads=True))]
                for thread, block in blocks:  # they end in the order in which they began
                    elsewhere(block.__enter__, thread)
                for thread, block in blocks:
                    elsewhere(lambda: block.__exit__(None, None, None), thread)
                    assert attend.connected() is first
        assert elsewhere() is attend.connected() is None


def test_aio_has_the_same_methods():
    for ours, theirs in ((attend.aio.Client, attend.Client), (attend.aio.Session, attend.Session),
                         (attend.aio.Stream, attend.Stream)):
        public = {name for name in vars(theirs) if not name.startswith("_")}
        assert public - {"submit", "submit_backward"} <= set(vars(ours))


def test_aio_calls_are_in_flight_together(server, random):
    async def run():
        async with attend.aio.Client(server.address, timeout=60) as client:
            assert await client.health() == "SERVING" and (await client.server_info())["version"]
            given = [some(random, rows) for rows in (1, 40, 300)]  # the last one, in the executor
            got = await asyncio.gather(*(client.attention(*each, causal=True) for each in given))
            for each, o in zip(given, got):
                assert o.tobytes() == attend.attention(*each, causal=True).tobytes()
            answer = await client.answer(*given[0], check=True)
            assert answer.check.ok and answer.timings.total_ns > 0
            batch = await client.attention_batch([dict(zip("qkv", each)) for each in given])
            assert [o.shape for o in batch] == [each[0].shape for each in given]
            q, k, v = given[1]
            d_o = random.standard_normal(q.shape, np.float32)
            got = await client.backward(d_o, q, k, v)
            for one, other in zip(got, attend.backward(d_o, q, k, v)):
                assert one.tobytes() == other.tobytes()
            with pytest.raises(attend.Error, match="layout"):
                await client.attention(q, k, v, layout="no")
            async with client.stream() as stream:
                o, bad = await asyncio.gather(stream.attention(q, k, v),
                                              stream.attention(q, k, v, scale=float("inf")),
                                              return_exceptions=True)
                assert o.tobytes() == attend.attention(q, k, v).tobytes()
                assert bad.status == "INVALID_ARGUMENT"

    asyncio.run(run())


def test_aio_sessions(start_server, random):
    server = start_server()

    async def run():
        async with attend.aio.Client(server.address) as client:
            async with await client.session(2, 16, dtype="float32", layers=2) as session:
                q, k, v = some(random, 30, batch=1)
                o = await session.decode(q, k, v)
                assert o.tobytes() == attend.attention(q, k, v, causal=True).tobytes()
                await session.append(k, v, layer=1)
                assert session.length() == session.length(1) == 30 and session.layers == 2
                fork = await session.fork(10)
                await fork.keep_draft(3, [2, 6])
                await fork.keep_alive()
                assert (await fork.info())["length"] == 5 and fork.id != session.id
                assert len(await client.sessions()) == 2
                both = await client.attend_sessions([session, fork], *some(random, 1))
                assert both.shape == (2, 4, 1, 16)
                await fork.free()
                released = await client.open_session(session.id)
                assert released.release() == session.id
            assert await client.sessions() == []

    asyncio.run(run())


def test_a_cancelled_task_cancels_its_call(server, random):
    async def run():
        async with attend.aio.Client(server.address, shared_memory=False) as client:
            large = some(random, 4096, heads=16, dim=64, batch=4)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.attention(*large), 0.3)
            assert await client.health() == "SERVING"

    asyncio.run(run())
