# SPDX-License-Identifier: Apache-2.0
"""attend's objects when copied, pickled, sent to other processes, or used in a forked process: each
works as documented, or is refused with a reason. Tests that might crash or hang run in separate
processes."""

import copy
import gc
import pickle
import subprocess
import sys

import attend
import numpy as np
import pytest

import harness

pytestmark = pytest.mark.usefixtures("libraries")

SECONDS_MAX = 90  # of a process
COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy,
          "pickle": lambda each: pickle.loads(pickle.dumps(each))}


@pytest.fixture(scope="module")
def server(shared_server):
    return shared_server


def ones(*shape):
    return np.ones(shape, np.float32)


X = ones(1, 2, 3, 8)


@pytest.mark.parametrize("how", COPIES)
def test_a_client_is_copied_as_another_one(client, how):
    client.timeout = 30
    other = COPIES[how](client)
    assert (other.server, other.timeout) == (client.server, 30) and repr(other) == repr(client)
    assert np.array_equal(other.attention(X, X, X), X)
    other.close()
    del other
    gc.collect()
    assert np.array_equal(client.attention(X, X, X), X)
    other = COPIES[how](client)
    client.close()
    assert np.array_equal(other.attention(X, X, X), X)
    other.close()


@pytest.mark.parametrize("how", COPIES)
def test_a_client_for_asyncio_is_copied_as_another_one(server, how):
    client = attend.aio.Client(server.address, connections=2)
    other = COPIES[how](client)
    assert other._client is not client._client and repr(other) == repr(client)
    for each in (client, other):
        each._client.close()


@pytest.mark.parametrize("how", COPIES)
def test_a_token_is_in_no_copy(server, how, tmp_path):
    token = "attend_0123456789abcdef"
    with attend.Client(server.address, token=token) as client:
        with pytest.raises(TypeError, match="token_file, or set ATTEND_TOKEN"):
            COPIES[how](client)
    (tmp_path / "token").write_text(token + "\n")
    with attend.Client(server.address, token_file=tmp_path / "token") as client:
        assert token not in repr(vars(client))
        assert token.encode() not in pickle.dumps(client)
        with COPIES[how](client) as other:
            assert other._arguments == client._arguments


def test_a_client_that_cannot_be_copied_fails_when_used(server, tmp_path):
    path = tmp_path / "token"
    path.write_text("attend_0123456789abcdef\n")
    with attend.Client(server.address, token_file=path) as client:
        data = pickle.dumps(client)
    path.unlink()
    other = pickle.loads(data)
    for _ in range(2):
        with pytest.raises(attend.Error, match="^INVALID_ARGUMENT: token file .*cannot be read"):
            other.health()
    path.write_text("attend_0123456789abcdef\n")
    assert pickle.loads(pickle.dumps(other)).health() == "SERVING"


@pytest.mark.parametrize("how", COPIES)
def test_objects_of_one_client_are_not_copied(client, how):
    session, stream, call = client.session(2, 8), client.stream(), client.submit(X, X, X)
    session.append(X, X)
    for each, words in ((session, "fork.* release.* Client.open_session"),
                        (stream, "Client.stream"), (call, "result"),
                        (attend.aio.Session(session), "Client.open_session"),
                        (attend.aio.Stream(stream), "Client.stream"),
                        (client._handle, "library")):
        with pytest.raises(TypeError, match=f"neither copied nor pickled.*{words}"):
            COPIES[how](each)
    gc.collect()
    assert np.array_equal(call.result().o, X) and session.length() == 3
    assert np.array_equal(stream.attention(X, X, X), X)
    stream.close()
    session.free()


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_answers_and_arrays_have_their_contents(client, how):
    large = ones(1, 8, 512, 64)
    answer = client.submit(large, large, large, return_lse=True).result()
    array = client.empty((5, 7))
    array[...] = 3
    other, copied = COPIES[how](answer), COPIES[how](array)
    o, lse = answer.o.copy(), answer.lse.copy()
    del answer
    array[...] = 4
    gc.collect()
    assert np.array_equal(other.o, o) and np.array_equal(other.lse, lse)
    assert other.timings.total_ns > 0 and np.array_equal(copied, 3 * np.ones((5, 7)))
    assert repr(other).startswith("<attend.Answer o float32 (1, 8, 512, 64), lse float32 ")


def test_the_repr_of_every_class_is_one_line(server, client):
    session, stream = client.session(2, 8, layers=2), client.stream()
    session.append(X, X, layer=1)
    where = f"attend.Client('{server.address}')"
    assert repr(session) == f"<attend.Session {session.id} of {where}, layers: 2, tokens: 0 to 3>"
    assert repr(attend.aio.Session(session)).startswith("<attend.aio.Session ")
    assert repr(stream) == f"<attend.Stream of {where}>"
    call = client.submit(X, X, X)
    call.wait()
    assert repr(call) == "<attend.Call, ended>"
    stream.close()
    session.free()
    assert repr(session) == f"<attend.Session, freed, of {where}>"
    assert repr(stream) == f"<attend.Stream, closed of {where}>"


def test_a_fork_of_unequal_layers_names_a_length(client):
    with client.session(2, 8, layers=2) as session:
        session.append(X, X)
        with pytest.raises(attend.Error, match=r"FAILED_PRECONDITION: .* 0 to 3 tokens: give one"):
            session.fork()
        session.append(X, X, layer=1)
        with session.fork() as fork:
            assert [fork.length(0), fork.length(1)] == [3, 3]


# A program that other processes import. Its arguments: address, way, start method.
POOLS = """
import concurrent.futures, faulthandler, multiprocessing, pickle, sys
sys.path[:0] = PATH
import attend, numpy as np

x = np.ones((1, 2, 3, 8), np.float32)


def compute(client):
    return client.attention(x, x, x)


def fails(client):
    client.attention(x, x, x, softcap=-1.0)


def answers(client):
    return client.submit(x, x, x).result()


def closes(address):
    with attend.Client(address) as client:
        return client.attention(x, x, x), client


def in_process(client, place):
    place.put(compute(client))


def gives_its_session(address):
    return attend.Client(address).session(2, 8)


def check(run, client, address, forked):
    '''run: a function and its argument, as in a pool.'''
    if forked:
        for function in compute, fails, answers:
            try:
                run(function, client)
                assert False
            except attend.Error as failure:
                assert failure.code == 9 and "spawn" in str(failure), failure
        return
    assert np.array_equal(run(compute, client), x)
    assert np.array_equal(run(answers, client).o, x)
    o, theirs = run(closes, address)
    assert np.array_equal(o, x) and theirs.health() == "SERVING"
    try:
        run(fails, client)
        assert False
    except ValueError as failure:
        assert isinstance(failure, attend.Error) and failure.code == 3, failure
        assert failure.attempts == 1 and "softcap" in failure.message
    try:
        run(gives_its_session, address)
        assert False
    except Exception as failure:
        assert "open_session" in str(failure), failure
    with client.session(2, 8) as session:
        try:
            run(compute, session)
            assert False
        except Exception as failure:
            assert "open_session" in str(failure), failure


if __name__ == "__main__":
    faulthandler.dump_traceback_later(60, exit=True)
    address, way, method = sys.argv[1:]
    context = multiprocessing.get_context(method)
    client = attend.Client(address)
    forked = method == "fork"
    if way == "process":
        place = context.Queue()
        process = context.Process(target=in_process, args=(client, place))
        process.start()
        if not forked:
            assert np.array_equal(place.get(), x)
        process.join()
        assert process.exitcode == (1 if forked else 0), process.exitcode
    elif way == "pool":
        with context.Pool(2) as pool:
            check(lambda f, given: pool.apply(f, (given,)), client, address, forked)
    else:
        with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
            check(lambda f, given: pool.submit(f, given).result(), client, address, forked)
    assert np.array_equal(compute(client), x), "the parent's goes on"
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("way", ["process", "pool", "executor"])
def test_answers_and_errors_can_be_sent_to_other_processes(server, tmp_path, way, method):
    program = tmp_path / "program.py"
    program.write_text("PATH = " + repr(harness.PACKAGES) + POOLS)
    done = subprocess.run([sys.executable, program, server.address, way, method],
                          capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr


# In the child of a fork, by name: what is done with what its parent made. Each must raise an Error
# that says how to do it.
IN_A_CHILD = """
import asyncio, copy, os, pickle, signal, sys
sys.path[:0] = PATH
import attend, numpy as np
address = sys.argv[1]
x, long = (np.ones((1, 8, rows, 64), np.float32) for rows in (3, 4096))
client, aio = attend.Client(address), attend.aio.Client(address)
session, freed = client.session(8, 64), client.session(8, 64)
session.append(x, x)
stream, other, ended = client.stream(), client.stream(), client.submit(x, x, x)
ended.wait()
pending, array = client.submit(long, long, long), client.empty((100,))
answer = client.submit(x, x, x).result()
task = aio._client.submit(x, x, x)

def connected():
    with attend.connect(client):
        attend.attention(x, x, x)


uses = {
    "Client": lambda: attend.Client(address), "attention": lambda: client.attention(x, x, x),
    "submit": lambda: client.submit(x, x, x), "backward": lambda: client.backward(x, x, x, x),
    "stream": client.stream, "session": lambda: client.session(8, 64),
    "sessions": client.sessions, "health": client.health, "server_info": client.server_info,
    "empty": lambda: client.empty((5,)), "attend": lambda: session.attend(x),
    "attend_sessions": lambda: client.attend_sessions([session], x),
    "append": lambda: session.append(x, x), "fork": session.fork, "id": lambda: session.id,
    "length": session.length, "truncate": lambda: session.truncate(0),
    "keep_draft": lambda: session.keep_draft(0, []), "free": freed.free,
    "release": session.release, "keep_alive": session.keep_alive, "info": session.info,
    "open_session": lambda: client.open_session("0" * 32),
    "stream.attention": lambda: stream.attention(x, x, x), "finish": other.finish,
    "result": pending.result, "wait": pending.wait, "done": pending.done, "task": task.result,
    "ended": ended.result, "copy": lambda: copy.copy(client).health(),
    "unpickled": lambda: pickle.loads(pickle.dumps(client)).health(),
    "aio": lambda: asyncio.run(aio.attention(x, x, x)),
    "connect": connected,
}


def in_the_child():
    for name, use in uses.items():
        try:
            use()
            print(name, "was done")
        except attend.Error as failure:
            if failure.status != "FAILED_PRECONDITION" or "spawn" not in str(failure):
                print(name, "said", failure)
    assert "another process" in repr(session) and repr(stream) and repr(pending) and repr(client)
    assert np.array_equal(answer.o, x)  # the memory of an answer can be read
    array[3] = 5  # and so is memory shared with a server
    assert np.array_equal(attend.attention(x, x, x), x), "in process, too"
    pending.cancel()
    stream.close()
    client.close()


child = os.fork()
if child == 0:
    signal.alarm(30)  # kills it if it hangs
    try:
        in_the_child()
    except BaseException as failure:
        print("raised", repr(failure))
    sys.stdout.flush()
    if sys.argv[2] == "drop":
        for name in [name for name in globals() if name != "sys"]:
            del globals()[name]
    sys.exit(7)  # as a program ends, with atexit handlers and destructors
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert session.length() == 3 and session.attend(x).shape == x.shape
freed.free()
assert pending.result().o.shape == long.shape and np.array_equal(task.result().o, x)
assert np.array_equal(stream.attention(x, x, x), x) and array[3] == 5
other.finish()
assert np.array_equal(client.attention(x, x, x), x)
"""


@pytest.mark.parametrize("end", ["exit", "drop"])
def test_a_forked_child_is_refused_and_harms_nothing(server, end):
    done = subprocess.run(
        [sys.executable, "-c", "PATH = " + repr(harness.PACKAGES) + IN_A_CHILD, server.address,
         end], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_process_may_fork_while_threads_call_a_server(server):
    """Locks that other threads hold at that moment must not block the child."""
    script = "PATH = " + repr(harness.PACKAGES) + """
import os, signal, sys, threading
sys.path[:0] = PATH
import attend, numpy as np
x = np.ones((1, 8, 256, 64), np.float32)
client, over = attend.Client(sys.argv[1]), threading.Event()

def work(compute):
    while not over.is_set():
        compute(x, x, x)

threads = [threading.Thread(target=work, args=(compute,))
           for compute in (client.attention, client.stream().attention) * 2]
for thread in threads:
    thread.start()
codes = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends it if it hangs
        same = np.array_equal(attend.attention(x, x, x), x)
        try:
            client.attention(x, x, x)
        except attend.Error as failure:
            os._exit(7 if same and failure.code == 9 else 3)
        os._exit(4)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
for thread in threads:
    thread.join()
assert codes == [7] * 20, codes
"""
    done = subprocess.run([sys.executable, "-c", script, server.address], capture_output=True,
                          text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
