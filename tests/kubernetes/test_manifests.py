# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes renders, and fits Kubernetes' schemas and the checks of manifest_checks.py.
These tests need no cluster; tests/fleet/run has one."""

import copy
import re
import subprocess

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

import harness
import manifest_checks
from conftest import MANIFESTS, RENDERED

VERSIONS = kubernetes_validate.utils.all_versions()
# Kinds of KEDA and of Prometheus's operator, which Kubernetes' schemas lack.
OTHERS = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}


@pytest.fixture(scope="session")
def known_flags():
    said = subprocess.run([harness.binary("attend-server"), "--help"], check=True,
                          capture_output=True, text=True).stdout
    return set(re.findall(r"(?m)^  (?:-h,)?(--[a-z][a-z0-9-]*)", said))


def faults(objects, secrets, known_flags):
    keys = {name: set(s["data"]) for name, s in secrets.items()}
    return list(manifest_checks.check_all(objects, keys, known_flags))


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
@pytest.mark.parametrize("name", RENDERED)
def test_fits_the_schemas(rendered, secrets, name, version):
    """In the oldest and the newest known version; no field is unknown to them."""
    checked = [x for x in rendered[name] if x["kind"] not in OTHERS]
    assert len(checked) >= 4
    for x in [*checked, *secrets.values()]:
        kubernetes_validate.validate(x, version, strict=True)


@pytest.mark.parametrize("change", [{"enableServiceLink": False}, {"securityContext": "none"}])
def test_the_schemas_see_faults(rendered, change):
    objects = copy.deepcopy(rendered["base"])
    pods(objects)["spec"].update(change)
    with pytest.raises(kubernetes_validate.ValidationError):
        for x in objects:
            kubernetes_validate.validate(x, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", RENDERED)
def test_says_what_is_so(rendered, secrets, known_flags, name):
    assert faults(rendered[name], secrets, known_flags) == []


def server(objects):
    return manifest_checks.server_of(manifest_checks.of_kind(objects, "Deployment")[0])


def pods(objects):
    return manifest_checks.template(manifest_checks.of_kind(objects, "Deployment")[0])


def spec(objects, kind):
    return manifest_checks.of_kind(objects, kind)[0]["spec"]


PLANTED = {
    "Service attend: it does not select": lambda o: spec(o, "Service")["selector"].update(app="b"),
    "PodDisruptionBudget attend: it does not select": lambda o: spec(o, "PodDisruptionBudget")[
        "selector"].update(matchLabels={"app": "other"}),
    "its pods alone": lambda o: pods(o)["metadata"]["labels"].clear(),
    "no Deployment other": lambda o: spec(o, "ScaledObject")["scaleTargetRef"].update(name="other"),
    "has no port http": lambda o: spec(o, "ServiceMonitor")["endpoints"][0].update(port="http"),
    "which is no port": lambda o: server(o)["livenessProbe"]["httpGet"].update(port="http"),
    "is not what": lambda o: spec(o, "Service")["ports"][0].update(targetPort="http"),
    "s of grace": lambda o: pods(o)["spec"].update(terminationGracePeriodSeconds=38),
    "readinessProbe asks /healthz": lambda o: server(o)["readinessProbe"]["httpGet"].update(
        path="/healthz"),
    "asks by HTTP": lambda o: server(o)["livenessProbe"]["httpGet"].pop("scheme"),
    "servers 2 may go": lambda o: spec(o, "PodDisruptionBudget").update(maxUnavailable=2),
    "and must have one": lambda o: spec(o, "PodDisruptionBudget").update(minAvailable=1),
    "contradict": lambda o: spec(o, "Deployment").update(replicas=3),
    "more rights": lambda o: server(o)["securityContext"].update(readOnlyRootFilesystem=False),
    "gets a token": lambda o: pods(o)["spec"].update(automountServiceAccountToken=True),
    "not mounted": lambda o: server(o)["volumeMounts"].pop(),
    "is in no Secret": lambda o: server(o)["args"].append("--metrics-auth=/etc/attend/tls/tokens"),
    "no Secret attend-scraper has key": lambda o: spec(o, "ServiceMonitor")["endpoints"][0][
        "authorization"]["credentials"].update(key="key"),
    "the server has no --drain": lambda o: server(o)["args"].append("--drain=1"),
    "nothing says what POD_NAME is": lambda o: server(o)["env"].clear(),
    "without TLS": lambda o: server(o)["args"].remove("--tls-cert=/etc/attend/tls/tls.crt"),
}


@pytest.mark.parametrize("said", PLANTED)
def test_a_planted_fault_is_found(rendered, secrets, known_flags, said):
    objects = copy.deepcopy(rendered["gpu that scales"])
    PLANTED[said](objects)
    assert any(said in fault for fault in faults(objects, secrets, known_flags))


def test_the_ports_are_the_images(rendered):
    image = (harness.ROOT / "Dockerfile").read_text()
    ports = {p["name"]: p["containerPort"] for p in server(rendered["base"])["ports"]}
    listens = dict(re.findall(r"ATTEND_(METRICS_LISTEN|LISTEN)=0\.0\.0\.0:(\d+)", image))
    assert ports == {"grpc": int(listens["LISTEN"]), "metrics": int(listens["METRICS_LISTEN"])}


def test_the_rules_are_prometheus_own(rendered):
    rule, = manifest_checks.of_kind(rendered["overlays/monitoring"], "PrometheusRule")
    own = yaml.safe_load((harness.ROOT / "deploy/prometheus/rules.yml").read_text())
    assert rule["spec"] == own, "run deploy/kubernetes/make-rules"


def test_a_component_is_an_overlay_of_its_own():
    for component in (MANIFESTS / "components").iterdir():
        overlay = yaml.safe_load(
            (MANIFESTS / "overlays" / component.name / "kustomization.yaml").read_text())
        assert f"../../components/{component.name}" in overlay["components"]


def test_queries_parse_and_name_what_exists(rendered, tmp_path):
    found, used = manifest_checks.queries(rendered["overlays/keda"])
    rules = [{"record": f"scaled:{n}", "expr": text} for n, text in enumerate(found)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "scaled", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", file], check=True, capture_output=True)
    running = harness.Server(tmp_path / "server")
    text = running.metrics_text()
    assert running.stop() == 0
    assert used and used <= set(re.findall(r"(?m)^# TYPE (\w+)", text))
