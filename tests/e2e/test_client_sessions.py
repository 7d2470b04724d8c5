# SPDX-License-Identifier: Apache-2.0
"""attend-client session, and loads of sessions, as a user runs them."""

import contextlib
import json
import re
import socket
import threading

import numpy as np
import pytest

import sessions
from harness import Server, run_client, wait_for
from reference import Case, Mask, judge, round_to
from tensor_files import read_safetensors, write_safetensors


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Lists are compared as a whole. On the server that all modules share, sessions of other tests
    remain until their leases end."""
    running = Server(tmp_path_factory.mktemp("sessions"))
    yield running
    assert running.stop() == 0, running.log()


def session(server, *args, **options):
    return run_client("session", *args, "--server", server.address, **options)


def new_session(server, dtype, *args):
    text = session(server, "create", "--dtype", dtype, "--heads-kv", "2", "--dim", "32", "--dim-v",
                   "24", *args).stdout
    assert re.fullmatch(r"[0-9a-f]{32}\n", text), text
    return text.strip()


def rows(random, dtype, heads, tokens, dim, batch=1):
    return round_to(dtype, random.standard_normal((batch, heads, tokens, dim), np.float32))


def test_a_list_continues_after_each_page(start_server):
    """One answer has at most 1024 layers."""
    server = start_server("--session-memory=16MiB")
    made = sorted(new_session(server, "float16", "--layers", "512") for _ in range(5))
    with sessions.client(server.address, "default") as tenant:
        page = tenant.call("ListSessions")
        assert [each.id.hex() for each in page.sessions] == made[:2] and page.more
        page = tenant.call("ListSessions", after=bytes.fromhex(made[3]), page_size=1)
        assert [each.id.hex() for each in page.sessions] == made[4:] and not page.more
    listed = session(server, "list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == made


def test_sessions_from_npy(server, random, tmp_path):
    """A prompt, a token with its query, a fork, and truncated tokens."""
    def save(**arrays):
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}.npy", array.astype(np.float16))
        return [part for name in arrays for part in (f"--{name}", tmp_path / f"{name}.npy")]

    def attend(name, q, k, v, *flags):
        done = session(server, "attend", name, *flags, "--layer", "1", "--causal", "--check",
                       "--out", tmp_path / "o.npy", "--lse-out", tmp_path / "lse.npy")
        assert f"layer 1 has {k.shape[2]} tokens" in done.stdout
        assert "server check ok: max error" in done.stdout
        judge(Case(q, k, v, "float16", mask=Mask("causal")),
              np.load(tmp_path / "o.npy").astype(np.float32), np.load(tmp_path / "lse.npy"))

    name = new_session(server, "float16", "--layers", "2")
    k, v = rows(random, "float16", 2, 70, 32), rows(random, "float16", 2, 70, 24)
    done = session(server, "append", name, *save(k=k, v=v), "--layer", "1")
    assert done.stdout == "layer 1 has 70 tokens\n"
    q, k1, v1 = (rows(random, "float16", *shape) for shape in ((4, 1, 32), (2, 1, 32), (2, 1, 24)))
    k, v = np.concatenate([k, k1], axis=2), np.concatenate([v, v1], axis=2)
    attend(name, q, k, v, *save(q=q, k=k1, v=v1))
    attend(name, q, k, v, *save(q=q))
    refused = session(server, "fork", name, check=False)  # which would skip tokens
    assert refused.returncode == 1 and "layers have 0 to 71 tokens" in refused.stderr
    fork = session(server, "fork", name, "--length", "0").stdout.strip()
    session(server, "truncate", fork, "--length", "0")
    info = session(server, "info", name).stdout
    assert info.startswith(name) and "2 layers" in info and "tokens 0,71" in info
    session(server, "truncate", name, "--length", "65")
    attend(name, q, k[:, :, :65], v[:, :, :65], *save(q=q))
    refused = session(server, "keep-draft", name, "--length", "60", "--kept", "1", check=False)
    assert refused.returncode == 1 and "layers have 0 to 65 tokens" in refused.stderr
    session(server, "keep-alive", name)
    listed = session(server, "list").stdout.splitlines()
    assert len(listed) == 2 and any(line.startswith(name) for line in listed)
    session(server, "free", *[line.split()[0] for line in listed])
    assert session(server, "list").stdout == ""
    done = session(server, "info", name, check=False)
    assert done.returncode == 1 and "NOT_FOUND" in done.stderr and name in done.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sessions_from_safetensors(server, random, tmp_path, dtype):
    """Two sequences in one call."""
    names = [new_session(server, dtype), new_session(server, dtype)]
    q, k, v = (rows(random, dtype, *shape, batch=2)
               for shape in ((4, 9, 32), (2, 9, 32), (2, 9, 24)))
    write_safetensors(tmp_path / "in.safetensors", dtype, {"q": q, "k": k, "v": v})
    session(server, "attend", *names, "--safetensors", tmp_path / "in.safetensors", "--return-lse",
            "--out", tmp_path / "out.safetensors")
    out = read_safetensors(tmp_path / "out.safetensors")
    judge(Case(q, k, v, dtype), out["o"], out["lse"])
    session(server, "free", *names)


class LosesAnAnswer:
    """A proxy that drops the server's answer to the first large message, and then the connection;
    it forwards everything else."""

    def __init__(self, server, lose):
        self.target = server.address.rsplit(":", 1)
        self.lose = lose  # returns when the answer has been sent
        self.lost = False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection((self.target[0], int(self.target[1])))
            deaf = threading.Event()
            for way in (self.up, self.down):
                threading.Thread(target=self.run, args=(way, client, server, deaf),
                                 daemon=True).start()

    def run(self, way, *args):
        with contextlib.suppress(OSError):  # either side may close first
            way(*args)

    def up(self, client, server, deaf):
        sent = 0
        while data := client.recv(1 << 16):
            sent += len(data)
            if sent > 10000 and not self.lost:
                self.lost = True
                deaf.set()
                threading.Thread(target=self.hang_up, args=(client,), daemon=True).start()
            server.sendall(data)
        server.close()

    def hang_up(self, client):
        self.lose()  # the server's side stays open until then: its request is not cancelled
        client.shutdown(socket.SHUT_RDWR)

    def down(self, client, server, deaf):
        while data := server.recv(1 << 16):
            if not deaf.is_set():
                client.sendall(data)


def test_an_append_whose_answer_is_lost_is_applied_once(start_server, random, tmp_path):
    server = start_server()
    name = new_session(server, "float32")
    k, v = rows(random, "float32", 2, 60, 32), rows(random, "float32", 2, 60, 24)
    np.save(tmp_path / "k.npy", k)
    np.save(tmp_path / "v.npy", v)
    proxy = LosesAnAnswer(server, lambda: wait_for("the append", lambda: server.metric(
        "attend_session_appended_tokens_total") == 60))
    done = run_client("session", "append", name, "--k", tmp_path / "k.npy", "--v",
                      tmp_path / "v.npy", "--server", proxy.address)
    assert proxy.lost and done.stdout == "layer 0 has 60 tokens\n"
    assert server.metric("attend_session_appended_tokens_total") == 60
    assert "tokens 60 " in session(server, "info", name).stdout


@pytest.mark.parametrize("method", ["Attend", "AttendStream"])
def test_load_of_sessions(server, tmp_path, method):
    report = tmp_path / "load.json"
    flags = ["--stream"] if method == "AttendStream" else []
    done = run_client("load", "--server", server.address, "--sessions", "4", "--context", "100",
                      "--decode", "12", "--layers", "2", "--fork-share", "1", "--think-ms", "1",
                      "--shape", "H4,Hkv2,D64,dtype=bfloat16", "--verify", "1", "--json", report,
                      *flags)
    whole = json.loads(report.read_text())
    figures, = whole["steps"]
    assert whole["schema"] == "attend-load-sessions/1" and figures["sessions"] == 4
    assert whole["method"] == method and ("over streams" in done.stdout) == bool(flags)
    assert figures["prompts"] == 4 and figures["forks"] == 4 and figures["tokens"] == 2 * 4 * 12
    assert figures["tokens_per_s"] > 0 and figures["prompts_per_s"] > 0
    assert figures["bytes_sent_per_token"] == 2 * (4 + 2 + 2) * 64 * 2
    assert 0 < figures["step_ms"]["p50"] <= figures["step_ms"]["p99"]
    verified = figures["client_verification"]
    assert verified["passed"] >= 4 * 3 and verified["failed"] == 0 == figures["unexpected"]
    assert "4 sequences at once, prompts of 100 tokens" in done.stdout
    assert "verified by the client: passed" in done.stdout
    assert session(server, "list").stdout == ""
