# SPDX-License-Identifier: Apache-2.0
"""Dropout and bit masks by every way to call, compared with NumPy and with numeric masks."""


import grpc
import numpy as np
import pytest

import dropout
import sessions
import wire
from gradients import judge_gradients, make_backward
from harness import run_client
from reference import Case, Mask, judge, round_to, to_bytes
from tensor_files import read_safetensors

BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 37, 53, 32
WHOLE_LENGTHS = dict(q_lengths=[ROWS, 5], kv_lengths=[12, KEYS])


def make_case(random, dtype="float32", keys=KEYS, **fields):
    def values(heads, rows):
        return round_to(dtype, random.standard_normal((BATCH, heads, rows, DIM), np.float32))

    return Case(values(HEADS, ROWS), values(KV_HEADS, keys), values(KV_HEADS, keys), dtype,
                **fields)


def drop(case, p, random):
    """The dropout fields of a request for the case, which from then on expects it."""
    seed = int(random.integers(2**64, dtype=np.uint64))
    case.kept = dropout.kept(p, seed, BATCH, HEADS, ROWS, case.k.shape[2])
    return dict(dropout_p=p, dropout_seed=seed)


def packed(mask):
    """Booleans in the wire format."""
    return np.packbits(mask, axis=-1, bitorder="little").tobytes()


def add_mask(request, mask):
    """Before other tensors are added: raw has the order of the tensors."""
    request.bias.CopyFrom(wire.tensor("bit", mask.shape))
    request.raw.append(packed(mask))
    return request


def add_backward(request, case, parts):
    d_o, d_lse, o, lse = parts
    for name, dtype, array in (("o", case.dtype, o), ("lse", "float32", lse),
                               ("d_o", case.dtype, d_o), ("d_lse", "float32", d_lse)):
        getattr(request.backward, name).CopyFrom(wire.tensor(dtype, array.shape))
        request.raw.append(to_bytes(dtype, array))
    return request


def call(server, request, name="Attend"):
    with wire.connect(server.address) as service:
        return getattr(service, name)(request, timeout=wire.SECONDS)


@pytest.mark.parametrize("kernel", ["cpu_flash", "cpu_reference"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD", "LHD"])
def test_answers_match_the_reference(server, random, kernel, dtype, layout):
    case = make_case(random, dtype, mask=Mask("causal"), **WHOLE_LENGTHS)
    request = wire.make_request(case, layout, return_lse=True, kernel=kernel, check=True,
                                **drop(case, 0.3, random))
    answer = call(server, request)
    assert answer.check.ok, answer.check.detail
    judge(case, *wire.read_answer(case, layout, answer))


def expect_bits_as_numbers(server, random, case, mask, **fields):
    """Answers and gradients have the bits that a mask of 0 and -inf gives."""
    numbers = np.where(mask, np.float32(0), np.float32(-np.inf))
    plain = wire.make_request(case, return_lse=True, **fields)
    case.bias = numbers
    slow = call(server, wire.make_request(case, return_lse=True, **fields))
    fast = call(server, add_mask(plain, mask))
    assert list(fast.raw) == list(slow.raw)
    parts = [to for to in make_backward(case, random)]
    case.bias = None
    bits = add_backward(add_mask(wire.make_request(case, **fields), mask), case, parts)
    case.bias = numbers
    wide = add_backward(wire.make_request(case, **fields), case, parts)
    assert list(call(server, bits, "Backward").raw) == list(call(server, wide, "Backward").raw)
    return fast


@pytest.mark.parametrize("shape", [(1, 1, 1, KEYS), (BATCH, 1, ROWS, KEYS),
                                   (1, HEADS, 1, KEYS), (BATCH, HEADS, ROWS, KEYS)])
@pytest.mark.parametrize("kernel", ["cpu_flash", "cpu_reference"])
def test_bits_are_as_numbers(server, random, shape, kernel):
    mask = random.random(shape) < 0.6
    mask[..., : KEYS // 3] &= random.random() < 0.5
    case = make_case(random, "float16", mask=Mask("causal"))
    expect_bits_as_numbers(server, random, case, mask, kernel=kernel, dropout_p=0.125,
                           dropout_seed=5)


def test_dropout_on_sessions_is_refused(sessions_server, random):
    with sessions.client(sessions_server.address) as client:
        session = client.create()
        request = wire.pb.AttendRequest(dropout_p=0.5)
        request.sessions.add(session=session.id)
        for name, heads, dim in (("q", sessions.HEADS, sessions.DIM),
                                 ("k", sessions.KV_HEADS, sessions.DIM),
                                 ("v", sessions.KV_HEADS, sessions.DIM_V)):
            array = sessions.values(random, "float32", 1, heads, 3, dim)
            getattr(request, name).CopyFrom(wire.tensor("float32", array.shape))
            request.raw.append(to_bytes("float32", array))
        with pytest.raises(grpc.RpcError) as failure:
            client.attend(request)
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "dropout_p is 0.5, must be 0 with sessions" in failure.value.details()
        request.dropout_p = 0
        assert client.attend(request).session_lengths == [3]


@pytest.fixture
def files(random, tmp_path):
    """A case with its arguments for attend-client, its mask in a file of booleans."""
    case = make_case(random)
    mask = random.random((BATCH, HEADS, ROWS, KEYS)) < 0.8
    for name, array in (("q", case.q), ("k", case.k), ("v", case.v), ("bias", mask)):
        np.save(tmp_path / f"{name}.npy", array)
    case.bias = np.where(mask, np.float32(0), np.float32(-np.inf))
    fields = drop(case, 0.4, random)
    return case, ["--dropout", fields["dropout_p"], "--dropout-seed", fields["dropout_seed"],
                  *(part for name in ("q", "k", "v", "bias")
                    for part in (f"--{name}", tmp_path / f"{name}.npy"))]


@pytest.mark.parametrize("transport", ["inline", "chunked", "shm"])
def test_client_run(start_server, files, tmp_path, transport):
    case, arguments = files
    server = start_server("--shared-memory", "--shared-memory-socket", tmp_path / "regions")
    done = run_client("run", "--server", server.address, "--check", "--verify", "--transport",
                      transport, *arguments, "--out", tmp_path / "o.npy")
    assert done.stdout.count("check ok") == 2, done.stdout
    judge(case, np.load(tmp_path / "o.npy"))


@pytest.mark.parametrize("transport", ["inline", "chunked", "shm"])
def test_client_run_backward(start_server, files, random, tmp_path, transport):
    case, arguments = files
    server = start_server("--shared-memory", "--shared-memory-socket", tmp_path / "regions")
    d_o = make_backward(case, random)[0]
    np.save(tmp_path / "d_o.npy", d_o)
    run_client("run", "--server", server.address, "--backward", "--d-o", tmp_path / "d_o.npy",
               "--check", "--verify", "--transport", transport, *arguments, "--out",
               tmp_path / "out.safetensors")
    no_d_lse = np.zeros(d_o.shape[:3], np.float32)
    judge_gradients(case, d_o, no_d_lse, read_safetensors(tmp_path / "out.safetensors"))


def test_the_command_line_refuses_bad_dropout(files, tmp_path):
    _, arguments = files
    for change, words in ((["--dropout", "x"], "--dropout"),
                          (["--q", tmp_path / "bias.npy"], "booleans, which only bias may be")):
        kept = [part for n, part in enumerate(arguments)
                if change[0] not in (part, arguments[n - 1])]
        done = run_client("run", *kept, *change, check=False)
        assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.parametrize("backward", [[], ["--backward"]], ids=str)
@pytest.mark.parametrize("way", [[], ["--stream"], ["--transport", "chunked"]], ids=str)
def test_client_load(server, way, backward):
    done = run_client("load", "--server", server.address, *backward, "--shape",
                      "B1,H4,Hkv2,L64,D32,causal,bits,dropout=0.1", "--count", "30", "--warmup",
                      "0", "--verify", "1", "--check", "0.5", "--quiet", *way)
    assert done.returncode == 0, done.stdout + done.stderr


def test_replay_of_gradients(server, random, tmp_path):
    """A dump of a backward pass as the server writes one, with dropout and a mask of bits."""
    case = make_case(random)
    fields = drop(case, 0.25, random)
    mask = random.random((1, 1, ROWS, KEYS)) < 0.7
    case.bias = np.where(mask, np.float32(0), np.float32(-np.inf))
    parts = make_backward(case, random)
    case.bias = None
    request = add_mask(wire.make_request(case, request_id="dumped", **fields), mask)
    add_backward(request, case, parts)
    answer = call(server, request, "Backward")
    (tmp_path / "request.binpb").write_bytes(request.SerializeToString())
    (tmp_path / "report.json").write_text("{}")

    def replay(**options):
        (tmp_path / "response.binpb").write_bytes(answer.SerializeToString())
        return run_client("replay", tmp_path, "--server", server.address, **options).stdout

    same = replay()
    for name in ("d_q", "d_k", "d_v"):
        assert f"{name:8} bitwise equal" in same, same
    assert "this is the dumped answer, and it passes" in same
    wrong = bytearray(answer.raw[1])
    wrong[17] ^= 0x40
    answer.raw[1] = bytes(wrong)
    other = replay()
    assert "d_k      1 of" in other and "not reproduced: the new answer passes" in other
    # O of other data: the checks of the new gradients fail like those of the dumped ones.
    request.raw[4] = bytes(np.frombuffer(request.raw[4], np.float32) + np.float32(0.5))
    (tmp_path / "request.binpb").write_bytes(request.SerializeToString())
    done = run_client("replay", tmp_path, "--server", server.address, check=False)
    assert done.returncode == 1 and "reproduced: the new answer fails as well" in done.stdout
