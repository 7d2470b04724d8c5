# SPDX-License-Identifier: Apache-2.0
"""client/python/training.md, whose Python needs PyTorch: all its blocks are one program."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "client/python/training.md"


def test_training(shared_server):
    torch = pytest.importorskip("torch")
    text = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    assert text.count("127.0.0.1:8001") == 1
    seen = {}
    exec(text.replace("127.0.0.1:8001", shared_server.address), seen)
    assert seen["q"].grad.shape == seen["d_q"].shape == (2, 4, 64, 32)
    q, k, v = (seen[name].detach().double().requires_grad_() for name in "qkv")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted = torch.autograd.grad(o, (q, k, v), seen["d_o"].double())
    for got, right in zip((seen[f"d_{name}"] for name in "qkv"), wanted):
        assert (got - right).abs().max() < 1e-5 * (1 + right.abs().max())
