# SPDX-License-Identifier: Apache-2.0
"""The services of deploy/compose.yaml, for every way to call it. tests/container/run starts
them."""

import shutil
import subprocess

import pytest
import yaml

import harness
from conftest import run
from harness import ROOT

COMPOSE, GPU = (ROOT / "deploy" / name for name in ("compose.yaml", "compose.gpu.yaml"))


def services(path):
    return yaml.safe_load(path.read_text())["services"]


def test_everything_starts_without_a_profile():
    found = services(COMPOSE)
    assert set(found) == {"attend", "prometheus", "grafana"}
    assert not [name for name, service in found.items() if "profiles" in service]
    assert set(services(GPU)) == {"attend"}, "an override starts nothing of its own"


def test_all_services_are_on_loopback_and_cannot_gain_rights():
    for name, service in services(COMPOSE).items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["mem_limit"] and service["pids_limit"] <= 4096, name
        tag = service["image"].partition(":")[2]
        assert tag != "latest" and ("build" in service or tag), "what is pulled is of one version"


def test_commands_in_the_container_may_operate_the_server(tmp_path):
    """With the server's own arguments, and the page's command."""
    service = services(COMPOSE)["attend"]
    assert "/tmp" in service["tmpfs"], "the socket needs a place"
    args = [each.replace("/tmp/", f"{tmp_path}/") for each in service["command"]]
    listen, = [each.removeprefix("--listen=") for each in args if each.startswith("--listen=")]
    line, = [line for line in (ROOT / "deploy/operate.md").read_text().splitlines()
             if line.startswith("docker compose") and " exec " in line]
    asked = line.split(" exec -T attend attend-client ")[1].replace("/tmp/", f"{tmp_path}/").split()
    others = [each for each in args if not each.startswith("--listen=")]
    running = harness.Server(tmp_path / "server", *others, listen=listen.replace(":8001", ":0"))
    done = subprocess.run([harness.binary("attend-client"), *asked], capture_output=True, text=True,
                          env=harness.clean_env())
    assert done.returncode == 0 and "takes new work" in done.stdout, done.stdout + done.stderr
    assert running.stop() == 0, running.log()


def test_grafana_has_no_default_password():
    settings = services(COMPOSE)["grafana"]["environment"]
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_compose_merges_both_files_without_dot_env(tmp_path):
    if shutil.which("docker-compose") is None:
        pytest.skip("no docker-compose (deploy/install-deps container)")
    (tmp_path / "other.env").write_text("X=1\n")
    said = run("docker-compose", "--env-file", tmp_path / "other.env", "-f", COMPOSE, "-f", GPU,
               "config", cwd=tmp_path)
    merged = yaml.safe_load(said)["services"]
    devices, = merged["attend"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["driver"] == "nvidia" and merged["attend"]["image"] == "attend"
