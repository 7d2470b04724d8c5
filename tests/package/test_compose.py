# SPDX-License-Identifier: Apache-2.0
"""What deploy/compose.yaml starts, however it is called. tests/container/run starts it."""

import shutil

import pytest
import yaml

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


def test_grafana_has_no_password_that_all_know():
    settings = services(COMPOSE)["grafana"]["environment"]
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_compose_reads_both_without_the_settings_beside_them(tmp_path):
    if shutil.which("docker-compose") is None:
        pytest.skip("no docker-compose (deploy/install-deps container)")
    (tmp_path / "other.env").write_text("X=1\n")
    said = run("docker-compose", "--env-file", tmp_path / "other.env", "-f", COMPOSE, "-f", GPU,
               "config", cwd=tmp_path)
    merged = yaml.safe_load(said)["services"]
    devices, = merged["attend"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["driver"] == "nvidia" and merged["attend"]["image"] == "attend"
