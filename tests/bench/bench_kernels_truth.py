# SPDX-License-Identifier: Apache-2.0
"""O and its gradients in float64 for some KV heads, and the errors of answers."""

import math

import torch

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
# An answer has at most five roundings to the dtype (scores, P, dP, dS, and the answer), each of at
# most one unit of factors close to their result's size, in either direction. So rounding stays
# below 8 units of the norm, which a single lost key of 4096 (1/64 of the norm) far exceeds.
UNITS = 8
ELEMENTS_MAX = 2**27  # per matrix of scores


class Truth:
    """`heads` KV heads of sequences [B, H, L, D]: the last one of the last sequence, the first one
    of the first. Without d_o there are no gradients. left, right: as in attend_params."""

    def __init__(self, q, k, v, d_o=None, left=-1, right=-1, heads=2):
        self.dtype, self.length, self.group = q.dtype, q.shape[2], q.shape[1] // k.shape[1]
        places = list(dict.fromkeys([(q.shape[0] - 1, k.shape[1] - 1), (0, 0)]))[:heads]
        self.left, self.right = left, right
        self.parts = [(place, self._part(place, q, k, v, d_o)) for place in places]

    def _queries(self, head):
        return slice(head * self.group, (head + 1) * self.group)

    def _hidden(self, rows, device):
        distance = torch.arange(self.length, device=device)[None, :] - rows[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left >= 0:
            hidden |= distance < -self.left
        if self.right >= 0:
            hidden |= distance > self.right
        return hidden

    def _part(self, place, q, k, v, d_o):
        """[O, dQ, dK, dV], or [O]."""
        b, head = place
        heads = self._queries(head)
        qs, ks, vs = q[b, heads].double(), k[b, head].double(), v[b, head].double()
        scale = 1 / math.sqrt(q.shape[-1])
        o = qs.new_empty(*qs.shape[:2], vs.shape[-1])
        gradients = [torch.zeros_like(x) for x in (qs, ks, vs)]
        step = max(1, ELEMENTS_MAX // self.length)
        for begin in range(0, self.length, step):
            rows = slice(begin, min(begin + step, self.length))
            hidden = self._hidden(torch.arange(rows.start, rows.stop, device=q.device), q.device)
            for h in range(self.group):
                weights = (qs[h, rows] * scale) @ ks.T
                weights = weights.masked_fill_(hidden, -math.inf).softmax(-1)
                o[h, rows] = weights @ vs
                if d_o is None:
                    continue
                d_os = d_o[b, heads][h, rows].double()
                gradients[2] += weights.T @ d_os
                less = (d_os * o[h, rows]).sum(-1, keepdim=True)
                d_scores = (d_os @ vs.T).sub_(less).mul_(weights).mul_(scale)
                gradients[0][h, rows] = d_scores @ ks
                gradients[1] += d_scores.T @ qs[h, rows]
        return [o] if d_o is None else [o, *gradients]

    def _judge(self, truths, answers):
        """(norm of the error over the truth's, largest error, mean error), tensors of no
        dimensions."""
        errors = [(answer.double() - truth).abs() for truth, answer in zip(truths, answers)]
        norm = sum(e.square().sum() for e in errors) / sum(t.square().sum() for t in truths)
        return (norm.sqrt().item(), max(e.max().item() for e in errors),
                sum(e.mean().item() for e in errors) / len(errors))

    def bound(self):
        """The bound of an error's norm. float32 sums of n products may be off by 4 + sqrt(n) / 2
        units, as in tests/python/reference.py."""
        return UNITS * (UNIT[self.dtype] + UNIT[torch.float32] * (4 + math.sqrt(self.length) / 2))

    def _errors(self, names, answers):
        """({name: {"norm", "largest", "mean"}}, what is wrong or None)."""
        found, fault = {}, None
        for name, answer in zip(names, answers):
            which, whole = ("O", "dQ", "dK", "dV").index(name), name in ("O", "dQ")
            truths = [part[which] for _, part in self.parts]
            mine = [answer[b, self._queries(head) if whole else head]
                    for (b, head), _ in self.parts]
            norm, largest, mean = self._judge(truths, mine)
            found[name] = {"norm": norm, "largest": largest, "mean": mean}
            if not norm <= self.bound():
                fault = fault or f"{name} is off by {norm:.1e}, bound {self.bound():.1e}"
            elif not answer.isfinite().all():
                fault = fault or f"{name} is not finite"
        return found, fault

    def forward(self, outputs):
        return self._errors(("O",), outputs)

    def backward(self, gradients):
        return self._errors(("dQ", "dK", "dV"), gradients)
