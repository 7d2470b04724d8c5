# SPDX-License-Identifier: Apache-2.0
"""Transports of arrays that are not plain NumPy arrays: rows of sessions through shared memory,
DLPack tensors with any strides, and GPU tensors, with a driver whose GPU is the host."""

import os
import pathlib
import subprocess
import sys
import textwrap

import attend
import attend_kernels
import numpy as np
import pytest

import harness

pytestmark = pytest.mark.usefixtures("libraries")
KERNEL = "cpu_flash"


def some(random, rows, batch=1):
    return [random.standard_normal((batch, 4, rows, 64)).astype(np.float32) for _ in range(3)]


def in_process(q, k, v):
    return attend_kernels.attention(q, k, v, causal=True, kernel=KERNEL, device="cpu",
                                    return_lse=True)


def check_session(client, random, transport):
    """A prompt, which goes through shared memory, a token, which is sent inline, and a query for
    both."""
    q, k, v = some(random, 300)
    with client.session(4, 64, dtype="float32") as session:
        prompt = session.submit(q[:, :, :299], k[:, :, :299], v[:, :, :299], causal=True,
                                return_lse=True, kernel=KERNEL).result()
        token = session.submit(q[:, :, 299:], k[:, :, 299:], v[:, :, 299:], causal=True,
                               return_lse=True, kernel=KERNEL).result()
        again = session.submit(q, causal=True, return_lse=True, kernel=KERNEL).result()
        assert session.length() == 300
    assert [prompt.transport, token.transport, again.transport] == [transport, "inline", transport]
    for answer, rows, keys in ((prompt, slice(0, 299), 299), (token, slice(299, 300), 300),
                               (again, slice(0, 300), 300)):
        o, lse = in_process(q[:, :, rows], k[:, :, :keys], v[:, :, :keys])
        assert answer.o.tobytes() == o.tobytes() and answer.lse.tobytes() == lse.tobytes()


def test_rows_of_sessions_go_through_shared_memory(client, random):
    check_session(client, random, "shm")
    q, k, v = some(random, 200, batch=2)
    with client.session(4, 64, dtype="float32") as one, \
            client.session(4, 64, dtype="float32") as other:
        o = client.attend_sessions([one, other], q, k, v, causal=True, kernel=KERNEL)
        assert o.tobytes() == in_process(q, k, v)[0].tobytes()
        with pytest.raises(attend.Error, match="Hkv"):  # appends nothing, and harms nothing
            one.append(k[:1, :2], v[:1, :2])
    check_session(client, random, "shm")


def test_a_lost_session_does_not_disable_shared_memory(client, random):
    session = client.session(4, 64, dtype="float32")
    shape = attend.LayerShape("float32", 4, 64, 0)
    with client.open_session(session.id, [shape]) as other:
        session.free()
        with pytest.raises(attend.Error) as caught:
            other.append(*some(random, 300)[1:])
        assert caught.value.status == "NOT_FOUND" and "session" in str(caught.value)
    check_session(client, random, "shm")


def test_a_shared_memory_socket_of_another_server_is_not_used(client, start_server, random):
    """The first call detects it, and still appends its rows once."""
    with attend.Client(start_server().address, shared_memory=client_socket(client)) as other:
        check_session(other, random, "inline")


def client_socket(client):
    return client.server_info()["shared_memory"]["socket"]


def test_sessions_use_shared_memory_of_a_restarted_server(start_server, tmp_path, random):
    port = harness.free_port()

    def start():
        return start_server("--shared-memory", "--shared-memory-socket", tmp_path / "s.sock",
                            listen=f"127.0.0.1:{port}")

    running = start()
    with attend.Client(running.address, timeout=30) as client:
        check_session(client, random, "shm")
        session = client.session(4, 64, dtype="float32")
        session.append(*some(random, 300)[1:])
        assert running.stop() == 0
        start()
        harness.wait_for("the server", lambda: up(client), 30)
        with pytest.raises(attend.Error, match="session"):
            session.append(*some(random, 300)[1:])
        client.attention(*some(random, 300))  # detects the new server if nothing has yet
        check_session(client, random, "shm")


def up(client):
    try:
        return client.health(timeout=1) == "SERVING"
    except attend.Error:
        return False


class Exported:
    """An array that supports DLPack and nothing else."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("rows", [5, 300])
@pytest.mark.parametrize("view", [
    lambda x: x.swapaxes(1, 2), lambda x: x[:, :, ::-1], lambda x: x[..., ::2], lambda x: x[:, 1:],
    lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (*x.strides[:1], 0, *x.strides[2:]))])
def test_dlpack_of_any_strides_is_copied(client, random, view, rows):
    q, k, v = (view(x) for x in some(random, rows))
    o = client.attention(*map(Exported, (q, k, v)), kernel=KERNEL)
    plain = [np.ascontiguousarray(x) for x in (q, k, v)]
    wanted = attend_kernels.attention(*plain, kernel=KERNEL, device="cpu")
    assert np.from_dlpack(o).tobytes() == wanted.tobytes()


DEVICE_CALLS = """
    import sys
    sys.path[:0] = [f"{ROOT}/{folder}" for folder in ("client/python", "kernels/python",
                                                      "tests/python")]
    import attend, cuda_tensor, numpy as np

    random = np.random.default_rng()
    with attend.Client(ADDRESS, timeout=60) as client:
        for rows, way in ((5, "inline"), (300, "shm")):
            plain = [random.standard_normal((1, 4, rows, 64)).astype(np.float32) for _ in range(3)]
            q, k, v = map(cuda_tensor.PtrTensor, plain)
            wanted, wanted_lse = client.attention(*plain, return_lse=True)
            for transport in ("auto", "inline", "chunked"):
                answer = client.submit(q, k, v, return_lse=True, transport=transport).result()
                assert answer.transport == (way if transport == "auto" else transport)
                assert str(answer.o.device) == "cuda:0" and answer.lse.shape == (1, 4, rows)
                assert answer.o.values.tobytes() == wanted.tobytes()
                assert answer.lse.values.tobytes() == wanted_lse.tobytes()
            for d_o in (v, plain[2]):
                got = client.backward(d_o, q, k, v, answer.o, answer.lse)
                right = client.backward(plain[2], *plain, wanted, wanted_lse)
                assert all(x.values.tobytes() == y.tobytes() for x, y in zip(got, right))
            mixed = client.attention(plain[0], k, v)
            assert isinstance(mixed, np.ndarray) and mixed.tobytes() == wanted.tobytes()
            with client.session(4, 64, dtype="float32") as session:
                o = session.attend(q, k, v)
                assert o.values.tobytes() == wanted.tobytes()
        try:
            client.empty((4, 8), device="cuda")
        except attend.Error as failure:
            assert failure.status == "FAILED_PRECONDITION" and "--cuda-ipc" in str(failure)
        else:
            raise AssertionError("the server takes no memory of a GPU")
        try:
            client.attention(cuda_tensor.PtrTensor(plain[0], cuda_tensor.Device("cuda", 3)), k, v)
        except attend.Error as failure:
            assert failure.status == "INVALID_ARGUMENT" and "q.memory is 4" in str(failure)
        else:
            raise AssertionError("there is no GPU 3")
"""


def test_gpu_tensors_that_the_server_refuses_go_over_the_host(shared_server):
    driver = harness.binary("attend-server").parents[1] / "tests/client/fake_cuda/libcuda.so.1"
    if not driver.exists():
        pytest.skip(f"there is no {driver}")
    code = f"ROOT, ADDRESS = {str(harness.ROOT)!r}, {shared_server.address!r}\n"
    code += textwrap.dedent(DEVICE_CALLS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
                          env={**os.environ, "LD_PRELOAD": str(pathlib.Path(driver).resolve())})
    assert done.returncode == 0, done.stderr
