# SPDX-License-Identifier: Apache-2.0
"""Random combinations of all features, forward and backward, compared with the formulas of
reference.py in double precision. ATTEND_TEST_SEED=N repeats the case that failed with seed N."""

import os

import attend_kernels
import dropout
import numpy as np
import pytest

from cuda_tensor import Bfloat16, Device, PtrTensor
from reference import MASKED, attention, bounds, gradients, scores_of, spoil, summed_to

UNITS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LARGEST = {"float32": np.finfo(np.float32).max, "float16": 65504.0, "bfloat16": 255 * 2.0**120}
CASES = 100
SIZES = [1, 2, 3, 7, 16, 17, 33, 64, 65, 96, 127, 130]
DIMS = [1, 3, 8, 16, 24, 31, 64, 80, 96, 128]


def to_kernel(values, dtype, device):
    """The values as a kernel takes them: a NumPy array, or for bfloat16 a Bfloat16 on the CPU and a
    PyTorch tensor on a GPU."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if device == "cpu":
        return Bfloat16(bits)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).cuda()


def from_kernel(got):
    """The answer as a NumPy array; bfloat16 becomes float32."""
    if isinstance(got, Bfloat16):
        return (got.values.astype(np.uint32) << 16).view(np.float32)
    if isinstance(got, PtrTensor):
        return got.values
    return got if isinstance(got, np.ndarray) else got.float().cpu().numpy()


class Drawn:
    """A random case: arrays in BHLD with values that the dtype can represent, the options of the
    kernels (`given`) and those of the formulas (`terms`)."""

    def __init__(self, seed):
        self.random = random = np.random.default_rng(seed)
        self.dtype = str(random.choice(list(UNITS)))
        self.b, group, self.hkv = (int(random.integers(1, 4)) for _ in range(3))
        self.hq, (self.lq, self.lk) = group * self.hkv, random.choice(SIZES, 2)
        self.d, self.dv = random.choice(DIMS, 2)
        self.q, self.k, self.v, self.d_o = (self._normal(*shape) for shape in (
            (self.b, self.hq, self.lq, self.d), (self.b, self.hkv, self.lk, self.d),
            (self.b, self.hkv, self.lk, self.dv), (self.b, self.hq, self.lq, self.dv)))
        self.q *= self.as_dtype(random.choice([0.25, 1, 4]))
        self.d_lse = self._normal(self.b, self.hq, self.lq) if self._chance(0.5) else None
        self.given, self.terms, self.whole = {}, {}, {}  # whole: `given` without key_offset etc.
        self.far = False  # scores are so large that float32 cannot represent LSE well
        self.o_dtype = "float32" if self._chance(0.2) else self.dtype
        self._draw_scores()
        if self._chance(0.25):
            self._draw_common_part()
        self._draw_mask()
        self._draw_lengths()
        self._draw_nan()
        self.layout = self._draw_layout()
        if self._chance(0.25):
            p, number = float(random.choice([0.1, 0.5, 0.9])), int(random.integers(2**63))
            for given in (self.given, self.whole):
                given.update(dropout_p=p, dropout_seed=number)
            self.kept = dropout.kept(p, number, self.b, self.hq, self.lq, self.lk)
        else:
            self.kept = np.ones((self.b, 1, 1, 1))

    def _chance(self, probability):
        return self.random.random() < probability

    def as_dtype(self, values, dtype=None):
        """The values rounded to the dtype, in float32."""
        values, dtype = np.asarray(values, np.float32), dtype or self.dtype
        if dtype == "bfloat16":
            return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return values.astype(dtype).astype(np.float32)

    def _normal(self, *shape):
        return self.as_dtype(self.random.standard_normal(shape))

    def _both(self, **options):
        self.given.update(options)
        self.terms.update(options)

    def _draw_scores(self):
        if self._chance(0.3):
            self._both(scale=float(np.float32(self.random.choice([0.05, 0.3, -0.2]))))
        if self._chance(0.25):
            self._both(softcap=float(self.random.choice([0.5, 3.0, 30.0])))
        if self._chance(0.3):
            self._both(sinks=self.random.standard_normal(self.hq).astype(np.float32))
        if self._chance(0.3):
            slopes = self.random.random(self.hq).astype(np.float32)
            self._both(alibi_slopes=slopes)
        if self._chance(0.5):
            shape = [int(self.random.choice([1, size])) for size in (self.b, self.hq, self.lq)]
            self._draw_bias((*shape, self.lk))

    def _draw_common_part(self):
        """Adds a common vector to all keys, so that all scores are far from 0."""
        part, scale = self.random.standard_normal(self.d), self.given.get("scale", self.d ** -0.5)
        size = self.random.choice([30, 300, 2500, 10000]) / abs(scale)
        part *= np.sqrt(size) / np.linalg.norm(part)
        self.k = self.as_dtype(0.3 * self.k + part)
        self.q = self.as_dtype(0.3 * self.q + self.random.choice([-1, 1]) * part)
        self.far = True

    def _draw_bias(self, shape):
        hidden = self.random.random(shape) < self.random.choice([0, 0.3, 0.95])
        if self._chance(0.4):
            self.given["bias"] = ~hidden
            self.terms["bias"] = np.where(hidden, MASKED, 0).astype(np.float32)
            return
        self.bias_dtype = str(self.random.choice(["float32", "float16", self.dtype]))
        bias, masked, most = self.random.standard_normal(shape), MASKED, LARGEST[self.bias_dtype]
        if self._chance(0.4):  # masks with a finite number, and masks some rows entirely
            masked = max(-most, self.random.choice([-1e4, -1e9, -LARGEST["float32"]]))
            hidden |= self.random.random((*shape[:3], 1)) < 0.3
            self.far = True
        elif self._chance(0.3):
            bias += self.random.choice([-1, 1]) * min(1e7, most / 2)
            self.far = True
        self._both(bias=self.as_dtype(np.where(hidden, masked, bias), self.bias_dtype))

    def _draw_mask(self):
        alignment = str(self.random.choice(["bottom_right", "top_left"]))
        if self._chance(0.4):
            self._both(causal=True, alignment=alignment)
        elif self._chance(0.4):
            left, right = (int(self.random.integers(-1, self.lk + 2)) for _ in range(2))
            self._both(window=(left, right), alignment=alignment)

    def _draw_lengths(self):
        """Lengths of sequences, with NaN beyond them; or a part of the keys."""
        self.q_lengths, self.k_lengths = [self.lq] * self.b, [self.lk] * self.b
        self.part = slice(0, int(self.lk))
        if self._chance(0.3):
            self.q_lengths, self.k_lengths = (
                [int(n) for n in self.random.integers(0, size + 1, self.b)]
                for size in (self.lq, self.lk))
            self.given.update(q_lengths=self.q_lengths, kv_lengths=self.k_lengths)
            for n in range(self.b):
                for array, lengths in ((self.q, self.q_lengths), (self.d_o, self.q_lengths),
                                       (self.k, self.k_lengths), (self.v, self.k_lengths)):
                    array[n, :, lengths[n]:] = np.nan
        elif not self.far and self._chance(0.2):
            begin, end = sorted(int(n) for n in self.random.integers(0, self.lk + 1, 2))
            self.part = slice(begin, end)
            self.whole = dict(self.given)
            self.given.update(key_offset=begin, keys_after=int(self.lk) - end)
            if "bias" in self.given:
                self.given["bias"] = self.given["bias"][..., self.part]

    def _draw_nan(self):
        """Makes K or V of one key NaN, which some rows may not see."""
        n = int(self.random.integers(self.b))
        if self.k_lengths[n] == 0 or self.is_part() or not self._chance(0.2):
            return
        array = self.k if self._chance(0.5) else self.v
        array[n, self.random.integers(self.hkv), self.random.integers(self.k_lengths[n])] = np.nan

    def _draw_layout(self):
        names = ["BHLD", "BLHD"] + ["pages"] * (not self.is_part())
        packs = not self.is_part() and "bias" not in self.given
        return str(self.random.choice(names + ["LHD"] * packs))

    def is_part(self):
        return self.part != slice(0, int(self.lk))

    def of_sequence(self, n, hides=False):
        """The n-th sequence's arrays and terms; `hides` masks the keys outside the part."""
        rows, keys = slice(self.q_lengths[n]), slice(self.k_lengths[n])
        terms = dict(self.terms, kept=self.kept[n:n + 1, :, rows, keys]
                     if self.kept.shape[-1] > 1 or "dropout_p" in self.given else 1.0)
        bias = terms.get("bias")
        if bias is not None:
            bias = np.broadcast_to(bias, (self.b, self.hq, self.lq, self.lk))[n:n + 1, :, rows,
                                                                               keys]
        if hides and self.is_part():
            outside = np.full(self.lk, MASKED, np.float32)
            outside[self.part] = 0
            bias = outside[None, None, None, :] + (0 if bias is None else bias)
            bias = np.broadcast_to(bias, (1, self.hq, self.lq, self.lk))
        if bias is not None:
            terms["bias"] = bias
        if self.d_lse is not None:
            terms["d_lse"] = self.d_lse[n:n + 1, :, rows]
        arrays = [self.q[n:n + 1, :, rows], self.k[n:n + 1, :, keys], self.v[n:n + 1, :, keys],
                  self.d_o[n:n + 1, :, rows]]
        return arrays, terms

    def wanted(self):
        names = ["q", "k", "v"]
        names += ["bias"] if "bias" in self.given and self.given["bias"].dtype != bool else []
        return tuple(names + (["sinks"] if "sinks" in self.given else []))

    def __str__(self):
        sizes = f"{self.dtype} b {self.b} hq {self.hq} hkv {self.hkv} lq {self.lq} lk {self.lk}"
        sizes += f" d {self.d} dv {self.dv} o {self.o_dtype}"
        return f"{sizes} {self.layout} {sorted(self.given)}"


def packed(array, lengths):
    """[B, H, L, ...] to [rows, H, ...], without the rows beyond the lengths."""
    return np.concatenate([one[:, :n].swapaxes(0, 1) for one, n in zip(array, lengths)])


def unpacked(array, lengths, wanted_rows, rest=0):
    out = np.full((len(lengths), array.shape[1], wanted_rows, *array.shape[2:]), rest, np.float32)
    for one, n, end in zip(out, lengths, np.cumsum(lengths)):
        one[:, :n] = array[end - n:end].swapaxes(0, 1)
    return out


class Layout:
    """Converts a case to the layout that the kernels get, and their answers back to BHLD."""

    def __init__(self, case):
        self.case, self.name = case, case.layout
        self.options = dict(case.given, layout="BLHD" if self.name == "BLHD" else "BHLD")
        if self.name == "LHD":
            for name in ("q_lengths", "kv_lengths"):
                self.options.pop(name, None)
            self.options.update(layout="LHD", **{
                name: [0, *np.cumsum(lengths).tolist()] for name, lengths in
                (("cu_seqlens_q", case.q_lengths), ("cu_seqlens_k", case.k_lengths))})
        if self.name == "pages":
            self.table = case.random.permutation(case.b * -(-int(case.lk) // 16)).reshape(
                case.b, -1).astype(np.int32)
            self.options.update(page_table=self.table, kv_lengths=case.k_lengths)
            if "bias" in case.given:  # it has to be as wide as the pages
                bias = case.given["bias"]
                more = 16 * self.table.shape[1] - bias.shape[3]
                self.options.update(bias=np.pad(bias, [(0, 0)] * 3 + [(0, more)]))

    def of(self, array, of_keys=False):
        case = self.case
        if self.name == "LHD":
            return packed(array, case.k_lengths if of_keys else case.q_lengths)
        if self.name == "pages" and of_keys:
            wide = np.full((*array.shape[:2], 16 * self.table.shape[1], array.shape[3]), np.nan,
                           np.float32)
            wide[:, :, :array.shape[2]] = array
            pages = np.zeros((self.table.size, array.shape[1], 16, array.shape[3]), np.float32)
            pages[self.table] = wide.reshape(*array.shape[:2], -1, 16,
                                             array.shape[3]).swapaxes(1, 2)
            return pages
        return array.swapaxes(1, 2) if self.name == "BLHD" else array

    def back(self, name, array):
        case = self.case
        if name in ("bias", "sinks"):
            return array
        if self.name == "LHD":
            lengths, rows = (case.k_lengths, case.lk) if name in "kv" else (case.q_lengths, case.lq)
            array = array.swapaxes(0, 1) if name == "lse" else array
            return unpacked(array, lengths, rows, -np.inf if name == "lse" else 0)
        return array.swapaxes(1, 2) if self.name == "BLHD" and name != "lse" else array


def answers(case, kernel, device):
    """A dict of "o", "lse" and the gradients as NumPy arrays in BHLD."""
    layout, part = Layout(case), (slice(None), slice(None), case.part)
    q, k, v = (to_kernel(layout.of(x, of_keys), case.dtype, device) for x, of_keys in (
        (case.q, False), (case.k[part], True), (case.v[part], True)))
    place = dict(layout.options, kernel=kernel, device=device if case.dtype != "bfloat16" else None)
    for given in (place, case.whole):
        if "bias" in given and given["bias"].dtype != bool:
            given["bias"] = to_kernel(given["bias"], case.bias_dtype, device)
    o_dtype = None if case.o_dtype == case.dtype else "float32"
    found = attend_kernels.attention(q, k, v, return_lse=True, o_dtype=o_dtype, **place)
    names, merged = ("o", "lse"), found
    if case.is_part():  # the gradients of a part need O and LSE of the whole
        whole = (to_kernel(layout.of(x), case.dtype, device) for x in (case.q, case.k, case.v))
        merged = attend_kernels.attention(
            *whole, return_lse=True, o_dtype=o_dtype,
            **{**place, **case.whole, "key_offset": 0, "keys_after": 0})
    if case.layout != "pages":  # pages have no gradients
        d_o, d_lse = layout.of(case.d_o), case.d_lse
        d_o = to_kernel(d_o, case.dtype, device) if o_dtype is None else like(merged[0], d_o)
        if d_lse is not None:
            d_lse = packed(d_lse, case.q_lengths).T.copy() if case.layout == "LHD" else d_lse
            d_lse = like(merged[1], d_lse)
        names += case.wanted()
        found += attend_kernels.attention_backward(d_o, q, k, v, *merged, d_lse=d_lse,
                                                   wanted=case.wanted(), **place)
    return {name: layout.back(name, from_kernel(x)) for name, x in zip(names, found)}


def like(tensor, values):
    """The values in float32, as a tensor of the same type and device."""
    values = np.ascontiguousarray(values, np.float32)
    if isinstance(tensor, np.ndarray):
        return values
    return PtrTensor(values, Device("cpu")) if isinstance(tensor, PtrTensor) else \
        tensor.new_tensor(values)


def close(name, got, wanted, within):
    """Asserts that values are within the bound where the truth is finite, and equal elsewhere."""
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    got, finite = got.astype(float), np.isfinite(wanted)
    assert np.array_equal(got[~finite], wanted[~finite], equal_nan=True), name
    off, within = np.abs(got - np.where(finite, wanted, 0))[finite], within[finite]
    assert (off <= within).all(), f"{name}: off by {off[~(off <= within)]}, beside {within.max()}"


def judge_weights(case, n, got, work):
    """Each row's weights sum to 1, so the sum of dV equals the sum of dO over the rows that see a
    key. The bound allows for the rounding of an LSE of up to 256."""
    (q, k, v, d_o), terms = case.of_sequence(n)
    if case.is_part() or {"sinks", "dropout_p"} & case.given.keys() or "v" not in got or \
            np.isnan(k).any() or np.isnan(v).any():
        return
    terms.pop("kept"), terms.pop("d_lse", None)
    sees = (scores_of(q, k, **terms)[0] > MASKED).any(-1)
    d_o = (d_o * sees[..., None]).astype(float)
    d_o = d_o.reshape(1, case.hkv, case.hq // case.hkv * d_o.shape[2], case.dv)
    d_v, unit = got["v"][n:n + 1].astype(float), UNITS[case.dtype]
    within = unit * np.abs(d_v).sum(2) + (work + 2.0**-15) * np.abs(d_o).sum(2)
    close("sum of v", d_v.sum(2), d_o.sum(2), within + d_v.shape[2] * 2.0**-24)


def judge(case, got, work):
    """Judges each sequence alone; the gradients of bias and sinks, which sequences share, are
    summed first."""
    shape = (case.b, case.hq, case.lq, case.lk)
    summed = {"bias": (np.zeros(shape), np.zeros(shape)),
              "sinks": (np.zeros(case.hq), np.zeros(case.hq))}
    for n in range(case.b):
        (q, k, v, d_o), terms = case.of_sequence(n)
        units, given = dict(unit=UNITS[case.dtype], work=work), (q, k, v, terms)
        k, v = np.nan_to_num(k), np.nan_to_num(v)
        truth = gradients(q, k, v, d_o, part=case.part, **terms)
        corrects = case.dtype != "float32" and not case.is_part()
        within = bounds(q, k, v, d_o, part=case.part, corrects_delta=corrects, **units, **terms)
        _, terms = case.of_sequence(n, hides=True)
        hidden = bounds(q, k, v, d_o, **units, **terms)
        terms.pop("d_lse", None)
        truth["o"], truth["lse"] = attention(q, k, v, **terms)
        spoil(truth, *given, masks=case.given.get("bias", np.ones(1)).dtype == bool)
        judge_weights(case, n, got, work)
        within.update(o=hidden["o"], lse=hidden["lse"])
        rows, keys = slice(case.q_lengths[n]), slice(case.k_lengths[n])
        for name in truth.keys() & got.keys():
            wanted = truth[name]
            if name == "bias":
                for total, one in zip(summed[name], (wanted, within[name])):
                    total[n:n + 1, :, rows, keys] = one
            elif name == "sinks":
                for total, one in zip(summed[name], (wanted, within[name])):
                    total += one
            else:
                of_keys = name in "kv"
                used = case.part if of_keys else slice(None)
                whole = got[name][n:n + 1]
                inside = keys if of_keys and not case.is_part() else \
                    slice(None) if of_keys else rows
                close(name, whole[:, :, inside], wanted[:, :, used], within[name][:, :, used])
                rest = np.delete(whole, np.r_[inside], 2) if inside != slice(None) else whole[:0]
                assert (rest == (-np.inf if name == "lse" else 0)).all(), name
    for name in summed.keys() & got.keys():
        truth, within = summed[name]
        if name == "bias":
            given = (*case.terms["bias"].shape[:3], case.lk)
            truth, within = (summed_to(x, given)[..., case.part] for x in (truth, within))
        close(name, got[name], truth, within)


def seeds():
    fixed = os.environ.get("ATTEND_TEST_SEED")
    return [int(fixed)] if fixed else np.random.default_rng().integers(2**63, size=CASES).tolist()


def judge_all(kernel, device, work=lambda dtype: UNITS["float32"]):
    for seed in seeds():
        case = Drawn(seed)
        try:
            judge(case, answers(case, kernel, device), work(case.dtype))
        except (AssertionError, attend_kernels.Error) as failure:
            raise AssertionError(f"ATTEND_TEST_SEED={seed} {kernel}: {case}") from failure


@pytest.mark.cpu
@pytest.mark.parametrize("kernel", ["auto", "cpu_reference"])
def test_random_problems_on_the_cpu(kernel):
    judge_all(kernel, "cpu")


@pytest.mark.gpu
def test_random_problems_on_a_gpu():
    judge_all("auto", "cuda", work=UNITS.get)  # Tensor Cores take weights in the dtype
