# SPDX-License-Identifier: Apache-2.0
"""Valid requests of every kind with the exact bytes of their answers, which the kernel library
computes in this process and the tests' NumPy reference checks."""

import copy
import dataclasses

import attend_kernels
import numpy as np

import dropout
import wire
from gradients import judge_gradients, make_backward
from reference import Case, Mask, judge, round_to, to_bytes

DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("BHLD", "BLHD", "LHD")
MASKS = (Mask(), Mask("causal"), Mask("causal", top_left=True), Mask("causal", left=7),
         Mask("window", left=5, right=3), Mask("window", top_left=True, left=9, right=0))


@dataclasses.dataclass
class Problem:
    request: object  # with raw, without request_id
    answer: list     # the bytes of `raw` in the answer
    backward: bool = False

    def message(self, **fields):
        """The request with these fields."""
        made = copy.deepcopy(self.request)
        for name, value in fields.items():
            setattr(made, name, value)
        return made


class _Bfloat16:
    """A tensor as attend_kernels takes it, of a dtype that NumPy does not have."""

    class device:
        type, index = "cpu", 0

    def __init__(self, bits, dtype="torch.bfloat16"):
        self.bits, self.shape, self.dtype = bits, bits.shape, dtype

    def data_ptr(self):
        return self.bits.ctypes.data

    def stride(self):
        return tuple(s // self.bits.itemsize for s in self.bits.strides)

    def new_empty(self, shape, dtype=None):
        if dtype is None:
            return _Bfloat16(np.zeros(shape, np.uint16))
        return _Bfloat16(np.zeros(shape, np.float32), "torch.float32")


float32 = np.float32  # attend_kernels looks for dtypes in _Bfloat16's module, as in torch


def _native(dtype, array):
    """The array in `dtype`, as the kernel library takes it."""
    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    bits = np.frombuffer(to_bytes(dtype, array), kind).reshape(array.shape).copy()
    return _Bfloat16(bits) if dtype == "bfloat16" else bits


def _bytes(array):
    return (array.bits if isinstance(array, _Bfloat16) else array).tobytes()


def _terms(case, layout):
    """The case's score terms as attend_kernels' arguments."""
    mask = case.mask
    terms = dict(softcap=case.softcap, scale=case.scale, alibi_slopes=case.alibi, sinks=case.sinks,
                 layout=layout, device=None if case.dtype == "bfloat16" else "cpu",
                 causal=mask.kind == "causal",
                 alignment="top_left" if mask.top_left else "bottom_right")
    if mask.kind == "window" or (mask.kind == "causal" and mask.left >= 0):
        terms["window"] = (mask.left, 0 if mask.kind == "causal" else mask.right)
    if case.bias is not None:
        terms["bias"] = np.ascontiguousarray(case.bias, np.float32)
    if layout == "LHD":
        terms.update(cu_seqlens_q=[0, *np.cumsum(case.q_lengths).tolist()],
                     cu_seqlens_k=[0, *np.cumsum(case.kv_lengths).tolist()],
                     max_seqlen_q=max(case.q_lengths), max_seqlen_k=max(case.kv_lengths))
    else:
        terms.update(q_lengths=case.q_lengths, kv_lengths=case.kv_lengths)
    return {name: value for name, value in terms.items() if value is not None}


def _tensors(case, layout):
    return [_native(case.dtype, np.ascontiguousarray(wire.arrange(layout, array, lengths)))
            for array, lengths in ((case.q, case.q_lengths), (case.k, case.kv_lengths),
                                   (case.v, case.kv_lengths))]


def _judged(case, layout, problem):
    """Raises unless the answer is within the reference's bounds."""
    answer = wire.pb.AttendResponse(raw=problem.answer)
    q = problem.request.q
    heads_at = 1 if layout != "BLHD" else 2
    shape = [*q.shape[:-1], case.v.shape[3]]
    answer.o.CopyFrom(wire.tensor(case.dtype, shape))
    rows = [q.shape[heads_at], q.shape[0]] if layout == "LHD" else \
        [q.shape[0], case.q.shape[1], case.q.shape[2]]
    answer.lse.CopyFrom(wire.tensor("float32", rows))
    judge(case, *wire.read_answer(case, layout, answer))
    return problem


def _case(random, dtype, len_q, len_k, heads, kv_heads, dim, dim_v, batch):
    def values(*shape):
        return round_to(dtype, random.standard_normal(shape, np.float32))
    return Case(values(batch, heads, len_q, dim), values(batch, kv_heads, len_k, dim),
                values(batch, kv_heads, len_k, dim_v), dtype)


def _random_case(random, layout):
    heads, kv_heads = ((1, 1), (4, 2), (3, 1), (2, 2))[random.integers(4)]
    dims = (1, 3, 16, 32, 64, 80, 128)
    batch = int(random.integers(1, 4))
    len_q, len_k = int(random.integers(1, 40)), int(random.integers(1, 90))
    case = _case(random, str(random.choice(DTYPES)), len_q, len_k, heads, kv_heads,
                 int(random.choice(dims)), int(random.choice(dims)), batch)
    case.mask = MASKS[random.integers(len(MASKS))]
    if layout == "LHD" or random.random() < 0.3:
        case.q_lengths = [int(random.integers(0, len_q + 1)) for _ in range(batch)]
        case.kv_lengths = [int(random.integers(0, len_k + 1)) for _ in range(batch)]
        if layout == "LHD":  # one sequence has the full length
            case.q_lengths[0], case.kv_lengths[-1] = len_q, len_k
    if random.random() < 0.2:
        case.softcap = 4.0
    if random.random() < 0.2:
        case.scale = 0.3
    if random.random() < 0.2:
        case.alibi = np.abs(random.standard_normal(heads, np.float32)) / 8
    if random.random() < 0.2:
        case.sinks = random.standard_normal(heads, np.float32)
    if random.random() < 0.2:
        case.bias = random.standard_normal((1, heads, len_q, len_k), np.float32)
    return case


def make_forward(random):
    layout = str(random.choice(LAYOUTS))
    case = _random_case(random, layout)
    fields, options = {}, {}
    if random.random() < 0.2:
        p, seed = 0.3, int(random.integers(1 << 63))
        fields = dict(dropout_p=p, dropout_seed=seed)
        options = dict(dropout_p=p, dropout_seed=seed)
        case.kept = dropout.kept(p, seed, case.q.shape[0], case.q.shape[1], case.q.shape[2],
                                 case.k.shape[2])
    request = wire.make_request(case, layout, return_lse=True, **fields)
    answer = attend_kernels.attention(*_tensors(case, layout), return_lse=True,
                                      **_terms(case, layout), **options)
    return _judged(case, layout, Problem(request, [_bytes(each) for each in answer]))


def make_large(random):
    """A request large enough for copy threads."""
    case = _case(random, "float32", 8, 4200, 1, 1, 128, 16, 1)
    request = wire.make_request(case, return_lse=True)
    answer = attend_kernels.attention(case.q, case.k, case.v, return_lse=True, device="cpu")
    return _judged(case, "BHLD", Problem(request, [_bytes(each) for each in answer]))


def make_gradients(random):
    case = _random_case(random, "BHLD")
    case.dtype, case.bias = "float32", None
    d_o, d_lse, o, lse = make_backward(case, random)
    request = wire.make_request(case)
    for name, array in (("o", o), ("lse", lse), ("d_o", d_o), ("d_lse", d_lse)):
        getattr(request.backward, name).CopyFrom(wire.tensor("float32", array.shape))
        request.raw.append(to_bytes("float32", array))
    got = attend_kernels.attention_backward(d_o, case.q, case.k, case.v, o, lse, d_lse=d_lse,
                                            **_terms(case, "BHLD"))
    judge_gradients(case, d_o, d_lse, dict(zip(("d_q", "d_k", "d_v"), got)))
    return Problem(request, [_bytes(each) for each in got], backward=True)


class Sequence:
    """Q, K and V of a sequence, of which sessions hold a prefix."""
    HEADS, KV_HEADS, DIM, DIM_V, ROWS = 4, 2, 32, 24, 300

    def __init__(self, random, dtype):
        self.dtype = dtype
        case = _case(random, dtype, self.ROWS, self.ROWS, self.HEADS, self.KV_HEADS, self.DIM,
                     self.DIM_V, 1)
        self.q, self.k, self.v = case.q, case.k, case.v
        self._answers = {}

    def rows(self, name, begin, end):
        return to_bytes(self.dtype, getattr(self, name)[:, :, begin:end])

    def answer(self, length, queries):
        """The causal answer for the last `queries` of the first `length` rows."""
        if (length, queries) not in self._answers:
            case = Case(self.q[:, :, length - queries:length], self.k[:, :, :length],
                        self.v[:, :, :length], self.dtype, Mask("causal"))
            made = attend_kernels.attention(*_tensors(case, "BHLD"), return_lse=True,
                                            **_terms(case, "BHLD"))
            self._answers[length, queries] = [_bytes(each) for each in made]
        return self._answers[length, queries]


@dataclasses.dataclass
class Problems:
    forward: list
    large: list
    backward: list
    sequences: list

    @staticmethod
    def make(seed, count=48):
        random = np.random.default_rng(seed)
        return Problems([make_forward(random) for _ in range(count)], [make_large(random)],
                        [make_gradients(random) for _ in range(count // 4)],
                        [Sequence(random, dtype) for dtype in DTYPES])
