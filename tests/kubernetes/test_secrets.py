# SPDX-License-Identifier: Apache-2.0
"""The Deployment's own arguments, with what make-secrets makes, on a real server."""

import base64
import ssl
import subprocess
import urllib.error
import urllib.request

import pytest

import harness
import manifest_checks


@pytest.fixture
def mounted(rendered, secrets, tmp_path):
    """The server's arguments, and a folder in place of its mounts and those of its callers."""
    deployment, = manifest_checks.of_kind(rendered["base"], "Deployment")
    for name, secret in secrets.items():
        folder = tmp_path / "etc/attend" / name.removeprefix("attend-")
        folder.mkdir(parents=True)
        for key, value in secret["data"].items():
            (folder / key).write_bytes(base64.b64decode(value))
    args = manifest_checks.server_of(deployment)["args"]
    return [a.replace("=/etc/", f"={tmp_path}/etc/").replace("$(POD_NAME)", "attend-7-x")
            for a in args], tmp_path / "etc/attend"


def scrape(running, folder, token, path="metrics"):
    port = running.metrics_address.rpartition(":")[2]
    context = ssl.create_default_context(cafile=folder / "scraper/ca.crt")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    asked = urllib.request.Request(f"https://localhost:{port}/{path}", headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=30, context=context) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def test_a_fleet_of_its_own_secrets(mounted, tmp_path):
    """The client's token allows to compute, under each name; the scraper's token allows scrapes,
    the operator's admin calls, and nothing else."""
    args, folder = mounted
    running = harness.Server(tmp_path / "server", *args, metrics="0.0.0.0:0", listen="0.0.0.0:0")
    port = running.address.rpartition(":")[2]

    def call(caller, name, *asked):
        return subprocess.run(
            [harness.binary("attend-client"), "--server", f"127.0.0.1:{port}",
             "--tls-ca", folder / caller / "ca.crt", "--tls-server-name", name,
             "--token-file", folder / caller / "token", *(asked or ("check", "--quick"))],
            capture_output=True, text=True, env=harness.clean_env())

    for name in ("attend", "attend.serving.svc", "attend.serving.svc.cluster.local"):
        done = call("client", name)
        assert done.returncode == 0, done.stdout + done.stderr
    for caller, *asked in (("scraper",), ("operator",), ("client", "admin", "drain")):
        refused = call(caller, "attend", *asked)
        assert refused.returncode != 0 and "scope" in refused.stdout + refused.stderr, caller
    for command, ready in ((["drain", "--wait-s", "30"], 503), (["undrain"], 200)):
        done = call("operator", "attend", "admin", *command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert scrape(running, folder, None, "readyz") == ready
    assert scrape(running, folder, (folder / "scraper/token").read_text()) == 200
    assert scrape(running, folder, None) == 401
    assert running.stop() == 0, running.log()
