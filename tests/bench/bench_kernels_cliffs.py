# SPDX-License-Identifier: Apache-2.0
"""Variants of the forward pass: bool masks, biases, ALiBi, softcap, O in float32, unaligned memory,
head dims between the tiles', a part of the keys, and prompts in pages. Each is timed as a whole
call of attend_kernels, including the packing of masks, and shown as a multiple of the plain call of
the same shape. PyTorch's cuDNN gets the same mask or bias, FlashAttention-4 softcap and pages. Bool
masks are also timed as packed bits through the C ABI, with the kernel that is selected for them and
with cuda_flash_sm80."""

import ctypes
import dataclasses
import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import bench_kernels_cells as cells
import bench_kernels_contenders as entries
import bench_kernels_fa4 as fa4
from bench_kernels_truth import UNIT, UNITS
from bench_kernels_turns import compete

import attend_kernels
from attend_kernels import _library, _tensors

OURS, CUDNN, PLAIN = "attend", "cudnn", "plain"
BATCH, HEADS, LENGTH = 4, 16, 4096
LONG = {"batch": 1, "length": 16384}
# Head dims, and the same rounded up to a multiple of 8.
ODD = {60: 64, 100: 104, 127: 128}
PADDING, BLOCK, SEEN_BLOCKS, DOCUMENTS = 300, 128, 0.1, 8
SOFTCAP = 30.0


@dataclasses.dataclass
class Case:
    """A line of the table: inputs, further arguments of attention(), and the same for float64."""
    name: str
    tensors: tuple
    options: dict = dataclasses.field(default_factory=dict)
    causal: bool = False
    dense: tuple = None  # K and V, if those of `tensors` are in pages

    def work(self):
        q, v = self.tensors[0], self.tensors[2]
        pairs = q.shape[2] * (q.shape[2] + 1) / 2 if self.causal else \
            q.shape[2] * (self.dense or self.tensors[1:])[0].shape[2]
        return 2.0 * (q.shape[3] + v.shape[3]) * pairs * q.shape[0] * q.shape[1]


def inputs(dim, device="cuda:0", batch=BATCH, heads=HEADS, length=LENGTH, shift=0):
    """Q, K and V; `shift`: their offset from alignment in elements."""
    rows = [torch.randn(batch, heads, length, dim + 8, device=device, dtype=torch.bfloat16)
            for _ in range(3)]
    return tuple(x[..., shift:shift + dim] if shift else x[..., :dim].contiguous() for x in rows)


def masks(q):
    """{name: bool tensor, True where a key is visible}."""
    batch, heads, length = q.shape[:3]
    blocks = -(-length // BLOCK)
    some = torch.rand(1, heads, blocks, blocks, device=q.device) < SEEN_BLOCKS
    some = some.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[..., :length, :length]
    ends = torch.tensor([length - min(PADDING * b, length - 1) for b in range(batch)],
                        device=q.device)
    padding = torch.arange(length, device=q.device) < ends[:, None]
    documents = torch.arange(length, device=q.device) * DOCUMENTS // length
    return {"random mask [1, 1, L, L]": torch.rand(1, 1, length, length, device=q.device) < 0.5,
            "random mask [B, H, L, L]": torch.rand(batch, heads, length, length,
                                                   device=q.device) < 0.5,
            "mask that hides nothing [1, 1, L, L]": torch.ones(1, 1, length, length,
                                                               device=q.device) > 0,
            "padding mask [B, 1, 1, L]": padding[:, None, None],
            "mask of 10 % of the blocks [1, H, L, L]": some.contiguous(),
            "mask of 10 % of the blocks [1, 1, L, L]": some[:, :1].contiguous(),
            f"mask of {DOCUMENTS} documents [1, 1, L, L]":
                (documents == documents[:, None])[None, None]}


def biases(q, padding):
    heads, length = q.shape[1:3]

    def random(*sizes, dtype=torch.float32):
        return torch.randn(*sizes, length, length, device=q.device, dtype=dtype)

    def hidden(value):
        zeros = torch.zeros(padding.shape, device=q.device, dtype=q.dtype)
        return zeros.masked_fill(~padding, value)

    return {"padding of -inf [B, 1, 1, L]": hidden(-math.inf),
            "padding of the lowest [B, 1, 1, L]": hidden(torch.finfo(q.dtype).min),
            "bias of 16 bits [1, H, L, L]": random(1, heads, dtype=q.dtype),
            "bias of 16 bits [1, 1, L, L]": random(1, 1, dtype=q.dtype),
            "bias of float32 [1, H, L, L]": random(1, heads)}


def in_pages(name, tensors, rows):
    """The same K and V in pages of `rows` keys, in a random order."""
    q, k, v = tensors
    batch, heads, length, _ = k.shape
    count = length // rows
    table = torch.randperm(batch * count, device=q.device).view(batch, count)
    paged = []
    for x in (k, v):
        pages = x.view(batch, heads, count, rows, -1).transpose(1, 2).flatten(0, 1)
        paged.append(torch.empty_like(pages).index_copy_(0, table.flatten(), pages))
    lengths = torch.full((batch,), length, device=q.device, dtype=torch.int64)
    options = {"page_table": table.to(torch.int32), "kv_lengths": lengths, "causal": True}
    return Case(name, (q, *paged), options, causal=True, dense=(k, v))


def repacked(dim, **sizes):
    """Inputs that attention() copies to 16-byte boundaries."""
    yield Case("q, k and v two bytes off", inputs(dim, shift=1, **sizes))
    yield Case("q, k and v eight bytes off", inputs(dim, shift=4, **sizes))
    for odd in (odd for odd, rounded in ODD.items() if rounded == dim):
        yield Case(f"D of {odd}", inputs(odd, **sizes))
        yield Case(f"D of {odd}, causal", inputs(odd, **sizes), {"causal": True}, causal=True)


def cases(dim, **sizes):
    """Yields the cases, so that inputs are only made when needed. Times are relative to the first
    case, those with a causal mask to the second."""
    tensors = inputs(dim, **sizes)
    yield Case(PLAIN, tensors)
    yield Case(f"{PLAIN}, causal", tensors, {"causal": True}, causal=True)
    yield from repacked(dim, **sizes)
    if dim not in (64, 128) or sizes:
        for rows in (16, 64) if dim in (192, 256) else ():
            yield in_pages(f"pages of {rows}, causal", tensors, rows)
        return
    seen = masks(tensors[0])
    for name, mask in seen.items():
        yield Case(name, tensors, {"bias": mask})
    padding = seen["padding mask [B, 1, 1, L]"]
    yield Case("padding mask, causal", tensors, {"bias": padding, "causal": True}, causal=True)
    yield Case("random mask, causal", tensors,
               {"bias": seen["random mask [1, 1, L, L]"], "causal": True}, causal=True)
    for name, bias in biases(tensors[0], padding).items():
        yield Case(name, tensors, {"bias": bias})
    slopes = torch.rand(tensors[0].shape[1], device=tensors[0].device) * 0.1
    for words, options in {"ALiBi": {"alibi_slopes": slopes}, "softcap": {"softcap": SOFTCAP},
                           "softcap of 3": {"softcap": 3.0},
                           "O in float32": {"o_dtype": "float32"}}.items():
        yield Case(words, tensors, options)
        yield Case(f"{words}, causal", tensors, {**options, "causal": True}, causal=True)
    yield Case("the second half of the keys, causal", tensors,
               {"causal": True, "key_offset": tensors[0].shape[2]}, causal=True)
    for rows in (16, 64):
        yield in_pages(f"pages of {rows}, causal", tensors, rows)


def heads_of(case, b, h):
    """Q, K and V of one head in float64."""
    return [x[b, h].double() for x in (case.tensors[0], *(case.dense or case.tensors[1:]))]


def truth(case, b, h, head, kept=1.0):
    """O of one head from its Q, K and V in float64. `kept`: dropout's factors of the weights."""
    q, k, v = head
    scores = q @ k.T / math.sqrt(q.shape[1])
    if "softcap" in case.options:
        cap = case.options["softcap"]
        scores = cap * torch.tanh(scores / cap)
    keys = torch.arange(k.shape[0], device=q.device)
    rows = torch.arange(q.shape[0], device=q.device)[:, None]
    bias = case.options.get("bias")
    if bias is not None:
        mine = bias[min(b, bias.shape[0] - 1), min(h, bias.shape[1] - 1)]
        if bias.dtype == torch.bool:
            scores = scores.masked_fill(~mine, -math.inf)
        else:
            scores = scores + mine
    if "alibi_slopes" in case.options:
        scores = scores - case.options["alibi_slopes"][h].double() * (keys - rows).abs()
    if case.causal:
        scores = scores.masked_fill(keys > rows, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)  # rows without keys are 0
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights * kept) @ v


def places(case):
    """The (b, h) that are judged: the first and the last head."""
    return (0, 0), (case.tensors[0].shape[0] - 1, case.tensors[0].shape[1] - 1)


def judge_of(case, truths, names=("O",)):
    """A judge for compete(): compares the named outputs with {(b, h): truths}, under the bound of
    bench_kernels_truth."""
    q = case.tensors[0]
    bound = UNITS * (UNIT[q.dtype] + UNIT[torch.float32] * (4 + math.sqrt(q.shape[2]) / 2))

    def judge(outputs):
        found, fault = {}, None
        for n, (name, output) in enumerate(zip(names, outputs)):
            # If the mask hides all keys of a head, anything but 0 is wrong.
            norms = [(output[place].double() - right[n]).norm() / right[n].norm().clamp(min=1e-30)
                     for place, right in truths.items()]
            found[name] = norm = torch.stack(norms).max().item()  # NaN if any is
            if not norm <= bound:
                fault = fault or f"{name} is off by {norm:.1e}, bound {bound:.1e}"
        return found, fault

    return judge


class Ours(entries.Contender):
    """attention() with the options of the case."""
    is_attend = True

    def __init__(self, case):
        super().__init__(OURS)
        self.case = case
        q, v = case.tensors[0], case.tensors[2]
        dtype = torch.float32 if "o_dtype" in case.options else q.dtype
        self.out = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)

    def prepare(self, sets):
        self.sets = sets

    def poison(self, n):
        self.out.fill_(math.nan)

    def run(self, n):
        return [attend_kernels.attention(*self.case.tensors, out=self.out, **self.case.options)]


class Bits(entries.Contender):
    """A kernel with the mask as bits: a call of the C ABI, without attention()'s overhead."""
    is_attend = True

    def __init__(self, case, kernel, name):
        super().__init__(name)
        self.case, self.kernel = case, kernel

    def prepare(self, sets):
        q, k, v = self.case.tensors
        mask = self.case.options.get("bias")
        if mask is None or mask.dtype != torch.bool:
            raise entries.CannotRun("boolean masks are not supported")
        self.bits = _tensors.packed_mask(mask)
        self.out = torch.empty_like(q)
        self.library, needed = _library.library(), ctypes.c_int64()
        p = _library.Params(
            struct_bytes=ctypes.sizeof(_library.Params), dtype=_library.DTYPES["bfloat16"],
            batch=q.shape[0], heads_q=q.shape[1], heads_kv=k.shape[1], len_q=q.shape[2],
            len_k=k.shape[2], dim=q.shape[3], dim_v=v.shape[3], window_left=-1,
            window_right=0 if self.case.causal else -1, scale=1 / math.sqrt(q.shape[3]),
            config=-1, kernel=self.kernel.encode(), bias=self.bits.data_ptr(),
            bias_dtype=_library.BIT)
        for name, tensor in zip("qkvo", (q, k, v, self.out)):
            setattr(p, name, _library.TensorStruct(tensor.data_ptr(), *tensor.stride()[:3]))
        p.bias_stride_b, p.bias_stride_h, p.bias_stride_q = (
            0 if size == 1 else 8 * stride
            for size, stride in zip(self.bits.shape[:3], self.bits.stride()[:3]))
        self.params = (_library.Params * 1)(p)
        self.check(self.library.attend_batch_workspace_bytes(self.params, 1, ctypes.byref(needed)))
        self.workspace = torch.zeros(needed.value + 256, dtype=torch.uint8, device=q.device)
        self.place = (self.workspace.data_ptr() + 255) // 256 * 256
        self.needed = needed.value

    def check(self, code):
        if code != 0:
            raise entries.CannotRun(self.library.attend_last_error().decode(errors="replace"))

    def poison(self, n):
        self.out.fill_(math.nan)

    def run(self, n):
        self.check(self.library.attend_run_batch(self.params, 1, self.place, self.needed, None))
        return [self.out]


def sdpa_mask(case):
    """The mask or bias of a case for SDPA, expanded, which is free; None if SDPA cannot run it."""
    if set(case.options) - {"bias", "causal"} or {"bias", "causal"} <= set(case.options):
        raise entries.CannotRun("SDPA does not support this")
    q, k, _ = case.tensors
    bias = case.options.get("bias")
    return None if bias is None else bias.expand(*q.shape[:3], k.shape[2])


class Cudnn(entries.Contender):
    """SDPA with the same mask or bias."""

    def __init__(self, case):
        super().__init__(CUDNN)
        self.case = case

    def prepare(self, sets):
        self.sets, self.mask = sets, sdpa_mask(self.case)

    def context(self):
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)

    def run(self, n):
        return [sdpa(*self.case.tensors, attn_mask=self.mask, is_causal=self.case.causal)]


def fa4_options(case):
    """Further arguments for a case; raises CannotRun if FA4 does not support it."""
    if set(case.options) - {"causal", "softcap"}:
        raise entries.CannotRun("FA4 does not support this, or only through a user's program")
    return {"causal": case.causal, "softcap": case.options.get("softcap", 0.0)}


class Fa4(entries.Contender):
    """FA4 with the tensors as they are; copies that it makes are part of the time."""

    def __init__(self, case):
        super().__init__(cells.FA4)
        self.case = case

    def prepare(self, sets):
        self.sets, case = sets, self.case
        with fa4.first_call():
            if "page_table" in case.options:
                self.options = {"causal": True, "page_table": case.options["page_table"],
                                "seqused_k": case.options["kv_lengths"].int()}
                self.function = fa4.module()[0].flash_attn_varlen_func
            else:
                self.options = fa4_options(case)
                self.function = fa4.module()[0].flash_attn_func
            self.run(0)

    def run(self, n):
        o, *_ = self.function(*(x.transpose(1, 2) for x in self.case.tensors), **self.options)
        return [o.transpose(1, 2)]


def lines_of(name, case, contenders, judge, kernel, plain, options):
    """A line for each selected contender. `plain`: times of the plain cases by whether they are
    causal; adds to it."""
    lines, sets = [], [[(case, case.tensors)]]
    results = compete(entries.wanted(contenders, options), sets, judge, options)
    if case.name.startswith(PLAIN):
        plain[case.causal] = results[OURS].get("ms", math.nan)
    for contender, result in results.items():
        line = {"cell": name, "contender": contender, "kernel": kernel, **result}
        if "ms" in line:
            line["tflops"] = case.work() / line["ms"] / 1e9
            line["of_plain"] = line["ms"] / plain[case.causal]
        lines.append(line)
        print({key: line[key] for key in line if key != "errors"}, flush=True)
    return lines


def wanted_cases(every, dim, options, in_time):
    """(name, case) of the selected cases and of all plain ones."""
    for case in every:
        batch, heads, length, _ = case.tensors[0].shape
        name = f"B{batch} H{heads} L{length} D{dim} bfloat16 {case.name}"
        if case.name.startswith(PLAIN) or cells.is_listed(name, options.filter):
            if in_time(name):
                yield name, case


def cliffs(options, in_time):
    """A line for each contender of each case: {cell, contender, kernel, ms, tflops, of_plain, ...},
    with `failure` instead of the times if there is none."""
    lines = []
    every = [(dim, {}) for dim in (64, 128, 72, 80, 104, 112, 192, 256)]
    for dim, sizes in every + [(dim, LONG) for dim in (64, 104, 128)]:
        plain = {}
        for name, case in wanted_cases(cases(dim, **sizes), dim, options, in_time):
            contenders = [Ours(case), Cudnn(case)]
            contenders += [Fa4(case)] if fa4.module()[0] else []
            if case.options.get("bias") is not None and case.options["bias"].dtype == torch.bool:
                contenders += [Bits(case, "auto", "bits"),
                               Bits(case, "cuda_flash_sm80", "bits, cuda_flash_sm80")]
            truths = {place: [truth(case, *place, heads_of(case, *place))]
                      for place in places(case)}
            kernel = attend_kernels.select(*case.tensors, **case.options)[0]
            lines += lines_of(name, case, contenders, judge_of(case, truths), kernel, plain,
                              options)
        torch.cuda.empty_cache()
    return lines
