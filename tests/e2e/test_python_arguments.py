# SPDX-License-Identifier: Apache-2.0
"""Arguments that attend.Client refuses: every message names the argument, its value and the
bound."""

import fractions

import attend
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("libraries")


def some(random):
    return [random.standard_normal(shape).astype(np.float32)
            for shape in ((2, 4, 33, 16), (2, 2, 50, 16), (2, 2, 50, 24))]


@pytest.mark.parametrize("bad,words", [
    (dict(layout="HBLD"), "layout is 'HBLD'"),
    (dict(alignment="left"), "alignment is 'left'"),
    (dict(window=(-2, 0)), "window's left side is -2"),
    (dict(dropout_p=0.5), "dropout_seed is None"),
    (dict(transport="pigeon"), "transport is 'pigeon'"),
    (dict(timeout=-1.0), "timeout is -1.0"),
    (dict(timeout=9e9), "must be a number of seconds above 0 and below 9e9"),
    (dict(softcap=-1.0), "softcap is -1, must be in [1e-06, 1e+06], or 0 for none"),
    (dict(softcap=1e-45), "softcap is 1e-45, must be in"),
    (dict(softcap=1e-50), "softcap is 1e-45, must be in"),  # not 0, which is off
    (dict(request_id="\udcff"), "must be UTF-8"),
    (dict(kernel="\udcff"), "must be UTF-8"),
    (dict(cu_seqlens_q=[], cu_seqlens_k=[0], layout="LHD", **{
        name: np.ones((0, 2, 8), np.float32) for name in "qkv"}), "cu_seqlens_q has no elements"),
    (dict(q_lengths=[]), "q_lengths has shape (0,), must be (2,)"),
    (dict(alibi_slopes=[[0.1] * 4, 0.1]), "alibi_slopes has rows of different lengths"),
    (dict(kernel="no_such"), "no_such"),
    (dict(priority=101), "priority"),
    (dict(cu_seqlens_q=[0, 1]), "cu_seqlens_q is given"),
    (dict(sinks=[1.0]), "sinks"),
    (dict(o_dtype="float16"), "o_dtype is 'float16'"),
    (dict(request_id="x" * 129), "request_id"),
    (dict(request_id="a\0b"), r"request_id is 'a\x00b', must have no NUL"),
    (dict(tenant="a\0"), r"tenant is 'a\x00', must have no NUL"),
    (dict(kernel="auto\0"), "kernel is 'auto"),
    (dict(kernel=None), "kernel is None, must be a str"),
    (dict(layout=[]), "layout is [], must be BHLD"),
    (dict(window=5), "window is 5, must be None or (left, right)"),
    (dict(window=(0.5, 0)), "window's left side is 0.5, must be an integer"),
    (dict(timeout="1"), "timeout is '1', must be a number of seconds"),
    (dict(priority=2**32), "priority is 4294967296, must be in [-100, 100]"),
    (dict(scale="x"), "scale is 'x', must be a number"),
    (dict(bias=[[1.0] * 50] * 33), "bias is a list, must be a NumPy array"),
    (dict(bias=0.5), "bias is a float, must be a NumPy array"),
    (dict(alibi_slopes=0.5), "alibi_slopes is 0.5, must be numbers in a list"),
    (dict(alibi_slopes=[[0.1] * 2] * 4), "alibi_slopes has shape (4, 2), must be (4,) or (2, 4"),
    (dict(q_lengths=[[3, 3]]), "q_lengths has shape (1, 2), must be (2,)"),
    (dict(kv_lengths=[3]), "kv_lengths has shape (1,), must be (2,)"),
    (dict(sinks=[[1.0]] * 4), "sinks has shape (4, 1), must be (4,)"),
    (dict(q=np.ma.masked_less(np.ones((2, 4, 33, 16), np.float32), 5)), "q is a masked array"),
    (dict(bias=np.ma.masked_less(np.ones((33, 50), bool), 5)), "bias is a masked array"),
    (dict(q=np.ones((4, 33, 16), np.float32)), "q has 3 dimensions, layout BHLD needs 4"),
])
def test_wrong_arguments_are_named(client, random, bad, words):
    with pytest.raises(attend.Error) as caught:
        client.attention(**{**dict(zip("qkv", some(random))), **bad})
    assert caught.value.status == "INVALID_ARGUMENT" and words in str(caught.value), caught.value


def test_unusable_arguments_are_refused(client, random):
    q, k, v = some(random)
    with pytest.raises(TypeError, match="no argument 'causl'"):
        client.attention(q, k, v, causl=True)
    with pytest.raises(attend.Error, match="q is a list"):
        client.attention([1.0], k, v)
    with pytest.raises(attend.Error, match="k has dtype float64"):
        client.attention(q, k.astype(float), v)
    with pytest.raises(attend.Error, match="wanted has 'sinks', which the call does not have"):
        client.backward(q, q, k, v, wanted=["sinks"])
    for wrong in ("qk", "q"):
        with pytest.raises(attend.Error, match=f"wanted is '{wrong}', must be a tuple or list"):
            client.backward(q, q, k, v, wanted=wrong)
    with pytest.raises(attend.Error, match="o is None, must be given with lse"):
        client.backward(q, q, k, v, lse=q[..., 0])
    with pytest.raises(attend.Error, match="lse is None, must be given with o"):
        client.backward(q, q, k, v, q)


@pytest.mark.parametrize("bad,words", [
    (dict(connections=0), "connections is 0, must be in \\[1, 1024\\]"),
    (dict(connections=5000), "connections is 5000, must be in \\[1, 1024\\]"),
    (dict(connections=2**32 + 1), "connections is 4294967297"),
    (dict(connections=1.5), "connections is 1.5, must be an integer"),
    (dict(attempts=0), "attempts is 0, must be in"),
    (dict(server=None), "server is None, must be a str"),
    (dict(tenant="a\0b"), "tenant is .*, must have no NUL"),
    (dict(timeout=0), "timeout is 0, must be"),
])
def test_wrong_arguments_of_a_client_are_named(bad, words):
    with pytest.raises(attend.Error, match=words) as caught:
        attend.Client(**bad)
    assert caught.value.status == "INVALID_ARGUMENT"


def test_timeouts_may_be_any_numbers(client, random):
    q, k, v = some(random)
    for seconds in (np.float32(60), np.int64(60), fractions.Fraction(121, 2)):
        assert client.attention(q, k, v, timeout=seconds).shape == (2, 4, 33, 24)
    for seconds in (float("inf"), 1e300, np.float32(60), None):
        assert client.submit(q, k, v).result(seconds).o.shape == (2, 4, 33, 24)
    call = client.submit(q, k, v)
    for wrong in (float("nan"), "x"):
        with pytest.raises(attend.Error, match="timeout is .*, must be a number"):
            call.wait(wrong)
    assert call.wait(60) and call.wait(-1)


def test_a_batch_of_no_sequences_has_no_lengths(client):
    none = np.ones((0, 2, 5, 8), np.float32)
    for lengths in ([], np.zeros(0, int)):
        assert client.attention(none, none, none, q_lengths=lengths, kv_lengths=lengths).shape == \
            none.shape


def test_empty_accepts_the_shapes_of_numpy(client):
    assert client.empty(5).shape == (5,) and client.empty([2, 3], "u1").shape == (2, 3)
    for bad, words in (((-1,), "shape is -1"), ((2**40, 2**40), "shape's bytes is"),
                       (2.5, "shape is 2.5, must be an integer")):
        with pytest.raises(attend.Error, match=words):
            client.empty(bad)
    with pytest.raises(attend.Error, match="dtype is .*, must be one of plain bytes"):
        client.empty((2,), object)


def test_a_batch_with_a_bad_call_leaves_no_call_in_flight(client, monkeypatch):
    long = dict(zip("qkv", [np.ones((1, 8, 4096, 64), np.float32)] * 3))
    started = []
    submit = client.submit
    monkeypatch.setattr(client, "submit",
                        lambda **call: started.append(submit(**call)) or started[-1])
    with pytest.raises(attend.Error, match="layout"):
        client.attention_batch([long, long, dict(long, layout="?")])
    assert len(started) == 2 and all(call._started.held is None for call in started)
    with pytest.raises(attend.Error, match="CANCELLED"):
        started[1].result()
