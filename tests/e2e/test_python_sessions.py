# SPDX-License-Identifier: Apache-2.0
"""attend.Session against a server: answers have the bits of whole calls, and lengths stay
correct."""

import attend
import attend_kernels
import numpy as np
import pytest

import harness

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.fixture(scope="module")
def own_server(tmp_path_factory, libraries):
    """A server whose sessions are all these tests' own."""
    running = harness.Server(tmp_path_factory.mktemp("own"), "--tenant=a=1,b=1")
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture
def client(own_server):
    with attend.Client(own_server.address, timeout=60) as made:
        yield made


def rows(random, count, *, batch=1, heads=2, dim=16, dtype=np.float32):
    return random.standard_normal((batch, heads, count, dim)).astype(dtype)


class Kept:
    """The expected keys and values of a session."""

    def __init__(self):
        self.k = self.v = None

    def add(self, k, v):
        self.k = k if self.k is None else np.concatenate([self.k, k], 2)
        self.v = v if self.v is None else np.concatenate([self.v, v], 2)
        return self


def in_process(q, kept, **options):
    return attend_kernels.attention(q, kept.k, kept.v, device="cpu", **options)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tokens_after_a_prompt_have_the_bits_of_whole_calls(client, random, dtype):
    kept = Kept()
    with client.session(2, 16, 24, dtype=dtype, layers=2) as session:
        assert len(session.id) == 32 and session.layers == 2 and session.length() == 0
        for count in (70, 1, 1, 5, 1):
            q = rows(random, count, heads=4, dtype=dtype)
            k, v = rows(random, count, dtype=dtype), rows(random, count, dim=24, dtype=dtype)
            o, lse = session.decode(q, k, v, layer=1, return_lse=True)
            kernel = session.submit(q[:, :, :1], layer=1).result().kernel
            wanted = in_process(q, kept.add(k, v), causal=True, return_lse=True)
            assert kernel and o.dtype == dtype
            assert o.tobytes() == wanted[0].tobytes() and lse.tobytes() == wanted[1].tobytes()
            assert session.length(1) == kept.k.shape[2] and session.length(0) == 0


def test_append_attend_fork_and_truncate(client, random):
    k, v, q = rows(random, 40), rows(random, 40), rows(random, 3, heads=4)
    with client.session(2, 16, dtype="float32") as session:
        session.append(k, v)
        assert session.length() == 40
        with session.fork(25) as fork:
            assert fork.length() == 25 and fork.id != session.id
            part = Kept().add(k[:, :, :25], v[:, :, :25])
            assert fork.attend(q).tobytes() == in_process(q, part).tobytes()
            assert len(client.sessions()) == 2
        assert [each["id"] for each in client.sessions()] == [session.id]
        session.truncate(10)
        assert session.length() == 10 and session.info()["length"] == 10
        session.keep_alive()
        swapped = session.attend(q.swapaxes(1, 2), layout="BLHD")
        whole = in_process(q, Kept().add(k[:, :, :10], v[:, :, :10]))
        assert np.array_equal(swapped.swapaxes(1, 2), whole)
        session.append(k.swapaxes(1, 2), v.swapaxes(1, 2), layout="BLHD")
        assert session.length() == 50


def test_several_sequences_in_one_call_and_on_a_stream(client, random):
    sessions = [client.session(2, 16, dtype="float32") for _ in range(2)]
    kept = [Kept(), Kept()]
    for session, own, count in zip(sessions, kept, (5, 9)):
        k, v = rows(random, count), rows(random, count)
        session.append(k, v)
        own.add(k, v)
    q, k, v = rows(random, 1, batch=2, heads=4), rows(random, 1, batch=2), rows(random, 1, batch=2)
    o = client.attend_sessions(sessions, q, k, v, causal=True)
    for n, own in enumerate(kept):
        own.add(k[n:n + 1], v[n:n + 1])
        assert o[n:n + 1].tobytes() == in_process(q[n:n + 1], own, causal=True).tobytes()
    assert [session.length() for session in sessions] == [6, 10]
    with client.stream() as stream:
        calls = [session.submit(q[:1], k[:1], v[:1], stream=stream) for session in sessions]
        for call, own in zip(calls, kept):
            answer = call.result()
            assert answer.o.tobytes() == in_process(q[:1], own.add(k[:1], v[:1])).tobytes()
            assert answer.session_lengths == (own.k.shape[2],) and not answer.sessions_ending
    for session in sessions:
        session.free()
    assert client.sessions() == []


def test_a_released_session_can_be_opened_by_its_id(client, random):
    session = client.session(2, 16, dtype="float32")
    session.append(rows(random, 3), rows(random, 3))
    session_id = session.release()
    other = client.open_session(session_id, [attend.LayerShape("float32", 2, 16)])
    assert other.length() == 3 and other.id == session_id
    other.append(rows(random, 1), rows(random, 1))
    with client.open_session(session_id) as third:
        assert third.length() == 4
    assert len(client.sessions()) == 1, "leaving it frees only what was made here"
    # The first of the two objects expects 3 + 1 tokens; an append by another client makes that
    # wrong once.
    with client.open_session(session_id) as third:
        third.append(rows(random, 2), rows(random, 2))
    with pytest.raises(attend.Error) as caught:
        other.append(rows(random, 1), rows(random, 1))
    assert caught.value.status == "FAILED_PRECONDITION" and caught.value.session_lengths == (6,)
    assert other.length() == 6
    other.free()
    for use in (lambda: other.length(), lambda: other.attend(rows(random, 1)),
                lambda: client.open_session(session_id), lambda: client.open_session("xyz"),
                lambda: client.session(2, 300), lambda: client.session(2, 8, dtype="int8")):
        with pytest.raises(attend.Error):
            use()


def test_numbers_do_not_wrap_and_shapes_are_checked(client, own_server, random):
    with client.session(2, 16, dtype="float32") as session:
        session.append(rows(random, 5), rows(random, 5))
        for use, words in (
                (lambda: session.append(rows(random, 1), rows(random, 1), layer=2**32), "layer is"),
                (lambda: session.length(2**32), "layer is 4294967296"),
                (lambda: session.truncate(2**64 + 3), "length is 18446744073709551619"),
                (lambda: session.truncate(-1), "length is -1"),
                (lambda: session.fork(2**64 + 3), "length is"),
                (lambda: client.session(2, 2**64 + 16), "dim is 18446744073709551632"),
                (lambda: client.session(2, 16, layers=2**32 + 1), "layers is 4294967297"),
                (lambda: client.session(2, 16, device="cpu\0"), "device is .*, must have no NUL"),
                (lambda: client.session(2, 16, device="\udcff"), "device is .*, must be UTF-8"),
                (lambda: client.session(2, 16, lease="1s"), "lease is '1s', must be a number"),
                (lambda: session.append(*[rows(random, 1)[0]] * 2), "k has 3 dimensions"),
                (lambda: client.open_session("a\0b"), "session_id is .*, must have no NUL")):
            with pytest.raises(attend.Error, match=words) as caught:
                use()
            assert caught.value.status == "INVALID_ARGUMENT"
        assert session.length() == 5
        with attend.Client(own_server.address) as other, other.stream() as stream:
            with pytest.raises(attend.Error, match="the stream is of attend.Client.*must be of"):
                session.submit(rows(random, 1, heads=4), stream=stream)
            with other.session(2, 16, dtype="float32") as another:
                with pytest.raises(attend.Error, match="the session is of attend.Client"):
                    client.attend_sessions([session, another], rows(random, 1, batch=2, heads=4))
