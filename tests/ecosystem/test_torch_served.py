# SPDX-License-Identifier: Apache-2.0
"""attend.torch within attend.connect(): the server computes, with the same bits as the kernels in
process."""

import threading

import pytest

torch = pytest.importorskip("torch")

import attend  # noqa: E402
import attend.torch  # noqa: E402
import harness  # noqa: E402

sdpa = attend.torch.scaled_dot_product_attention


@pytest.fixture
def answered(server):
    """A function that asserts the number of requests answered since the test began."""
    def total():
        return server.metric("attend_requests_total", code="OK") - before

    def check(count):
        harness.wait_for(f"{count} answers", lambda: total() >= count)
        assert total() == count

    before = 0
    before = total()
    return check


def inputs(*heads, lq=17, lk=21, dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(2, count, rows, dim, generator=generator).to(dtype).requires_grad_()
            for count, rows in zip(heads, (lq, lk, lk))]


def run(function, tensors, **options):
    """O and the gradients of the tensors."""
    torch.manual_seed(9)
    o = function(*tensors, **options)
    weights = torch.linspace(-1, 1, o.numel()).reshape(o.shape).to(o.dtype)
    return [o.detach(), *torch.autograd.grad(o, tensors, weights)]


def same(client, function, tensors, **options):
    local = run(function, tensors, **options)
    with attend.connect(client):
        served = run(function, tensors, **options)
    for one, other in zip(local, served):
        assert one.dtype == other.dtype and one.isfinite().all() and torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [
    dict(), dict(is_causal=True), dict(scale=0.3), dict(dropout_p=0.4),
    dict(attn_mask=torch.rand(2, 1, 17, 21) < 0.7), dict(attn_mask=torch.rand(21) < 0.7)])
def test_scaled_dot_product_attention(options, dtype, client, answered):
    same(client, sdpa, inputs(4, 2, 2, dtype=dtype), enable_gqa=True, **options)
    answered(2)  # forward and backward


def test_masks_of_numbers_have_gradients(client):
    mask = torch.randn(1, 4, 17, 21, requires_grad=True)
    same(client, lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask), [*inputs(4, 4, 4), mask])


@pytest.mark.parametrize("options", [
    dict(causal=True, window=(5, 0)), dict(window=(3, 2), softcap=1.5), dict(
        alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.05])),
    dict(q_lengths=torch.tensor([17, 4]), kv_lengths=torch.tensor([0, 20])),
    dict(layout="BLHD"), dict(causal=True, alignment="top_left")])
def test_attention(options, client):
    tensors = inputs(4, 2, 2)
    if options.get("layout") == "BLHD":
        tensors = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    sinks = torch.tensor([0.3, -0.5, 0.0, 2.0], requires_grad=True)
    same(client, lambda q, k, v, sinks: attend.torch.attention(q, k, v, sinks=sinks, **options),
         [*tensors, sinks])


def test_packed(client):
    ends = torch.tensor([0, 5, 5, 17])
    tensors = [torch.randn(17, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    same(client, attend.torch.attention, tensors, layout="LHD", cu_seqlens_q=ends,
         cu_seqlens_k=ends, causal=True)


def test_lse_and_its_gradient(client):
    def both(q, k, v):
        o, lse = attend.torch.attention(q, k, v, return_lse=True)
        return torch.cat([o.flatten(), lse.flatten()])

    same(client, both, inputs(4, 2, 2))


def test_dropout_of_1(client):
    same(client, sdpa, inputs(4, 4, 4), dropout_p=1.0)


def test_the_backward_pass_runs_where_the_forward_pass_ran(client, answered):
    tensors = inputs(4, 4, 4)
    with attend.connect(client):
        o = sdpa(*tensors)
    answered(1)
    o.sum().backward()
    answered(2)
    o = sdpa(*tensors)
    with attend.connect(client):
        o.sum().backward()
    answered(2)


def test_connections_apply_to_the_thread_and_the_block(client, answered):
    tensors = inputs(4, 4, 4)
    with attend.connect(client):
        with attend.connect(None):
            sdpa(*tensors)
        answered(0)
        sdpa(*tensors)
        answered(1)
        thread = threading.Thread(target=sdpa, args=tensors)  # has no connection
        thread.start()
        thread.join()
        answered(1)
    sdpa(*tensors)
    answered(1)


def test_compiled_code_computes_where_it_runs(client, answered):
    """A single compilation serves both, without graph breaks."""
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True) * 2,
                             backend="aot_eager", fullgraph=True)
    tensors = inputs(4, 4, 4)
    local = run(compiled, tensors)
    answered(0)
    with attend.connect(client):
        served = run(compiled, tensors)
    answered(2)
    assert all(map(torch.equal, local, served))


def test_operators_under_functorch(client, answered):
    q, k, v = (x.detach() for x in inputs(4, 4, 4))
    wanted = sdpa(q, k, v)
    with attend.connect(client):
        got = torch.vmap(sdpa)(q[:, None], k[:, None], v[:, None])
    assert torch.equal(got[:, 0], wanted)
    answered(2)  # vmap loops over the batch of two


@pytest.mark.parametrize("dtype,words", [(torch.float64, "q has dtype float64, must be")])
def test_dtypes_that_a_server_does_not_support_are_refused(dtype, words, client):
    with attend.connect(client), pytest.raises(attend.Error, match=words):
        sdpa(*inputs(4, 4, 4, dtype=dtype))


def test_an_unreachable_server():
    with attend.Client("127.0.0.1:1", attempts=1) as unreachable, attend.connect(unreachable):
        with pytest.raises(attend.Error, match="UNAVAILABLE"):
            sdpa(*inputs(4, 4, 4))


def test_the_backward_pass_needs_the_open_client(server, client, answered):
    tensors = inputs(4, 4, 4)
    with attend.connect(client):
        o = sdpa(*tensors)
    o.backward(torch.ones_like(o))
    answered(2)
    with attend.connect(server.address):
        o = sdpa(*tensors)
    with pytest.raises(attend.Error, match="the client is closed"):
        o.backward(torch.ones_like(o))
