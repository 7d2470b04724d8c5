# SPDX-License-Identifier: Apache-2.0
"""attend.Client against a server: the same bits as the kernel in process, by every way to pass
tensors, and its errors."""

import asyncio
import gc
import signal
import threading
import time

import attend
import attend_kernels
import numpy as np
import pytest

import harness

pytestmark = pytest.mark.usefixtures("libraries")

KERNEL = "cpu_flash"
SERVER_FLAGS = ("--tenant=a=1,b=1", "--shared-memory-client-max", "64MiB")


def heads(random, *shape, dtype=np.float32):
    return random.standard_normal(shape).astype(dtype)


def some(random, len_q=33, len_k=50, dtype=np.float32):
    return (heads(random, 2, 4, len_q, 16, dtype=dtype),
            heads(random, 2, 2, len_k, 16, dtype=dtype),
            heads(random, 2, 2, len_k, 24, dtype=dtype))


def same(got, wanted):
    """Equal dtypes, shapes and bits."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert got.tobytes() == wanted.tobytes(), np.abs(got.astype(float) - wanted.astype(float)).max()


OPTIONS = {
    "plain": {}, "causal": dict(causal=True),
    "top_left": dict(causal=True, alignment="top_left"), "window": dict(window=(5, 3)),
    "causal_window": dict(causal=True, window=(7, -1)), "scale": dict(scale=0.3),
    "softcap": dict(softcap=8.0), "alibi": dict(alibi_slopes=[0.5, 0.25, 0.125, 0.0625]),
    "alibi_each": dict(alibi_slopes=np.full((2, 4), 0.1, np.float32), alignment="top_left"),
    "sinks": dict(sinks=[0.5, -1.0, 2.0, 0.0]),
    "lengths": dict(q_lengths=[33, 7], kv_lengths=np.array([20, 50])),
    "dropout": dict(dropout_p=0.25, dropout_seed=2**63 + 5),
    "o_float32": dict(o_dtype="float32"),
    "all": dict(causal=True, softcap=20.0, sinks=[1.0, 0.0, 0.0, -1.0], kv_lengths=[50, 31],
                alibi_slopes=[0.1, 0.2, 0.3, 0.4], scale=0.2),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_the_bits_of_the_kernel_in_process(client, random, name, dtype):
    q, k, v = some(random, dtype=dtype)
    options = dict(OPTIONS[name], return_lse=True, kernel=KERNEL)
    wanted = attend_kernels.attention(q, k, v, device="cpu", **options)
    for got, want in zip(client.attention(q, k, v, **options), wanted):
        same(got, want)


@pytest.mark.parametrize("bias", ["whole", "row", "heads", "mask"])
def test_a_bias_may_leave_out_dimensions_and_be_bool(client, random, bias):
    q, k, v = some(random)
    given = {"whole": heads(random, 2, 4, 33, 50), "row": heads(random, 50),
             "heads": heads(random, 4, 1, 50), "mask": random.random((2, 1, 33, 50)) < 0.7}[bias]
    same(client.attention(q, k, v, bias=given, kernel=KERNEL),
         attend_kernels.attention(q, k, v, bias=given, kernel=KERNEL, device="cpu"))


@pytest.mark.parametrize("layout", ["BLHD", "LHD"])
def test_other_layouts_and_arrays_that_are_not_contiguous(client, random, layout):
    q, k, v = some(random)
    options = {}
    if layout == "LHD":
        q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
        options = dict(cu_seqlens_q=[0, 10, 33], cu_seqlens_k=[0, 30, 50])
    else:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    assert not q.flags.c_contiguous
    for got, want in zip(
            client.attention(q, k, v, layout=layout, return_lse=True, kernel=KERNEL, **options),
            attend_kernels.attention(q, k, v, layout=layout, return_lse=True, kernel=KERNEL,
                                     device="cpu", **options)):
        same(got, np.ascontiguousarray(want))


def test_every_transport_gives_the_same_bits(client, random):
    q, k, v = (heads(random, 1, 4, 300, 64) for _ in range(3))
    wanted = attend_kernels.attention(q, k, v, causal=True, kernel=KERNEL, device="cpu")
    for transport, name in (("auto", "shm"), ("inline", "inline"), ("chunked", "chunked"),
                            ("shared", "shm")):
        answer = client.submit(q, k, v, causal=True, kernel=KERNEL, transport=transport).result()
        assert answer.transport == name and answer.kernel == KERNEL and answer.device == "cpu"
        assert answer.timings.total_ns >= answer.timings.kernel_ns > 0
        assert answer.attempts == 1 and answer.batch_requests == 1 and answer.check is None
        same(answer.o, wanted)
    small = client.submit(*(x[:, :, :5] for x in (q, k, v))).result()
    assert small.transport == "inline"
    with attend.Client(client.server, shared_memory=False) as other:
        assert other.submit(q, k, v).result().transport == "inline"


def test_arrays_in_shared_memory_are_used_where_they_are(client, random):
    q, k, v = (client.empty((1, 4, 300, 64)) for _ in range(3))
    assert not q.any() and q.ctypes.data % 4096 == 0
    for x in (q, k, v):
        x[...] = heads(random, *x.shape)
    answer = client.submit(q, k[:, :, :200], v[:, :, :200], kernel=KERNEL).result()
    assert answer.transport == "shm"
    same(answer.o, attend_kernels.attention(q, k[:, :, :200], v[:, :, :200], kernel=KERNEL,
                                            device="cpu"))
    assert client.empty((3, 0, 2)).shape == (3, 0, 2)


def test_answers_are_not_overwritten_by_later_ones(client, random):
    """The server writes every answer to separate memory as long as the answer is referenced."""
    q, k, v = (heads(random, 1, 4, 256, 64) for _ in range(3))
    kept = [client.attention(q * n, k, v) for n in range(4)]
    copies = [o.copy() for o in kept]
    for n in range(6):
        client.attention(q + n, k, v)
    for o, copy in zip(kept, copies):
        same(o, copy)
    view = kept.pop()[0, 1]
    wanted = copies.pop()[0, 1]
    del kept, o
    gc.collect()
    client.attention(q, k, v)
    same(view, wanted)


def test_without_room_in_shared_memory_calls_use_another_transport(client, random):
    q, k, v = (heads(random, 1, 4, 1024, 256) for _ in range(3))  # 16 of 64 MiB, with the answer
    kept = [client.submit(q, k, v).result() for _ in range(20)]
    ways = {answer.transport for answer in kept}
    assert "shm" in ways and ways - {"shm"}
    for answer in kept:
        same(answer.o, kept[0].o)


@pytest.mark.parametrize("given", [False, True])
def test_gradients_have_the_bits_of_the_kernel_in_process(client, random, given):
    q, k, v = some(random)
    bias, sinks = heads(random, 1, 4, 1, 50), heads(random, 4)
    options = dict(causal=True, bias=bias, sinks=sinks, softcap=30.0)
    o, lse = attend_kernels.attention(q, k, v, return_lse=True, kernel=KERNEL, device="cpu",
                                      **options)
    d_o, d_lse = heads(random, *o.shape), heads(random, *lse.shape)
    names = ("k", "q", "v", "sinks", "bias")
    got = client.backward(d_o, q, k, v, *((o, lse) if given else ()), d_lse=d_lse, wanted=names,
                          **options)
    wanted = attend_kernels.attention_backward(d_o, q, k, v, o, lse, d_lse=d_lse, wanted=names,
                                               device="cpu", **options)
    for one, other in zip(got, wanted):
        same(one, other)


def test_a_batch_of_any_shapes_is_answered_in_order(client, random):
    calls = []
    for len_q in (1, 40, 7, 300):
        q, k, v = some(random, len_q)
        calls.append(dict(q=q, k=k, v=v, causal=True, kernel=KERNEL, return_lse=len_q == 7))
    for call, got in zip(calls, client.attention_batch(calls)):
        wanted = attend_kernels.attention(device="cpu", **call)
        for one, other in zip(got, wanted) if call["return_lse"] else [(got, wanted)]:
            same(one, other)
    calls[1]["k"] = calls[1]["k"][:, :1, :, :3]
    with pytest.raises(attend.Error, match="D"):
        client.attention_batch(calls)


def test_a_check_is_reported(client, random):
    answer = client.submit(*some(random), check=True).result()
    assert answer.check.ok and answer.check.rows_checked == answer.check.rows_total == 2 * 4 * 33
    assert 0 < answer.check.max_abs_error <= answer.check.bound and answer.check.detail == ""


def test_a_stream_answers_each_and_a_bad_one_fails_alone(client, random):
    given = [some(random, len_q) for len_q in (3, 1, 20, 8)]
    with client.stream() as stream:
        calls = [stream.submit(*each, causal=True, kernel=KERNEL) for each in given]
        bad = stream.submit(given[0][0], *given[1][1:], scale=float("nan"))
        for each, call in zip(given, calls):
            same(call.result().o, attend_kernels.attention(*each, causal=True, kernel=KERNEL,
                                                           device="cpu"))
        with pytest.raises(attend.Error) as caught:
            bad.result()
        assert caught.value.status == "INVALID_ARGUMENT" and "scale" in str(caught.value)
    with pytest.raises(attend.Error, match="closed"):
        stream.submit(*given[0])


def test_deadlines_and_cancels_end_calls(client, random):
    q, k, v = (heads(random, 8, 16, 2048, 64) for _ in range(3))
    begin = time.monotonic()
    with pytest.raises(attend.Error) as caught:
        client.attention(q, k, v, timeout=0.05, transport="chunked")
    assert caught.value.status == "DEADLINE_EXCEEDED" and time.monotonic() - begin < 10
    call = client.submit(q, k, v, transport="inline")
    with pytest.raises(TimeoutError):
        call.result(timeout=0.01)
    call.cancel()
    with pytest.raises(attend.Error) as caught:
        call.result()
    assert caught.value.status == "CANCELLED" and call.done()
    assert client.health() == "SERVING"


def test_an_interrupt_ends_the_wait(client, random):
    q, k, v = (heads(random, 8, 16, 2048, 64) for _ in range(3))
    timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        client.attention(q, k, v)
        timer.join()
    assert client.health() == "SERVING"


def test_many_threads_share_a_client(client, random):
    given = [some(random, 64) for _ in range(4)]
    wanted = [attend_kernels.attention(*each, kernel=KERNEL, device="cpu") for each in given]
    faults = []

    def work(n):
        for _ in range(10):
            got = client.attention(*given[n], kernel=KERNEL)
            if got.tobytes() != wanted[n].tobytes():
                faults.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_restarted_server_is_found_again(start_server, tmp_path, random):
    """Including its shared memory, where the new server does not know the old regions."""
    port, path = harness.free_port(), tmp_path / "s.sock"

    def start():
        return start_server("--shared-memory", "--shared-memory-socket", path,
                            listen=f"127.0.0.1:{port}")

    q, k, v = (heads(random, 1, 4, 256, 64) for _ in range(3))
    first = start()
    with attend.Client(first.address) as client:
        wanted = client.submit(q, k, v, kernel=KERNEL).result()
        assert wanted.transport == "shm"
        first.kill()
        with pytest.raises(attend.Error) as caught:
            client.attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], timeout=0.2)
        assert caught.value.status in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        second = start()
        again = client.submit(q, k, v, kernel=KERNEL, timeout=30).result()
        same(again.o, wanted.o)

        def shared():  # once gRPC has reconnected, which takes a moment
            later = client.submit(q, k, v, kernel=KERNEL, timeout=30).result()
            same(later.o, wanted.o)
            return later.transport == "shm"

        harness.wait_for("the new server's shared memory", shared, 30)
        assert second.metric("attend_requests_total", code="OK") >= 2


async def answer_of_asyncio(server, random):
    async with attend.aio.Client(server.address, tenant="nosuch") as client:
        await client.attention(*some(random))


def test_an_unknown_tenant_warns_and_a_closed_client_refuses(shared_server, random):
    with attend.Client(shared_server.address, tenant="nosuch") as client:
        for use in (lambda: client.attention(*some(random)), lambda: client.session(1, 8),
                    lambda: client.stream().attention(*some(random)),
                    lambda: asyncio.run(answer_of_asyncio(shared_server, random))):
            with pytest.warns(UserWarning, match="has no tenant 'nosuch'") as seen:
                use()
                harness.wait_for("the warning", lambda: seen.list)
    client = attend.Client(shared_server.address, tenant="a")
    info = client.server_info()
    assert info["limits"]["request_bytes_max"] > 0 and "a" in info["tenants"]
    assert info["tenant"]["name"] == "default"  # server_info() sends no token, and names no tenant
    assert any(kernel["name"] == KERNEL and kernel["available"] for kernel in info["kernels"])
    client.attention(*some(random))
    client.attention(*some(random), tenant="b")
    with pytest.warns(UserWarning,
                      match="tenant 'c', only a, b, default: its calls count as 'default'") as seen:
        client.attention(*some(random), tenant="c")
        harness.wait_for("the warning", lambda: seen.list)  # of a thread, if it still asks
    for tenant in "ab":  # metrics are updated after the answer
        harness.wait_for("the tenant's request", lambda: shared_server.metric(
            "attend_tenant_requests_total", tenant=tenant, code="OK") == 1)
    client.close()
    client.close()
    for use in (client.health, client.server_info, lambda: client.session(1, 8), client.stream,
                lambda: client.attention(*some(random))):
        with pytest.raises(attend.Error, match="closed"):
            use()
    with pytest.raises(attend.Error) as caught:
        attend.Client(f"127.0.0.1:{harness.free_port()}", attempts=1).health()
    assert caught.value.status == "UNAVAILABLE"
