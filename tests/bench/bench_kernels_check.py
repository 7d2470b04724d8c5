# SPDX-License-Identifier: Apache-2.0
"""Judges outputs on the GPU: sampled rows are compared with float64 under the bound that
kernels/reference/check_rows.h derives, and every element must be finite and within the range of
V."""

import math

import torch

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
WEIGHT_ROUNDINGS = 8  # as in kernels/reference/check_rows.cc
# The least ratio assumed for the plain implementation, as in check_rows.cc: weights rounded to 16
# bits, as in every Tensor Core kernel, may cost one unit (twice this ratio), but with few visible
# keys the plain implementation may have a smaller error by chance.
LEAST_RATIO = {"float16": 0.5, "bfloat16": 0.5, "float32": 0.0}
VANISHING_WEIGHT = {"float16": 2.0**-25, "bfloat16": 2.0**-126, "float32": 2.0**-126}
SEQUENCES_MAX = 4
RANGE_SLACK = 1.02  # the sum of rounded weights may differ from 1


class Part:
    """Sampled rows of one sequence: the reference [Hkv, G * R, Dv] and the bounds of rounding."""

    def __init__(self, shape, tensors, index, b, row_count):
        q, k, v = (x[b] for x in tensors)
        self.index, self.b, self.shape = index, b, shape
        device, length, group = q.device, shape.length, shape.heads_q // shape.heads_kv
        ends = torch.tensor([0, length - 1], device=device)
        self.rows = torch.cat([ends, torch.randint(length, (row_count - 2,), device=device)])
        qr = q[:, self.rows].reshape(shape.heads_kv, group * row_count, shape.dim)
        hidden = self._hidden(device).repeat(group, 1)
        scale = 1 / math.sqrt(shape.dim)
        qd, kd, vd = qr.double(), k.double(), v.double()
        scores = ((qd * scale) @ kd.mT).masked_fill_(hidden, -math.inf)
        magnitude = scale * (qd.abs() @ kd.abs().mT).amax(-1, keepdim=True)
        weights = torch.softmax(scores, dim=-1)
        self.reference = weights @ vd
        w, total = weights @ vd.abs(), (~hidden).double() @ vd.abs()
        u32, unit = UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF[shape.dtype]
        fp32_part = u32 * (WEIGHT_ROUNDINGS + (2 + math.sqrt(shape.dim) / 2) * magnitude) * w
        fp32_part += VANISHING_WEIGHT["float32"] * total
        self.rounding = unit * w + VANISHING_WEIGHT[shape.dtype] * total + fp32_part
        self.floor = unit * self.reference.abs() + fp32_part
        plain = self._plain(qr, k, v, hidden, scale)
        self.plain_ratio = ((plain - self.reference).abs() / self.rounding).max()

    def _hidden(self, device):
        shape = self.shape
        distance = torch.arange(shape.length, device=device)[None, :] - self.rows[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if shape.left >= 0:
            hidden |= distance < -shape.left
        if shape.right >= 0:
            hidden |= distance > shape.right
        return hidden

    @staticmethod
    def _plain(q, k, v, hidden, scale):
        """Standard attention in the tensors' precision: weights and O rounded to the dtype."""
        scores = ((q.float() @ k.float().mT) * scale).masked_fill_(hidden, -math.inf)
        weights = torch.softmax(scores, dim=-1).to(q.dtype).float()
        return (weights @ v.float()).to(q.dtype).double()

    def judge(self, outputs):
        """(ratio of the plain error that the rows would need, largest error, sum of errors)."""
        got = outputs[self.index][self.b][:, self.rows].double().reshape(self.reference.shape)
        error = (got - self.reference).abs()
        needed = ((error - self.floor).clamp(min=0) / (2 * self.rounding)).max()
        return torch.stack([needed, error.max(), error.mean()])


class Reference:
    """The truth of one input set: problems are (shape, (q, k, v)) in the order of the outputs."""

    def __init__(self, problems, row_count=16):
        self.problems, self.parts = problems, []
        if len(problems) > 1:
            row_count = 6
        for index, (shape, tensors) in enumerate(problems):
            some = sorted({0, shape.batch - 1,
                           *torch.randperm(shape.batch)[:SEQUENCES_MAX - 2].tolist()})
            self.parts += [Part(shape, tensors, index, b, row_count) for b in some]
        found = torch.stack([part.plain_ratio for part in self.parts]).max().item()
        self.plain_ratio = max(found, LEAST_RATIO[problems[0][0].dtype])

    @staticmethod
    def _in_range(shape, v, output):
        """Whether every element is between the smallest and the largest of 0 and its column of V,
        as every weighted mean is. False for NaN and Inf."""
        group = shape.heads_q // shape.heads_kv
        low = v.amin(2).float().clamp(max=0).repeat_interleave(group, dim=1) * RANGE_SLACK
        high = v.amax(2).float().clamp(min=0).repeat_interleave(group, dim=1) * RANGE_SLACK
        return (output.amin(2) >= low).all() & (output.amax(2) <= high).all()

    def judge(self, outputs):
        """(error / bound, largest error, mean error). Above 1 the answer is wrong; inf if an
        element cannot be a weighted mean."""
        inside = [self._in_range(shape, tensors[2], output)
                  for (shape, tensors), output in zip(self.problems, outputs)]
        if not torch.stack(inside).all():
            return math.inf, math.inf, math.inf
        found = torch.stack([part.judge(outputs) for part in self.parts])
        needed, largest = found[:, 0].max().item(), found[:, 1].max().item()
        mean = found[:, 2].mean().item()
        if math.isnan(needed) or math.isnan(largest):
            return math.inf, math.inf, math.inf
        if needed == 0:
            return 0.0, largest, mean
        return (needed / self.plain_ratio if self.plain_ratio > 0 else math.inf), largest, mean
