# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 as a contender of tests/bench/bench_kernels.py, with a stub of it on the CPU;
and the reference answers of the suites with softcap."""

import math
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import bench_kernels_backward_cliffs as backward_cliffs  # noqa: E402
import bench_kernels_cells as cells  # noqa: E402
import bench_kernels_cliffs as cliffs  # noqa: E402
import bench_kernels_contenders as entries  # noqa: E402
import bench_kernels_fa4 as fa4  # noqa: E402
import bench_kernels_gradients as gradients  # noqa: E402


def dense(q, k, v, causal=False, window_size=(None, None), softcap=0.0):
    """Attention in BLHD."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[3])
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    left, right = window_size[0], 0 if causal else window_size[1]
    if left is not None:
        scores = scores.masked_fill(distance < -left, -math.inf)
    if right is not None:
        scores = scores.masked_fill(distance > right, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


class Stub:
    """Functions with the signatures of flash_attn.cute, which record how they were called."""

    def __init__(self):
        self.calls = []

    def flash_attn_func(self, q, k, v, causal=False, window_size=(None, None), softcap=0.0,
                        deterministic=False):
        assert q.shape[3] % 8 == 0, "head_dim must be divisible by 8"
        self.calls.append({"deterministic": deterministic, "packed": q.is_contiguous()})
        return dense(q, k, v, causal, window_size, softcap), None

    def flash_attn_varlen_func(self, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None,
                               max_seqlen_q=None, max_seqlen_k=None, causal=False):
        assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_q == max_seqlen_k
        starts = cu_seqlens_k.tolist()
        parts = [[x[None, begin:end] for x in (q, k, v)]
                 for begin, end in zip(starts, starts[1:])]
        return torch.cat([dense(*part, causal=causal)[0] for part in parts]), None


@pytest.fixture
def stub(monkeypatch):
    found = Stub()
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    fa4.module.cache_clear()
    yield found
    fa4.module.cache_clear()


def problems(*shapes):
    return [(shape, tuple(torch.randn(shape.batch, heads, shape.length, dim)
                          for heads, dim in ((shape.heads_q, shape.dim),
                                             (shape.heads_kv, shape.dim),
                                             (shape.heads_kv, shape.dim_v)))) for shape in shapes]


def expected(shape, tensors):
    o = dense(*(x.transpose(1, 2) for x in tensors), **fa4.options_of(shape))
    return o.transpose(1, 2)


def test_a_missing_fa4_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    fa4.module.cache_clear()
    shape = cells.Shape(1, 1, 1, 8, 8, 8)
    assert fa4.module()[0] is None and "no FlashAttention-4 (" in fa4.module()[1]
    assert fa4.forward(cells.cell("d128", shape)) == fa4.backward(fa4.options_of, []) == []
    fa4.compile_first([shape], [shape])
    fa4.module.cache_clear()


@pytest.mark.parametrize("left,right", [(-1, -1), (-1, 0), (3, 0), (2, 4)])
def test_forward_calls_are_packed_and_right(stub, left, right):
    sets = [problems(cells.Shape(2, 4, 2, 13, 24, 16, left=left, right=right)) for _ in range(2)]
    contender, = fa4.forward(cells.cell("d128", sets[0][0][0]))
    contender.prepare(sets)
    for n, one in enumerate(sets):
        torch.testing.assert_close(contender.run(n)[0], expected(*one[0]))
    assert len(stub.calls) == 3 and all(call["packed"] for call in stub.calls)
    assert fa4.module()[1].startswith("flash-attn-4 ")


def test_packed_sequences(stub):
    shapes = [cells.Shape(1, 2, 2, length, 16, 16, right=right)
              for length, right in ((5, 0), (3, -1), (9, -1), (2, 0))]
    sets = [problems(*shapes)]
    contender, = fa4.forward(cells.Cell("ragged", "some", tuple(shapes)))
    contender.prepare(sets)
    for output, problem in zip(contender.run(0), sets[0], strict=True):
        torch.testing.assert_close(output, expected(*problem))


def test_gradients_in_both_modes(stub):
    sets = [problems(cells.Shape(1, 4, 2, 9, 16, 16, right=0))]
    d_os = gradients.by_o(sets)
    (shape, tensors), = sets[0]
    leaves = [x.clone().requires_grad_() for x in tensors]
    right = torch.autograd.grad(expected(shape, leaves), leaves, d_os[0])
    names = []
    for contender in fa4.backward(fa4.options_of, d_os):
        contender.prepare(sets)
        names.append(contender.name)
        for gradient, one in zip(contender.run(0), right, strict=True):
            torch.testing.assert_close(gradient, one)
    assert names == ["fa4", "fa4, deterministic"]
    assert [call["deterministic"] for call in stub.calls] == [False, True]


def test_shapes_and_options_that_it_cannot_run(stub):
    sets = [problems(cells.Shape(1, 1, 1, 8, 12, 12))]
    for contender in (fa4.Fa4(), *fa4.backward(fa4.options_of, gradients.by_o(sets))):
        with pytest.raises(entries.CannotRun, match="FA4: head_dim must be divisible by 8"):
            contender.prepare(sets)
    assert fa4.forward(cells.cell("fp32", cells.Shape(1, 1, 1, 8, 8, 8, "float32"))) == []
    case = cliffs.Case("ALiBi", sets[0][0][1], {"alibi_slopes": torch.ones(1)})
    with pytest.raises(entries.CannotRun, match="no such thing"):
        cliffs.Fa4(case).prepare([])


def small(module):
    return [case for case in module.cases(64, device="cpu", batch=2, heads=2, length=64)
            if "o_dtype" not in case.options]


def test_softcap_agrees_with_the_reference(stub):
    cases = [case for case in small(backward_cliffs) if case.name.startswith(("softcap", "plain"))]
    assert len(cases) == 4
    for case in cases:
        contender = cliffs.Fa4(case)
        contender.prepare([])
        truths = {place: [cliffs.truth(case, *place, cliffs.heads_of(case, *place))]
                  for place in cliffs.places(case)}
        assert cliffs.judge_of(case, truths)(contender.run(0))[1] is None, case.name
        d_os = gradients.by_o([[(case, case.tensors)]])
        judge = cliffs.judge_of(case, backward_cliffs.truths(case, d_os[0]), backward_cliffs.NAMES)
        for contender in fa4.backward(cliffs.fa4_options, d_os):
            contender.prepare([[(case, case.tensors)]])
            assert judge(contender.run(0))[1] is None, case.name
