# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of client/python's pages on Hugging Face, masks and training as they are,
each page's in order, and the benchmark that their figures are from."""

import os
import re
import subprocess
import sys

import pytest

from harness import PACKAGES, ROOT

torch = pytest.importorskip("torch")

ADDRESS = "127.0.0.1:8001"
WORDS = "one two three four <pad> <unk>".split()


def blocks(page, language):
    text = (ROOT / "client/python" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def run_blocks(page, replaced):
    """Runs the page's blocks; returns the variables after the last one."""
    names, found = {}, blocks(page, "python")
    assert len(found) >= 2
    for block in found:
        for old, new in replaced.items():
            block = block.replace(old, new)
        exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture
def model_folder(tmp_path):
    """A folder for from_pretrained(): a small model with random weights, and its tokenizer."""
    pytest.importorskip("transformers")
    import tokenizers
    import transformers
    from hf_models import FAMILIES
    numbers = {word: number for number, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>").save_pretrained(tmp_path)
    FAMILIES["llama"].make("eager").save_pretrained(tmp_path)
    return tmp_path


def test_hugging_face(server, client, model_folder):
    names = run_blocks("hugging_face.md", {"your/model": str(model_folder),
                                           ADDRESS: server.address})
    model, inputs = names["model"], names["inputs"]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert names["logits"].shape == (2, 3, 97) and names["tokens"].shape[1] > 3
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(names["tokens"], model.generate(**inputs, max_new_tokens=20))


def test_the_benchmark_of_the_pages(client, monkeypatch, capsys):
    pytest.importorskip("transformers")
    import attend
    import transformers_ways
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    monkeypatch.setattr(transformers_ways, "CONFIG", {**transformers_ways.CONFIG, **small,
                                                      "num_attention_heads": 2})
    transformers_ways.compare_batches([9, 4], ["eager", "attend"], runs=1)
    ways = ["attend", "attend-server", "attend-server, sessions"]
    with attend.connect(client):
        transformers_ways.compare_generation(5, ways, runs=1, tokens=2)
    printed = capsys.readouterr().out
    assert "2 sequences of 4 to 9 tokens, 13 in all, 72% of the padded batch" in printed
    assert re.search(r"\| attend( \| \d+){4} \|", printed)
    for way in ways:
        assert re.search(rf"^{way}: \d+\.\d$", printed, re.M)


def test_training(server, client, monkeypatch):
    functional, name = torch.nn.functional, "scaled_dot_product_attention"
    monkeypatch.setattr(functional, name, getattr(functional, name))  # the page replaces it
    heads, x = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 9, 32)
    before = heads(x, x, x, need_weights=False)[0]
    names = run_blocks("training.md", {ADDRESS: server.address})
    assert getattr(functional, name).__module__ == "attend.torch"
    torch.testing.assert_close(heads(x, x, x, need_weights=False)[0], before)
    o = attend_in_process(names)
    assert torch.equal(names["o"], o)
    wanted = torch.autograd.grad(o, [names[name] for name in "qkv"], names["d_o"])
    for name, gradient in zip("qkv", wanted):
        assert names[name].grad.isfinite().all() and torch.equal(names["d_" + name], gradient)


def test_masks():
    names = run_blocks("masks.md", {})
    q, k, v, document = (names[name] for name in ("q", "k", "v", "document"))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=document[:, None] == document[None, :])
    torch.testing.assert_close(names["o"], wanted)


def attend_in_process(names):
    import attend.torch
    return attend.torch.scaled_dot_product_attention(
        *(names[name] for name in "qkv"), is_causal=True, enable_gqa=True)


def test_the_example_of_the_training_page(server, client):
    command, = blocks("training.md", "sh")
    words = command.replace(ADDRESS, server.address).split()
    settings, words = [word for word in words if "=" in word], words[2:]
    environment = dict(setting.split("=") for setting in settings)
    environment["PYTHONPATH"] = os.pathsep.join(PACKAGES)
    done = subprocess.run([sys.executable, *words, "--steps", "3"], cwd=ROOT, timeout=300,
                          env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout and "apart from torch at most" in done.stdout
