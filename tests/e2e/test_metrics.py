# SPDX-License-Identifier: Apache-2.0
"""/metrics: accepted by promtool, complete from the start, following the traffic, scraped by a real
Prometheus with the project's rules; the rules and the dashboard name only existing metrics."""

import json
import os
import re
import resource
import signal
import subprocess
import urllib.parse
import urllib.request

import grpc
import pytest

import harness
import hostile
import wire

DEPLOY = harness.ROOT / "deploy"
def families(text):
    return set(re.findall(r"^# TYPE (\S+) ", text, re.M))


def promtool_check(text):
    return subprocess.run(["promtool", "check", "metrics"], input=text, text=True,
                          capture_output=True)


def test_all_families_exist_from_the_start_with_zero(start_server):
    server = start_server()
    text = server.metrics_text()
    done = promtool_check(text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (done.stdout + done.stderr).strip()
    assert server.metric("attend_device_healthy", device="cpu") == 1
    assert server.metric("attend_devices_left_out") == 0
    assert server.metric("attend_build_info") == 1
    wire.assert_serves(server.address)
    assert promtool_check(server.metrics_text()).returncode == 0


def test_counters_follow_the_calls(start_server):
    server = start_server()
    good = [wire.small_request(seed=i, length=32, check=i < 2) for i in range(5)]
    with wire.connect(server.address) as service:
        for request in good:
            service.Attend(request, timeout=wire.SECONDS)
        wrong = wire.small_request()
        wrong.softcap = -1
        with pytest.raises(grpc.RpcError):
            service.Attend(wrong, timeout=wire.SECONDS)
    one = 32 * 64 * 4
    expected = {
        ("attend_requests_total", "code", "OK"): 5,
        ("attend_requests_total", "code", "INVALID_ARGUMENT"): 1,
        ("attend_rejected_requests_total", "reason", "invalid"): 1,
        ("attend_transport_bytes_total", "direction", "out"): 5 * one,
        ("attend_flops_total", "device", "cpu"): 5 * 4 * 32 * 32 * 64,
        ("attend_kernel_requests_total", "device", "cpu"): 5,
        ("attend_reference_checks_total", "result", "ok"): 2,
        ("attend_phase_duration_seconds_count", "phase", "total"): 5,
        ("attend_batch_requests_sum", "device", "cpu"): 5,
        ("attend_reference_checks_total", "transport", "inline"): 2,
        ("attend_cut_parts_total", "device", "cpu"): 0,
        ("attend_device_memory_used_bytes", "device", "cpu"): 0,
    }
    for (name, label, value), count in expected.items():
        harness.wait_for(f"{name}{{{label}={value}}} == {count}",
                         lambda: server.metric(name, **{label: value}) == count, 5)
    received = server.metric("attend_transport_bytes_total", direction="in")
    assert 0 <= received - 5 * 3 * one < 5 * 200  # with or without the small fields
    assert server.metric("attend_reference_check_rows_total") == 64
    assert server.metric("attend_inflight_requests") == 0
    # On the CPU nothing is copied, and so nothing overlaps.
    span = server.metric("attend_device_span_seconds_total", device="cpu")
    assert span > 0
    assert server.metric("attend_device_phase_seconds_total", phase="kernel") == span
    assert server.metric("attend_device_phase_seconds_total", phase="copy_in") == 0


def test_process_metrics_match_the_system(start_server):
    server = start_server()
    wire.assert_serves(server.address)
    threads = server.metric("process_threads")
    assert threads == len(os.listdir(f"/proc/{server.process.pid}/task"))
    soft, _ = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    assert server.metric("process_max_fds") == soft
    # A scrape's own connection is one of them.
    open_fds = server.metric("process_open_fds")
    assert 1 <= open_fds - hostile.descriptors(server) + 1 <= 3
    rss = server.metric("process_resident_memory_bytes")
    assert abs(rss - hostile.rss_bytes(server)) < 32 << 20 <= server.metric(
        "process_virtual_memory_bytes")
    seconds = server.metric("process_cpu_seconds_total")
    assert 0 < seconds <= hostile.cpu_seconds(server)


def test_the_heap_metric_falls_when_memory_is_freed(start_server):
    """Unlike resident memory, it falls again."""
    server = start_server()
    wire.assert_serves(server.address)
    idle, more = server.metric("attend_heap_used_bytes"), 1 << 20
    assert more < idle < server.metric("process_resident_memory_bytes")
    with hostile.Http2(server.address) as client:
        client.wait_for_frame(hostile.SETTINGS)
        for _ in range(400):  # calls whose message never arrives
            client.open(wire.ATTEND, (b"x-held", b"x" * 4000))
        harness.wait_for("what calls take",
                         lambda: server.metric("attend_heap_used_bytes") > idle + 2 * more)
    harness.wait_for("their end", lambda: server.metric("attend_heap_used_bytes") < idle + more)


def test_sampled_checks(start_server):
    """--reference-check all checks requests that did not ask for it, and answers carry the
    report."""
    server = start_server("--reference-check", "all")
    with wire.connect(server.address) as service:
        for i in range(3):
            answer = service.Attend(wire.small_request(seed=i), timeout=wire.SECONDS)
            assert answer.check.ok and answer.check.rows_checked > 0
    assert server.metric("attend_reference_checks_total", result="ok") == 3
    assert server.metric("attend_reference_checks_total", result="failed") == 0


def test_metrics_can_be_disabled(tmp_path):
    """With --metrics-listen off no port is opened."""
    folder = tmp_path / "server"
    folder.mkdir()
    ready = folder / "ready"
    process = subprocess.Popen(
        [str(harness.binary("attend-server")), "--device", "cpu", "--listen", "127.0.0.1:0",
         "--metrics-listen", "off", "--ready-file", str(ready)], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=harness.clean_env())
    try:
        harness.wait_for("ready", ready.exists, harness.START_SECONDS_MAX)
        state = json.loads(ready.read_text())
        assert not state["metrics"] or state["metrics"] == "off"
        wire.assert_serves(state["listen"][0])
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def metric_names(expression):
    """Names of metrics in a PromQL expression."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\[[^\]]*\]", "", expression)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", "", bare)
    return set(re.findall(r"\b(?:attend[_:]|process_|up\b)[\w:]*", bare))


def dashboard_expressions():
    board = json.loads((DEPLOY / "grafana/dashboards/attend.json").read_text())
    found = [t["expr"] for p in board["panels"] for t in p.get("targets", [])]
    found += [a["expr"] for a in board["annotations"]["list"] if "expr" in a]
    assert len(found) > 20
    return found


def rules_text():
    return (DEPLOY / "prometheus/rules.yml").read_text()


def named_in_the_readme():
    text = (harness.ROOT / "server/app/README.md").read_text()
    return set(re.findall(r"`((?:attend|process)_\w+)`", text[text.index("## Metrics"):]))


def test_the_readme_names_exactly_what_exists(server):
    named = named_in_the_readme()
    need_a_gpu = {name for name in named if name.startswith("attend_gpu_")}
    assert named == families(server.metrics_text()) | need_a_gpu


def test_dashboard_and_rules_name_what_exists(server):
    wire.assert_serves(server.address)
    text = server.metrics_text()
    present = families(text) | named_in_the_readme() | {"up"}
    for histogram in re.findall(r"^# TYPE (\S+) histogram", text, re.M):
        present |= {histogram + suffix for suffix in ("_bucket", "_sum", "_count")}
    recorded = set(re.findall(r"record: (\S+)", rules_text()))
    comments_out = re.sub(r"#.*", "", rules_text())
    used = metric_names(" ".join(dashboard_expressions()))
    used |= metric_names(re.sub(r"(?m)^.*(record|job_name|summary|alert|name):.*$", "",
                                comments_out))
    assert used - recorded <= present, sorted(used - recorded - present)
    assert len(used) > 15


def test_dashboard_expressions_parse(tmp_path):
    lines = ["groups:", "- name: dashboard", "  rules:"]
    for n, expression in enumerate(dashboard_expressions()):
        for variable, value in (("$__rate_interval", "1m"), ("$__range", "15m"),
                                ("$instance", ".*")):
            expression = expression.replace(variable, value)
        lines += [f"  - record: panel:{n}", f"    expr: {json.dumps(expression)}"]
    rules = tmp_path / "rules.yml"
    rules.write_text("\n".join(lines) + "\n")
    done = subprocess.run(["promtool", "check", "rules", str(rules)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(server, tmp_path):
    """Debian's Prometheus with the project's rules, scraping the shared server every 0.5 s."""
    port = harness.free_port()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms, evaluation_interval: 500ms}\n"
        f"rule_files: [{DEPLOY / 'prometheus/rules.yml'}]\n"
        "scrape_configs:\n- job_name: attend\n  static_configs:\n"
        f"  - targets: ['{server.metrics_address}']\n")
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml",
             f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log)

    def query(expression):
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode(
            {"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)["data"]["result"]
        except OSError:
            assert process.poll() is None, (tmp_path / "log").read_text()
            return []

    yield query
    process.terminate()
    assert process.wait(30) == 0


def test_prometheus_scrapes(server, prometheus):
    wire.assert_serves(server.address)
    wanted = server.metric("attend_requests_total", code="OK")
    harness.wait_for("a scrape", lambda: prometheus('up{job="attend"} == 1'), 30)
    harness.wait_for(
        "the counter", lambda: [r for r in prometheus('attend_requests_total{code="OK"}')
                                if float(r["value"][1]) >= wanted], 20)
    harness.wait_for("a recording rule", lambda: prometheus('attend:requests:rate1m{code="OK"}'),
                     20)
    buckets = "sum by (le) (attend_phase_duration_seconds_bucket{phase='total'})"
    found = prometheus(f"histogram_quantile(0.5, {buckets})")
    assert 0 < float(found[0]["value"][1]) < 60
    assert prometheus('ALERTS{alertstate="firing"}') == []
