# SPDX-License-Identifier: Apache-2.0
"""The real library on a GPU, with arrays of NumPy, torch and CuPy."""

import attend_kernels
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
RANDOM = np.random.default_rng()


def inputs(dtype, lq=129, lk=200):
    return [RANDOM.standard_normal(shape).astype(dtype)
            for shape in ((2, 4, lq, 64), (2, 2, lk, 64), (2, 2, lk, 64))]


def expected(q, k, v):
    """Causal (bottom right) attention in double precision."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    lq, lk = q.shape[2], k.shape[2]
    scores = q @ k.swapaxes(-1, -2) / 8
    scores[..., np.arange(lk)[None, :] > np.arange(lq)[:, None] + lk - lq] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("dtype,bound", [("float32", 1e-5), ("float16", 3e-3), ("bfloat16", 2e-2)])
def test_numpy(dtype, bound):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    arrays = inputs(dtype)
    o, lse = attend_kernels.attention(*arrays, causal=True, return_lse=True)
    assert o.dtype == dtype and np.isfinite(lse).all()
    assert abs(o.astype(np.float64) - expected(*arrays)).max() < bound
    kernel, why = attend_kernels.select(*arrays, causal=True)
    assert kernel.startswith("cuda_") and why


def test_arrays_of_every_library_give_the_same_bits():
    arrays = inputs(np.float16)
    wanted = attend_kernels.attention(*arrays, causal=True)
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x).cuda() for x in arrays]
    o = attend_kernels.attention(*tensors, causal=True)
    assert o.dtype == torch.float16 and (o.cpu().numpy() == wanted).all()
    blhd = [x.transpose(1, 2).contiguous() for x in tensors]
    o = attend_kernels.attention(*blhd, causal=True, layout="BLHD")
    assert (o.transpose(1, 2).cpu().numpy() == wanted).all()
    cupy = pytest.importorskip("cupy")
    o = attend_kernels.attention(*(cupy.asarray(x) for x in arrays), causal=True)
    assert (cupy.asnumpy(cupy.from_dlpack(o)) == wanted).all()
    assert (torch.from_dlpack(o).cpu().numpy() == wanted).all()


def test_concurrent_streams():
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x).cuda() for x in inputs(np.float16)]
    wanted = attend_kernels.attention(*tensors)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    outputs = []
    for n in range(40):
        with torch.cuda.stream(streams[n % 4]):
            outputs.append(attend_kernels.attention(*tensors))
    torch.cuda.synchronize()
    assert all(torch.equal(o, wanted) for o in outputs)


def test_temporaries_survive_on_a_stream_that_is_not_current():
    """Temporaries are freed as soon as the call returns, and their memory is allocated again."""
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x).cuda() for x in inputs(np.float16)]
    lengths = torch.tensor([200, 150], dtype=torch.int32, device="cuda")
    wanted = attend_kernels.attention(*tensors, kv_lengths=lengths)
    torch.cuda.synchronize()
    stream, outputs = torch.cuda.Stream(), []
    for _ in range(20):
        # With a bare handle torch does not know that the stream uses these inputs, so they are
        # kept alive; the call's own temporaries are its responsibility.
        outputs.append(attend_kernels.attention(*tensors, kv_lengths=lengths,
                                                stream=stream.cuda_stream))
        copies = [x.clone() for x in (*tensors, lengths)]
        stream.wait_stream(torch.cuda.current_stream())
        outputs.append(attend_kernels.attention(*copies[:3], kv_lengths=copies[3], stream=stream))
        del copies
        for x in (*tensors, lengths, lengths.long()):
            torch.zeros_like(x)
    torch.cuda.synchronize()
    assert all(torch.equal(o, wanted) for o in outputs)


def test_a_batch_gives_the_bits_of_its_calls_alone():
    problems = [inputs(np.float16, lq, lk) for lq, lk in ((1, 7), (300, 300), (64, 1000))]
    calls = [dict(q=q, k=k, v=v, causal=n == 1) for n, (q, k, v) in enumerate(problems)]
    for call, o in zip(calls, attend_kernels.attention_batch(calls)):
        assert (o == attend_kernels.attention(**call)).all()


def test_packed_sequences_with_lengths_on_the_gpu():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(90, heads, 64, device="cuda").half() for heads in (4, 2, 2))
    begins = torch.tensor([0, 40, 40, 90], dtype=torch.int32, device="cuda")
    o = attend_kernels.attention(q, k, v, layout="LHD", cu_seqlens_q=begins, cu_seqlens_k=begins,
                                 max_seqlen_q=50, max_seqlen_k=50, causal=True)
    for first, last in ((0, 40), (40, 90)):
        one = [x[first:last].transpose(0, 1)[None] for x in (q, k, v)]
        alone = attend_kernels.attention(*one, causal=True)
        assert (alone[0].transpose(0, 1).float() - o[first:last].float()).abs().max() < 4e-3


def test_errors_of_the_library_are_raised():
    q, k, v = inputs(np.float32)
    with pytest.raises(attend_kernels.Error, match="no_such_kernel"):
        attend_kernels.attention(q, k, v, kernel="no_such_kernel")
    with pytest.raises(attend_kernels.Error, match="heads"):
        attend_kernels.attention(q[:, :3], k, v)
