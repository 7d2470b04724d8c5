# SPDX-License-Identifier: Apache-2.0
"""Clients send the token of a file, the environment or an argument on every kind of call, and
reveal it to no other server."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile

import attend
import numpy as np
import pytest

import harness
import strangers

pytestmark = pytest.mark.usefixtures("libraries")

MAKE_TOKEN = harness.ROOT / "deploy" / "make-token"


def make_token(*args, check=True):
    """The line that deploy/make-token prints."""
    done = subprocess.run([str(MAKE_TOKEN), *map(str, args)], capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout if check else done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokens")
    lines = make_token("blue", "--out", made / "blue", "--tenant", "blue")
    lines += make_token("computes", "--out", made / "computes", "--tenant", "blue",
                        "--scopes", "compute", "--expires", "2100-01-31")
    lines += make_token("gate", "--out", made / "gate", "--any-tenant")
    (made / "tokens").write_text(lines)
    return made


@pytest.fixture(scope="module")
def server(folder):
    running = harness.Server(
        folder / "server", "--tenant=blue=1,green=1", "--tokens", folder / "tokens",
        "--session-memory=16MiB", "--shared-memory", "--shared-memory-socket",
        folder / "regions" / "sock")
    yield running
    assert running.stop() == 0, running.log()


def token(folder, name):
    return (folder / name).read_text().strip()


def test_a_made_token_is_only_in_its_file(folder, tmp_path):
    line = make_token("ci", "--out", tmp_path / "ci", "--tenant", "blue", "--any-tenant")
    made = (tmp_path / "ci").read_text().strip()
    assert stat.S_IMODE(os.stat(tmp_path / "ci").st_mode) == 0o600
    assert made.startswith("attend_") and len(made) == 50
    assert line == strangers.line("ci", made, "scopes=compute,sessions,info", "tenant=blue",
                                  "any-tenant")
    assert made != token(folder, "blue")
    for wrong in (["ci", "--out", tmp_path / "ci"], ["a b", "--out", tmp_path / "x"], ["ci"],
                  ["ci", "--out"], ["ci", "--no", "x"], ["ci", "da", "--out", tmp_path / "x"],
                  # Values that contain more than one field of the line.
                  *(["ci", "--out", tmp_path / "x", *more] for more in (
                      ["--tenant", "blue any-tenant"], ["--tenant", "blue\nname=other"],
                      ["--tenant", ""], ["--scopes", "compute any-tenant"],
                      ["--scopes", "compute,all"], ["--expires", "2027-01-31 any-tenant"]))):
        done = make_token(*wrong, check=False)
        assert done.returncode == 2 and not done.stdout, wrong
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "ci").read_text().strip() == made


def test_attend_client_has_its_token_from_a_file_or_the_environment(server, folder, tmp_path):
    for name in ("q", "k", "v"):
        np.save(tmp_path / f"{name}.npy", np.ones((1, 1, 8, 16), np.float32))
    files = [arg for name in ("q", "k", "v") for arg in (f"--{name}", tmp_path / f"{name}.npy")]

    def run(command, *args, env=None, check=True):
        return harness.run_client(command, "--server", server.address, *args, env=env, check=check)

    done = run("run", *files, check=False)
    assert done.returncode == 1
    assert 'UNAUTHENTICATED: no token: the call must have the metadata' in done.stderr
    run("run", *files, "--token-file", folder / "blue")
    run("run", *files, env={"ATTEND_TOKEN_FILE": str(folder / "blue")})
    run("run", *files, env={"ATTEND_TOKEN": token(folder, "blue")})
    run("run", *files, "--tenant", "green", "--token-file", folder / "gate")
    for transport in ("inline", "chunked", "shm"):
        run("run", *files, "--transport", transport, "--token-file", folder / "blue")
    run("check", "--quick", "--transport", "shm", "--token-file", folder / "blue", "--shape",
        "B1,H1,L16,D16")
    for way in ([], ["--stream"], ["--transport", "shm"]):
        run("load", "--shape", "B1,H1,L16,D16", "--count", "8", "--concurrency", "2", *way,
            "--token-file", folder / "blue")
    assert "tenant" not in run("info", "--json", "--token-file", folder / "blue").stderr
    made = run("session", "create", "--heads-kv", "1", "--dim", "16", "--token-file",
               folder / "blue").stdout.strip()
    done = run("session", "free", made, "--token-file", folder / "computes", check=False)
    assert done.returncode == 1
    assert done.stderr == (f'attend-client: PERMISSION_DENIED: {made}: the caller "computes" lacks '
                           'the scope sessions\n')
    run("session", "free", made, "--token-file", folder / "blue")


def test_attend_client_keeps_its_token(server, folder, tmp_path):
    secret = token(folder, "blue")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "short").write_text("short\n")
    for args, why in (
            (["--server", "10.0.0.1:8001", "--token-file", folder / "blue"],
             "the token would go to 10.0.0.1:8001 in the clear"),
            (["--server", "example.org", "--token-file", folder / "blue"],
             "the token would go to example.org:8001 in the clear"),
            (["--token-file", tmp_path / "none"], "none cannot be read"),
            (["--token-file", tmp_path / "empty"], "empty cannot be read"),
            (["--token-file", tmp_path / "short"], "short: token has 5 characters"),
            (["--token", secret], "--token")):
        done = harness.run_client("info", *args, check=False)
        assert done.returncode == 2 and why in done.stderr, done.stderr
        assert args[0] == "--token" or secret not in done.stdout + done.stderr
    done = harness.run_client("info", "--server", "10.0.0.1:8001", env={"ATTEND_TOKEN": secret},
                              check=False)
    assert done.returncode == 2 and secret not in done.stderr


def test_a_proxy_never_sees_a_token(server, folder):
    """gRPC would send calls through $http_proxy, even those to localhost."""
    harness.run_client("info", "--server", server.address, "--token-file", folder / "blue",
                       env={"http_proxy": "http://127.0.0.1:1", "no_proxy": ""})


def test_python_sends_its_token(server, folder):
    q = np.ones((1, 1, 256, 64), np.float32)
    with pytest.raises(attend.Error) as refused:
        with attend.Client(server.address) as client:
            client.attention(q, q, q)
    assert refused.value.status == "UNAUTHENTICATED"
    with attend.Client(server.address, token=token(folder, "blue")) as client:
        client.attention(q, q, q)
        assert client.submit(q, q, q).result().transport == "shm"
        with client.stream() as stream:
            stream.attention(q, q, q)
        with client.session(1, 64) as session:
            assert session.length() == 0
        assert client.server_info()["tenants"] == ["blue"]
    with attend.Client(server.address, token=token(folder, "gate"), tenant="green") as client:
        client.attention(q, q, q)
        assert client.submit(q, q, q).result().transport == "shm"
    with pytest.raises(attend.Error) as refused:
        attend.Client("10.0.0.1", token=token(folder, "blue"))
    assert "in the clear" in str(refused.value)
    with attend.Client(server.address, token_file=folder / "blue") as client:
        client.attention(q, q, q)
    for given, words in ((dict(token=(folder / "blue").read_text()), "a line break at character"),
                         (dict(token=token(folder, "blue"), token_file=folder / "blue"), "both"),
                         (dict(token_file=folder / "none"), "none cannot be read"),
                         (dict(token_file=7), "expected str, bytes or os.PathLike")):
        with pytest.raises((attend.Error, TypeError), match=words) as refused:
            attend.Client(server.address, **given)
        assert token(folder, "blue") not in str(refused.value)
    for wrong in (b"attend_0123456789abcdef", "attend_0123456789\0abcdef", 7):
        with pytest.raises(attend.Error) as refused:
            attend.Client(server.address, token=wrong)
        assert "0123" not in str(refused.value)


STRANGER = """
import os, socket, sys
path = sys.argv[1]
os.makedirs(os.path.dirname(path))
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen()
    print("listens", flush=True)
    while True:
        peer, _ = listener.accept()
        with peer:
            print("heard", len(peer.recv(4096)), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_an_impostor_at_the_shared_memorys_path_gets_no_token(folder, start_server):
    """As with a server in a container: anyone on this host may own the socket's path."""
    public = pathlib.Path(tempfile.mkdtemp(prefix="attend-public-"))
    public.chmod(0o1777)
    path = public / "of-server" / "sock"
    running = start_server("--tenant=blue=1,green=1", "--tokens", folder / "tokens",
                           "--shared-memory", "--shared-memory-socket", path)
    path.parent.rename(public / "elsewhere")
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER, path], user=65534, cwd="/",
                                stdout=subprocess.PIPE, text=True)
    try:
        assert stranger.stdout.readline() == "listens\n"
        q = np.ones((1, 1, 256, 64), np.float32)
        with attend.Client(running.address, token=token(folder, "blue")) as client:
            assert client.submit(q, q, q).result().transport == "inline"
        assert stranger.stdout.readline() == "heard 0\n"
        done = harness.run_client("check", "--server", running.address, "--token-file",
                                  folder / "blue", "--shape", "B1,H1,L16,D16", "--transport=shm",
                                  check=False)
        assert done.returncode == 1 and "a process of user 65534 listens" in done.stderr, done
        assert stranger.stdout.readline() == "heard 0\n"
    finally:
        stranger.kill()
        stranger.wait()
        shutil.rmtree(public)


def test_compute_alone_is_enough_for_attention(server, folder):
    q = np.ones((1, 1, 256, 64), np.float32)
    with attend.Client(server.address, token=token(folder, "computes")) as client:
        assert client.submit(q, q, q).result().transport == "shm"
        with pytest.raises(attend.Error) as refused:
            client.session(1, 64)
    assert refused.value.status == "PERMISSION_DENIED"
