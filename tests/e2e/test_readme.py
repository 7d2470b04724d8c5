# SPDX-License-Identifier: Apache-2.0
"""The READMEs' Python, verbatim: the commands that generate the stubs, and the examples."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from harness import ROOT, binary, run_client

DEFAULT_ADDRESS = "127.0.0.1:8001"


def blocks(language, page):
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def block_with(language, word, page="README.md"):
    found = [block for block in blocks(language, page) if word in block]
    assert len(found) == 1, f"{len(found)} blocks of {page} have {word}"
    return found[0]


def test_the_python_start_is_on_the_first_screen():
    """Before the picture and the build: what using it looks like."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index("import attend, numpy as np")
    end = lines.index("```", start)
    assert start < end < 25
    assert end < min(n for n, line in enumerate(lines) if line.startswith(("## ", "![")))


@pytest.fixture(scope="module")
def stub_folder(tmp_path_factory):
    """Runs the README's commands, except those that install packages, and returns the folder."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "proto").symlink_to(ROOT / "proto")
    lines = block_with("sh", "grpc_tools.protoc", "proto/README.md").splitlines()
    commands = [line for line in lines if not re.match(r"(sudo )?(apt|pip) |python -m ", line)]
    assert any(line.startswith("protoc ") for line in commands)
    subprocess.run(["bash", "-euc", "\n".join(commands)], cwd=folder, check=True)
    return folder


def test_both_ways_to_generate_stubs_are_equal(stub_folder):
    """pip's protoc finds the plugin by itself; apart from that it is the same command."""
    lines = block_with("sh", "grpc_tools.protoc", "proto/README.md").splitlines()
    pip, = [line for line in lines if line.startswith("python -m grpc_tools.protoc")]
    debian, = [line for line in lines if line.startswith("protoc ")]
    assert pip.removeprefix("python -m grpc_tools.").split() == \
        [word for word in debian.split() if not word.startswith("--plugin")]
    assert (stub_folder / "stubs/attend/v1/attention_pb2_grpc.py").exists()


def run_python(text, folder):
    env = {**os.environ, "PYTHONPATH": "stubs"}
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, env=env, timeout=60,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_python_example_runs(server, stub_folder):
    example = block_with("python", "refuses answers above", "proto/README.md")
    assert DEFAULT_ADDRESS in example
    assert DEFAULT_ADDRESS in run_client("--help").stdout
    run_python(example.replace(DEFAULT_ADDRESS, server.address) + """
scores = np.einsum("bhid,bhjd->bhij", q, k, dtype=np.float64) / 8
scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
weights = np.exp(scores - scores.max(-1, keepdims=True))
right = np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v)
assert np.abs(o - right).max() < 1e-5, np.abs(o - right).max()
""", stub_folder)


def test_the_sessions_example_runs(server, stub_folder):
    example = block_with("python", "CreateSession", "proto/README.md")
    assert DEFAULT_ADDRESS in example
    run_python(example.replace(DEFAULT_ADDRESS, server.address) + """
assert length == 103 and o.shape == (1, 8, 1, 64) and np.isfinite(o).all()
""", stub_folder)


def test_the_gradients_example_runs(server, stub_folder):
    example = block_with("python", "stub.Backward", "proto/README.md")
    assert DEFAULT_ADDRESS in example
    run_python(example.replace(DEFAULT_ADDRESS, server.address) + """
seen = np.tril(np.ones((100, 100), bool))
wide = lambda x: np.repeat(x.astype(np.float64), 4, axis=1)
s = np.where(seen, np.einsum("bhid,bhjd->bhij", q, wide(k)) / 8, -np.inf)
p = np.exp(s - s.max(-1, keepdims=True))
p /= p.sum(-1, keepdims=True)
d_p = np.einsum("bhid,bhjd->bhij", d_o, wide(v))
d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True)) / 8
narrow = lambda x: x.reshape(2, 2, 4, 100, 64).sum(2)
right = (np.einsum("bhij,bhjd->bhid", d_s, wide(k)), narrow(np.einsum("bhij,bhid->bhjd", d_s, q)),
         narrow(np.einsum("bhij,bhid->bhjd", p, d_o)))
for got, want in zip((d_q, d_k, d_v), right):
    assert np.abs(got - want).max() < 1e-4, np.abs(got - want).max()
""", stub_folder)


def test_the_mask_example_runs(server, stub_folder):
    """With the block that it refers to."""
    example = block_with("python", "stub.Backward", "proto/README.md") + \
        block_with("python", "DTYPE_BIT", "proto/README.md")
    run_python(example.replace(DEFAULT_ADDRESS, server.address) + """
wide = lambda x: np.repeat(x.astype(np.float64), 4, axis=1)
s = np.where(mask, np.einsum("bhid,bhjd->bhij", q, wide(k)) / 8, -np.inf)
p = np.exp(s - s.max(-1, keepdims=True))
right = np.einsum("bhij,bhjd->bhid", p / p.sum(-1, keepdims=True), wide(v))
assert np.abs(masked - right).max() < 1e-5, np.abs(masked - right).max()
""", stub_folder)


def test_the_commands_on_sessions_run(server, tmp_path):
    """A prompt and a token, with the client under test and this server."""
    example = block_with("sh", "session attend", "client/README.md")
    assert "build/quickstart/client/attend-client" in example
    done = subprocess.run(
        ["bash", "-euc", example.replace("build/quickstart/client/attend-client", "$CLIENT")
         .replace("python3", sys.executable)],
        cwd=tmp_path, timeout=60, capture_output=True, text=True,
        env={**os.environ, "CLIENT": str(binary("attend-client").absolute()),
             "ATTEND_SERVER": server.address})
    assert done.returncode == 0, done.stderr
    assert "layer 0 has 1000 tokens" in done.stdout and "layer 0 has 1001 tokens" in done.stdout
    assert np.isfinite(np.load(tmp_path / "o1.npy")).all()


def test_a_refused_region_is_an_error_in_python(start_server, stub_folder, tmp_path):
    """proto/README.md's create_region raises the server's reason."""
    path = tmp_path / "shm.sock"
    start_server("--shared-memory", "--shared-memory-socket", path)
    example = block_with("python", "def create_region", "proto/README.md")
    run_python(example + f"""
control, token, memory = create_region({str(path)!r}, 1 << 20)
assert len(token) == 16 and len(memory) == 1 << 20
try:
    create_region({str(path)!r}, 1 << 40)
except RuntimeError as error:
    assert str(1 << 40) in str(error), error
else:
    raise AssertionError("a region of 1 TiB")
""", stub_folder)


# Instead of the page's: the duration of a load is not tested.
SHORT = ("--duration", "0.2", "--warmup", "0.05")


def run_line(line, folder, server):
    words = shlex.split(line)
    assert words[0] == "attend-client"
    if words[1] == "load" and "--sessions" not in words:
        if "--duration" in words:
            at = words.index("--duration")
            del words[at:at + 2]
        words += SHORT
    if "--search-p99" in words:  # a bound that a busy machine meets too
        words[words.index("--search-p99") + 1] = "5000"
        words += ["--rate", "50", "--max-outstanding", "8", "--search-precision", "0.5"]
    words = [server.address if word == DEFAULT_ADDRESS else word for word in words[1:]]
    done = subprocess.run([binary("attend-client").absolute(), *words], cwd=folder, timeout=120,
                          capture_output=True, text=True,
                          env={**os.environ, "ATTEND_SERVER": server.address})
    # 3: it was not stable, which depends on the machine.
    assert done.returncode in ((0, 3) if "--stable" in words else (0,)), (line, done.stderr)
    return done.stdout


def test_the_commands_of_the_load_page_run(server, tmp_path):
    page = "client/load/README.md"
    (tmp_path / "mix.json").write_text(block_with("json", "weight", page))
    lines = block_with("sh", "attend-client compare", page).splitlines()
    out = [run_line(line, tmp_path, server) for line in lines if " load " in line]
    assert len(out) == 5 and out[0].count("closed x") >= 7
    assert (tmp_path / "load.svg").exists()
    for name in ("before", "after", "a1", "a2", "a3", "b1", "b2", "b3"):
        shutil.copy(tmp_path / "load.json", tmp_path / f"{name}.json")
    compared = [run_line(line, tmp_path, server) for line in lines if " compare " in line]
    assert len(compared) == 2 and all("open 50/s" in each for each in compared)
    assert len(out) + len(compared) == len(lines) and (tmp_path / "both.svg").exists()
    run_line(block_with("sh", "--deadline-ms", page).replace("\\\n", ""), tmp_path, server)
    assert (tmp_path / "goodput.svg").exists()


def test_the_commands_of_the_local_page_run(start_server, tmp_path):
    server = start_server("--shared-memory", "--shared-memory-socket", tmp_path / "shm.sock")
    lines = block_with("sh", "bench-local", "client/local/README.md").splitlines()
    out = [run_line(line, tmp_path, server) for line in lines]
    assert len(out) == 2 and out[1].count("times as long as here") == 3
    assert (tmp_path / "cost.svg").exists()
