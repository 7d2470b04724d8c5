# SPDX-License-Identifier: Apache-2.0
"""Drafts whose tokens form trees: a tree gives the bits of the whole mask, and a session that keeps
some of a draft's tokens equals one to which only these were appended."""

import asyncio

import attend
import attend_kernels
import grpc
import numpy as np
import pytest

import harness
import wire
from harness import run_client
from reference import Case, round_to

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.fixture(scope="module")
def tree_server(tmp_path_factory, libraries):
    folder = tmp_path_factory.mktemp("trees")
    running = harness.Server(folder, "--session-memory=64MiB", "--shared-memory",
                             f"--shared-memory-socket={folder / 's.sock'}")
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture
def client(tree_server):
    with attend.Client(tree_server.address, timeout=60) as made:
        yield made


def parents(random, tokens):
    return [int(random.integers(-1, token)) if token else -1 for token in range(tokens)]


def trees(random, batch, tokens):
    return np.concatenate([attend.tree_from_parents(parents(random, tokens))
                           for _ in range(batch)])


def whole(tree, drafts, q_lengths, kv_lengths, len_q, len_k):
    """The tree as a mask of all queries and keys, [B, 1, Lq, Lk], built token by token."""
    mask = np.ones((len(drafts), 1, len_q, len_k), bool)
    for b, (draft, rows, keys) in enumerate(zip(drafts, q_lengths, kv_lengths)):
        for i in range(draft):
            for j in range(draft):
                mask[b, 0, rows - draft + i, keys - draft + j] = tree[b % len(tree), i, j]
    return mask


def values(random, *shape, dtype=np.float32):
    return random.standard_normal(shape).astype(dtype)


def same(one, other):
    for a, b in zip(one, other):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


OPTIONS = {
    "plain": {}, "causal": dict(causal=True), "window": dict(window=(30, 2)),
    "top_left": dict(window=(60, 40), alignment="top_left"),
    "terms": dict(causal=True, softcap=9.0, sinks=[0.5, -1.0, 2.0, 0.0],
                  alibi_slopes=[0.5, 0.25, 0.125, 0.0625], dropout_p=0.1, dropout_seed=7),
    "a part": dict(key_offset=20),
}


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 33])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_tree_has_the_bits_of_the_whole_mask(client, random, name, tokens):
    """In both dense layouts, with a common tree and with one for each sequence, with true lengths
    and shorter drafts; on the server and in process."""
    dtype = np.float32 if tokens % 2 else np.float16
    len_q, len_k = tokens + 6, tokens + 61
    q = values(random, 3, 4, len_q, 32, dtype=dtype)
    k, v = (values(random, 3, 2, len_k, 32, dtype=dtype) for _ in "kv")
    options = dict(OPTIONS[name], return_lse=True)
    for batch, given, drafts in (
            (1, {}, [tokens] * 3),
            (3, dict(kv_lengths=[len_k, tokens + 1, tokens + 40]), [tokens] * 3),
            (3, dict(q_lengths=[len_q, tokens, 2], tree_lengths=[tokens, tokens // 2, 0]),
             [tokens, tokens // 2, 0])):
        tree = trees(random, batch, tokens)
        mask = whole(tree, drafts, given.get("q_lengths", [len_q] * 3),
                     given.get("kv_lengths", [len_k] * 3), len_q, len_k)
        lengths = {key: value for key, value in given.items() if key != "tree_lengths"}
        wanted = client.attention(q, k, v, bias=mask, **options, **lengths)
        same(client.attention(q, k, v, tree=tree, check=True, **options, **given), wanted)
        same(attend_kernels.attention(q, k, v, tree=tree, device="cpu", **options, **given),
             attend_kernels.attention(q, k, v, bias=mask, device="cpu", **options, **lengths))
        swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
        o, lse = client.attention(*swapped, tree=tree, layout="BLHD", **options, **given)
        same((np.ascontiguousarray(o.swapaxes(1, 2)), lse), wanted)


def test_packed_sequences_by_every_transport(client, random):
    drafts, rows, keys = [5, 0, 11], [5, 3, 20], [90, 40, 30]
    tree = trees(random, 3, 11)
    q = values(random, sum(rows), 4, 24)
    k, v = (values(random, sum(keys), 4, 24) for _ in "kv")
    packed = dict(layout="LHD", cu_seqlens_q=[0, *np.cumsum(rows)],
                  cu_seqlens_k=[0, *np.cumsum(keys)], return_lse=True)
    mask = whole(tree, drafts, rows, keys, max(rows), max(keys))
    wanted = client.attention(q, k, v, bias=mask, **packed)
    for transport in ("inline", "chunked", "shared"):
        same(client.attention(q, k, v, tree=tree, tree_lengths=drafts, transport=transport,
                              **packed), wanted)
    same(attend_kernels.attention(q, k, v, tree=tree, tree_lengths=drafts, device="cpu", **packed),
         wanted)
    with client.stream() as stream:
        same(stream.attention(q, k, v, tree=tree, tree_lengths=drafts, **packed), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_masks_on_the_wire_in_each_dtype(tree_server, random, dtype):
    """As generated clients of any language send it."""
    def rounded(*shape):
        return round_to(dtype, random.standard_normal(shape).astype(np.float32))

    tree = trees(random, 2, 13)
    case = Case(rounded(2, 4, 13, 32), rounded(2, 2, 50, 32), rounded(2, 2, 50, 24), dtype)
    mask = np.packbits(whole(tree, [13, 6], [13] * 2, [50] * 2, 13, 50), axis=-1,
                       bitorder="little")
    short, full = (wire.make_request(case, return_lse=True, check=True) for _ in range(2))
    short.tree = np.packbits(tree, axis=-1, bitorder="little").tobytes()
    short.tree_tokens = 13
    short.tree_lengths.extend([13, 6])
    full.bias.CopyFrom(wire.tensor("bit", (2, 1, 13, 50)))
    full.raw.append(mask.tobytes())
    with wire.connect(tree_server.address) as service:
        one, other = (service.Attend(each, timeout=wire.SECONDS) for each in (short, full))
    assert one.check.ok and one.check.rows_checked > 0
    assert list(one.raw) == list(other.raw)


def tree_fields(tree, lengths=()):
    tokens = tree.shape[-1]
    bits = np.packbits(tree, axis=-1, bitorder="little").tobytes()
    return wire.pb.AttendRequest(tree=bits, tree_tokens=tokens, tree_lengths=lengths)


def attend_bytes(channel, *parts):
    """The tensors of the answer to a message made of these parts, concatenated."""
    call = channel.unary_unary(wire.ATTEND,
                               response_deserializer=wire.pb.AttendResponse.FromString)
    sent = b"".join(part if isinstance(part, bytes) else part.SerializeToString()
                    for part in parts)
    return list(call(sent, timeout=wire.SECONDS).raw)


def test_the_last_of_repeated_fields_counts(tree_server, random):
    """As for any field of proto3, before and after the tensors. Lengths are concatenated."""
    case = Case(*(values(random, 2, 2, 9, 16) for _ in "qkv"), "float32")
    tensors = wire.make_request(case)
    right, wrong, wide = (tree_fields(trees(random, batch, tokens))
                          for batch, tokens in ((1, 5), (1, 5), (2, 9)))
    lengths = [wire.pb.AttendRequest(tree_lengths=[length]) for length in (5, 3)]
    no_tree, no_tokens, nine_tokens = b"\xda\x01\x00", b"\xe0\x01\x00", b"\xe0\x01\x09"
    # Field 2015, and the tree's number with a varint.
    unknown = b"\xf8\x7d\x01" + b"\xd8\x01\x07"
    with grpc.insecure_channel(tree_server.address) as channel:
        plain = attend_bytes(channel, tensors)
        wanted = attend_bytes(channel, right, *lengths, tensors)
        wider = attend_bytes(channel, wide, tensors)
        assert plain != wanted and wanted != attend_bytes(channel, wrong, *lengths, tensors)
        for parts, answer in (
                ((wide, wrong, lengths[0], unknown, right, lengths[1], tensors), wanted),
                ((wrong, lengths[0], tensors, lengths[1], unknown, wide, right), wanted),
                ((unknown, tensors, wrong, unknown, lengths[0], right, lengths[1]), wanted),
                ((right, tensors, wide), wider), ((wide, right, wide, tensors), wider),
                ((right, no_tree, no_tokens, tensors), plain),
                ((right, tensors, no_tokens, no_tree), plain)):
            assert attend_bytes(channel, *parts) == answer
        for parts, words in (
                ((right, tensors, no_tree), "tree_tokens is 5, must be 0 without a tree"),
                ((right, *lengths, tensors, lengths[0]), "tree_lengths has 3 entries, must have B"),
                ((right, tensors, nine_tokens), "tree has 5 bytes, must have 18, those of one"),
                ((right, no_tokens, tensors), r"tree_tokens is 0, must be in \[1, 1024\]")):
            with pytest.raises(grpc.RpcError, match=words) as caught:
                attend_bytes(channel, *parts)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("tokens", [0, 1, 1024, 1025])
def test_trees_at_the_bounds_of_their_size(client, tree_server, random, tokens):
    q, k, v = (values(random, 1, 1, 1030, 8) for _ in "qkv")
    case = Case(q, k, v, "float32")
    if tokens in (1, 1024):
        tree = trees(random, 1, tokens)
        mask = whole(tree, [tokens], [1030], [1030], 1030, 1030)
        same([client.attention(q, k, v, tree=tree)], [client.attention(q, k, v, bias=mask)])
        return
    fields = tree_fields(np.ones((1, max(1, tokens), max(1, tokens)), bool))
    fields.tree_tokens = tokens
    with grpc.insecure_channel(tree_server.address) as channel:
        with pytest.raises(grpc.RpcError, match=f"tree_tokens is {tokens}, must be in") as caught:
            attend_bytes(channel, fields, wire.make_request(case))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("batch, len_q", [(0, 7), (0, 0), (2, 0)])
def test_trees_without_sequences_or_queries(client, random, batch, len_q):
    """Then there is no draft, and the answer has no rows."""
    q, k, v = (values(random, batch, 2, length, 16) for length in (len_q, 20, 20))
    tree = trees(random, 1, 7)
    for attention in (client.attention,
                      lambda *a, **o: attend_kernels.attention(*a, device="cpu", **o)):
        o, lse = attention(q, k, v, tree=tree, tree_lengths=[0] * batch or None,
                           return_lse=True)
        assert o.shape == q.shape and lse.shape == q.shape[:3]
        if batch > 0:
            with pytest.raises(attend.Error, match="is 7, must be in .0, 0.: sequence 0 has 0 q"):
                attention(q, k, v, tree=tree)


def appended(client, shape, k, v, layers=1):
    session = client.session(*shape, dtype=k.dtype.name, layers=layers)
    for layer in range(layers):
        session.append(k, v, layer=layer)
    return session


@pytest.mark.parametrize("options", [{}, dict(window=(40, 0))])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_speculative_steps_on_sessions(client, random, dtype, options):
    """Each draft is appended and queried, then partly kept; a fork made before has none of it; all
    answers are those of a session without the dropped tokens."""
    k, v = values(random, 1, 2, 70, 16, dtype=dtype), values(random, 1, 2, 70, 24, dtype=dtype)
    session = appended(client, (2, 16, 24), k, v, layers=2)
    for tokens in (4, 16, 64, 9):
        tree = trees(random, 1, tokens)
        q = values(random, 1, 4, tokens, 16, dtype=dtype)
        new_k = values(random, 1, 2, tokens, 16, dtype=dtype)
        new_v = values(random, 1, 2, tokens, 24, dtype=dtype)
        fork = session.fork()
        o = [session.attend(q, new_k, new_v, layer=layer, tree=tree, check=True, **options)
             for layer in range(2)]
        all_k, all_v = np.concatenate([k, new_k], 2), np.concatenate([v, new_v], 2)
        mask = whole(tree, [tokens], [tokens], [all_k.shape[2]], tokens, all_k.shape[2])
        wanted = client.attention(q, all_k, all_v, bias=mask, **options)
        same(o, [wanted] * 2)
        last = int(random.integers(tokens))
        kept = np.flatnonzero(tree[0, last])  # a path from a root
        session.keep_draft(k.shape[2], kept)
        session.keep_draft(k.shape[2], kept)  # as a retry does
        assert fork.length() == k.shape[2]
        one = values(random, 1, 4, 1, 16, dtype=dtype)
        same([fork.attend(one, **options)], [client.attention(one, k, v, **options)])
        k = np.concatenate([k, new_k[:, :, kept]], 2)
        v = np.concatenate([v, new_v[:, :, kept]], 2)
        assert session.length(0) == session.length(1) == k.shape[2]
        with appended(client, (2, 16, 24), k, v) as fresh:
            for layer in range(2):
                same([session.attend(one, layer=layer, **options)],
                     [fresh.attend(one, **options)])
        fork.free()
    session.free()


@pytest.mark.parametrize("options", [{}, dict(window=(20, 1)), dict(causal=True, softcap=5.0)])
@pytest.mark.parametrize("batch", [1, 3])
def test_sessions_in_one_call_have_drafts_of_their_own_lengths(client, random, batch, options):
    """The third is a fork of the first, and shares its pages."""
    kept = [[values(random, 1, 2, tokens, 16) for _ in "kv"] for tokens in (45, 3)]
    sessions = [appended(client, (2, 16), *own) for own in kept]
    sessions.append(sessions[0].fork())
    kept.append(kept[0])
    drafts, rows = [9, 5, 0], 9
    tree = trees(random, batch, rows)
    q = values(random, 3, 4, rows, 16)
    k, v = (values(random, 3, 2, rows, 16) for _ in "kv")
    before = [session.length() for session in sessions]
    # The second session has 3 + 1 keys after this.
    with pytest.raises(attend.Error, match=r"tree_lengths.1. is 5, must be in .0, 4.: sequence 1 "):
        client.attend_sessions(sessions, q, k[:, :, :1], v[:, :, :1], tree=tree,
                               tree_lengths=[4, 5, 0])
    assert before == [session.info()["length"] for session in sessions]
    o, lse = client.attend_sessions(sessions, q, k, v, tree=tree, tree_lengths=drafts, check=True,
                                    return_lse=True, **options)
    for n, own in enumerate(kept):
        all_k, all_v = (np.concatenate([old, new[n:n + 1]], 2) for old, new in zip(own, (k, v)))
        mask = whole(tree[n % batch:][:1], drafts[n:n + 1], [rows], [all_k.shape[2]], rows,
                     all_k.shape[2])
        same((o[n:n + 1], lse[n:n + 1]), client.attention(q[n:n + 1], all_k, all_v, bias=mask,
                                                          return_lse=True, **options))
    sessions[0].keep_draft(45, [0, 2])
    assert [session.length() for session in sessions] == [47, 12, 54]
    last = q[:1, :, -1:]
    same([sessions[2].attend(last)],
         [client.attention(last, *(np.concatenate([old, new[2:]], 2)
                                   for old, new in zip(kept[2], (k, v))))])
    for session in sessions:
        session.free()


def test_refusals_name_the_field(client, random):
    q = values(random, 2, 4, 9, 16)
    k, v = (values(random, 2, 4, 20, 16) for _ in "kv")
    tree = trees(random, 1, 9)
    for options, words in (
            (dict(tree=tree, bias=np.ones(20, bool)), "tree is given with a bias"),
            (dict(tree=tree[0]), r"tree has shape \(9, 9\), must be \(1, T, T\) or \(2, T, T\)"),
            (dict(tree=np.ones((1, 1025, 1025), bool)), r"T in \[1, 1024\]"),
            (dict(tree=tree.astype(np.uint8)), "tree is of uint8, must be"),
            (dict(tree_lengths=[3, 3]), "tree_lengths is given, but tree is None"),
            (dict(tree=tree, tree_lengths=[9]), "tree_lengths has shape"),
            (dict(tree=tree, tree_lengths=[9, 10]), r"tree.lengths.1. is 10, must be in \[0, 9\]"),
            (dict(tree=tree, kv_lengths=[20, 8]), "sequence 1 has 9 queries and 8 keys"),
            (dict(tree=tree, keys_after=4), "keys_after is 4, must be 0 with a tree")):
        for attention in (client.attention,
                          lambda *a, **o: attend_kernels.attention(*a, device="cpu", **o)):
            with pytest.raises(attend.Error, match=words) as caught:
                attention(q, k, v, **options)
            assert caught.value.status == "INVALID_ARGUMENT"
    for backward in (client.backward, attend.backward):
        with pytest.raises(attend.Error, match="^INVALID_ARGUMENT: tree "):
            backward(q, q, k, v, q, np.zeros((2, 4, 9), np.float32), tree=tree)
    for wrong, words in (([], "parents has 0 elements"), ([0], r"parents\[0\] is 0"),
                         ([-1, 1], r"parents\[1\] is 1, must be in \[-1, 0\]"),
                         ([-2], r"parents\[0\] is -2"), ([-1.5], r"parents\[0\] is -1.5")):
        with pytest.raises(attend.Error, match=words):
            attend.tree_from_parents(wrong)
    with appended(client, (4, 16), k[:1], v[:1]) as session:
        for length, kept, words in ((10, [1, 1], "kept.1. is 1, must be in .2, 1023."),
                                    (10, [10], "kept has 10, the draft after length 10 has 10"),
                                    (21, [], "length is 21, must be in .0, 20."),
                                    (10, [-1], "kept is -1"), (10, [0.5], "kept is 0.5")):
            with pytest.raises(attend.Error, match=words):
                session.keep_draft(length, kept)
        assert session.length() == 20


def test_trees_with_asyncio(tree_server, random):
    k, v, q = (values(random, 1, 2, 12, 16) for _ in "kvq")
    tree = trees(random, 1, 12)

    async def run():
        async with attend.aio.Client(tree_server.address) as client:
            o = await client.attention(q, k, v, tree=tree)
            async with await client.session(2, 16) as session:
                same([await session.attend(q, k, v, tree=tree)], [o])
                await session.keep_draft(3, [1, 8])
                assert session.length() == 5

    asyncio.run(run())


def test_trees_on_the_command_line(tree_server, random, tmp_path):
    arrays = dict(q=values(random, 1, 4, 10, 16), k=values(random, 1, 2, 10, 16),
                  v=values(random, 1, 2, 10, 16), tree=trees(random, 1, 7))
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    files = [part for name in arrays for part in (f"--{name}", tmp_path / f"{name}.npy")]
    server = ("--server", tree_server.address)
    done = run_client("run", *server, *files, "--tree-lengths", "6", "--check", "--verify",
                      "--out", tmp_path / "o.npy")
    assert done.stdout.count("ok: max error") == 2
    mask = whole(arrays.pop("tree"), [6], [10], [10], 10, 10)
    same([np.load(tmp_path / "o.npy")],
         [attend_kernels.attention(**arrays, bias=mask, device="cpu")])
    made = run_client("session", "create", "--heads-kv", "2", "--dim", "16", *server).stdout.strip()
    run_client("session", "attend", made, *files, *server)
    run_client("session", "keep-draft", made, "--length", "3", "--kept", "0,4,6", *server)
    assert "tokens 6" in run_client("session", "info", made, *server).stdout
    run_client("session", "free", made, *server)
    refused = run_client("run", *server, *files[:-1], tmp_path / "q.npy", check=False)
    assert refused.returncode != 0 and "must be bool [B|1, T, T]" in refused.stderr
    done = run_client("check", *server, "--dtype", "float16", "--shape",
                      "B3,H4,Hkv2,Lq20,Lk80,D32,ragged,tree=12,causal,lse")
    assert "1 of 1 passed" in done.stdout
