# SPDX-License-Identifier: Apache-2.0
"""A small transformer learns to add, with attend's attention and with PyTorch's own.

    PYTHONPATH=client/python:kernels/python python3 client/python/examples/train_transformer.py

Prints each step's losses, which agree within rounding. Needs PyTorch; runs on the CPU in under a
minute, from a seed. With --server HOST:PORT one more model trains with attend's attention, forward
and backward, computed by that server.
"""

import argparse
import functools

import attend
import attend.torch
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

WORDS = "0123456789+=;"
DIM, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2


def _math(*arguments, **options):
    """PyTorch's attention as separate operators."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*arguments, **options)


# PyTorch's two show how far correct computations may differ.
ATTENTIONS = {"attend": attend.torch.scaled_dot_product_attention,
              "torch": functional.scaled_dot_product_attention,
              "torch's math": _math}


class Block(nn.Module):
    """Attention over earlier words, then a feed-forward layer for each word. `attention` has the
    signature of PyTorch's scaled_dot_product_attention."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.queries = nn.Linear(DIM, DIM, bias=False)
        self.keys_values = nn.Linear(DIM, 2 * DIM * KV_HEADS // HEADS, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.words = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        normal = self.before(x)
        heads = [part.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for part in
                 (self.queries(normal), *self.keys_values(normal).chunk(2, dim=-1))]
        o = self.attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.out(o.transpose(1, 2).flatten(-2))
        return x + self.words(self.between(x))


class Transformer(nn.Module):
    """Predicts every next word of [batch, length] word indices."""

    def __init__(self, attention, length):
        super().__init__()
        self.words = nn.Embedding(len(WORDS), DIM)
        self.places = nn.Parameter(0.02 * torch.randn(length, DIM))
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
        self.last = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, len(WORDS)))

    def forward(self, numbers):
        places = self.places[:numbers.shape[1]]
        return self.last(self.blocks(self.words(numbers) + places))


def sums(batch, length, generator):
    """Lines such as 17+5=22;80+41=121; as word indices, [batch, length + 1]."""
    rows = []
    for _ in range(batch):
        text = ""
        while len(text) <= length:
            a, b = torch.randint(0, 100, (2,), generator=generator).tolist()
            text += f"{a}+{b}={a + b};"
        rows.append([WORDS.index(word) for word in text[:length + 1]])
    return torch.tensor(rows)


def train(attention, steps=100, batch=16, length=96, seed=0):
    """The loss of every step. For one seed, everything but `attention` is the same."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(attention, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        numbers = sums(batch, length, generator)
        predicted = model(numbers[:, :-1])
        loss = functional.cross_entropy(predicted.flatten(0, 1), numbers[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", help="HOST:PORT of an attend server to train with as well")
    arguments = parser.parse_args()
    run = functools.partial(train, steps=arguments.steps, seed=arguments.seed)
    losses = {name: run(attention) for name, attention in ATTENTIONS.items()}
    if arguments.server:
        with attend.connect(arguments.server):
            losses["served"] = run(ATTENTIONS["attend"])
    print("step" + "".join(f"{name:>14}" for name in losses))
    for step, row in enumerate(zip(*losses.values())):
        print(f"{step:4}" + "".join(f"{loss:14.6f}" for loss in row))
    apart = {name: max(abs(a - b) for a, b in zip(losses["torch"], row))
             for name, row in losses.items() if name != "torch"}
    print("apart from torch at most: " +
          ", ".join(f"{name} {most:.1e}" for name, most in apart.items()))


if __name__ == "__main__":
    main()
