# SPDX-License-Identifier: Apache-2.0
"""One attention computed in parts of its keys, cut anywhere; the merged answer equals the uncut
one."""

import attend
import numpy as np
import pytest

from gradients import judge_gradients, make_backward
from reference import Case, Mask, judge, round_to

pytestmark = pytest.mark.usefixtures("libraries")

HEADS, HEADS_KV, DIM = 4, 2, 32
ALIBI = np.array([1.0, 0.5, 0.25, 0.125], np.float32)
SINKS = np.array([0.5, -1.0, 3.0, 0.0], np.float32)
KINDS = {
    "all keys": {},
    "causal": {"mask": Mask("causal")},
    "causal, top left": {"mask": Mask("causal", top_left=True)},
    "window": {"mask": Mask("window", left=9, right=3)},
    "window, top left": {"mask": Mask("window", top_left=True, left=5, right=20)},
    "causal window": {"mask": Mask("causal", left=7)},
    "alibi": {"mask": Mask("causal"), "alibi": ALIBI},
    "alibi, top left": {"mask": Mask("window", top_left=True), "alibi": ALIBI},
    "sinks": {"mask": Mask("causal"), "sinks": SINKS},
    "softcap and bias": {"softcap": 3.0, "bias": True},
    "all of it": {"mask": Mask("window", left=30, right=10), "alibi": ALIBI, "sinks": SINKS,
                  "softcap": 5.0, "bias": True},
}


@pytest.fixture
def client(server):
    with attend.Client(server.address, timeout=60) as made:
        yield made


def make_case(random, kind, dtype="float32"):
    len_q, len_k = random.integers(1, 60, 2)
    terms = dict(KINDS[kind])
    if terms.pop("bias", False):
        terms["bias"] = random.standard_normal((1, HEADS, len_q, len_k), np.float32)
    q, k, v = (round_to(dtype, random.standard_normal((2, heads, length, DIM), np.float32))
               for heads, length in ((HEADS, len_q), (HEADS_KV, len_k), (HEADS_KV, len_k)))
    return Case(q, k, v, dtype, **terms)


def options_of(case):
    mask = case.mask
    options = {"alignment": "top_left" if mask.top_left else "bottom_right",
               "causal": mask.kind == "causal", "softcap": case.softcap}
    if mask.kind == "window" or mask.left >= 0:
        options["window"] = (mask.left, mask.right)
    if case.alibi is not None:
        options["alibi_slopes"] = case.alibi
    return options


def parts_of(case, random):
    """The keyword arguments of each part; one of them has the sink. Parts may be empty."""
    len_k = case.k.shape[2]
    cuts = sorted(random.integers(0, len_k + 1, random.integers(1, 4)))
    with_sinks = random.integers(0, len(cuts) + 1)
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len_k])):
        part = {"k": case.k[:, :, begin:end], "v": case.v[:, :, begin:end],
                "key_offset": int(begin), "keys_after": int(len_k - end), **options_of(case)}
        if case.bias is not None:
            part["bias"] = case.bias[..., begin:end]
        if case.sinks is not None and number == with_sinks:
            part["sinks"] = case.sinks
        yield part


def swapped(array):
    return np.ascontiguousarray(np.swapaxes(array, 1, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_merge_to_the_uncut_one(client, random, kind):
    for _ in range(3):
        case = make_case(random, kind)
        parts = [client.attention(case.q, return_lse=True, o_dtype="float32", **part)
                 for part in parts_of(case, random)]
        o, lse = attend.merge_partial(parts)
        assert o.dtype == lse.dtype == np.float32
        judge(case, o, lse)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_merge_to_the_uncut_ones(client, random, kind):
    case = make_case(random, kind)
    d_o, d_lse, o, lse = make_backward(case, random)
    names = ["q", "k", "v"] + (["bias"] if case.bias is not None else [])
    wanted = names + (["sinks"] if case.sinks is not None else [])
    parts = []
    for part in parts_of(case, random):
        own = wanted if "sinks" in part else names
        got = client.backward(d_o, case.q, o=o, lse=lse, d_lse=d_lse, wanted=own,
                              o_dtype="float32", **part)
        parts.append([*got, *[None] * (len(wanted) - len(own))])
    merged = attend.merge_partial_gradients(parts, wanted=wanted)
    judge_gradients(case, d_o, d_lse, {f"d_{name}": array for name, array in zip(wanted, merged)})


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sixteen_bits_and_the_other_layout_merge(client, random, dtype):
    case = make_case(random, "causal", dtype)
    narrow = np.float16 if dtype == "float16" else np.float32
    parts = []
    for part in parts_of(case, random):
        q, k, v = (swapped(each).astype(narrow) for each in (case.q, part.pop("k"), part.pop("v")))
        parts.append(client.attention(q, k, v, layout="BLHD", return_lse=True, o_dtype="float32",
                                      **part))
    o, lse = attend.merge_partial(parts, layout="BLHD")
    judge(case, swapped(o), lse)


def test_parts_in_chunks_and_with_checks(client, random):
    case = make_case(random, "alibi")
    parts = [client.attention(case.q, return_lse=True, o_dtype="float32", check=True,
                              transport="chunked", **part) for part in parts_of(case, random)]
    judge(case, *attend.merge_partial(parts))


def test_a_session_may_hold_a_part(client, random):
    """The first keys are on the server, the others come with the call."""
    k, v = (random.standard_normal((1, HEADS_KV, 40, DIM), np.float32) for _ in "kv")
    q = random.standard_normal((1, HEADS, 3, DIM), np.float32)
    options = {"causal": True, "return_lse": True, "o_dtype": "float32"}
    with client.session(HEADS_KV, DIM, dtype="float32") as session:
        session.append(k[:, :, :25], v[:, :, :25])
        kept = session.attend(q, keys_after=15, **options)
        come = client.attention(q, k[:, :, 25:], v[:, :, 25:], key_offset=25, **options)
    o, lse = attend.merge_partial([kept, come])
    judge(Case(q, k, v, mask=Mask("causal")), o, lse)


def test_rows_hidden_from_every_part_merge_to_zero():
    o = np.ones((1, 1, 2, 3), np.float32)
    lse = np.array([[[0.0, -np.inf]]], np.float32)
    nothing = (np.zeros_like(o), np.full_like(lse, -np.inf))
    merged, merged_lse = attend.merge_partial([nothing, (o * [[[[1], [0]]]], lse), nothing])
    assert merged.tolist() == [[[[1, 1, 1], [0, 0, 0]]]]
    assert merged_lse.tolist() == [[[0, -np.inf]]]


def test_mismatched_parts_are_refused(client):
    q = np.zeros((1, 1, 1, 4), np.float32)
    o, lse = client.attention(q, q, q, return_lse=True)
    for call, said in [
            (lambda: attend.merge_partial([]), "parts has 0 entries"),
            (lambda: attend.merge_partial([(o, lse), (o, lse[:, :, :0])]), "parts[1] has an o"),
            (lambda: attend.merge_partial([(o, lse)], layout="HBLD"), "layout is 'HBLD'"),
            (lambda: attend.merge_partial_gradients([]), "parts has 0 entries"),
            (lambda: attend.merge_partial_gradients([(o, o, o)], layout="LHD"), "layout is 'LHD'"),
            (lambda: client.attention(q, q, q, key_offset=-1), "key_offset is -1"),
            (lambda: client.attention(q, q, q, keys_after=2**30), "keys of the whole"),
            (lambda: attend.attention(q, q, q, key_offset=2**30), "keys of the whole")]:
        with pytest.raises(attend.Error) as raised:
            call()
        assert said in str(raised.value)
