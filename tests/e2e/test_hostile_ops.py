# SPDX-License-Identifier: Apache-2.0
"""Effects of clients, supervisors and log rotation on a server's log and lifetime."""

import json
import signal
import subprocess

import grpc
import pytest

import harness
import wire

EVIL_IDS = ['x code=OK message="fine" peer=1.2.3.4', 'a"b\\c', "two\nlines", "\x1b[2J\x9b31m",
            "\u202egnp.exe", "\u2028", "\U000e0041", '","code":"OK']


def log_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bad_requests_write_few_lines_that_are_json_and_cannot_be_forged(start_server):
    """2000 refusals, ids that pose as fields: the log is bounded, all are counted, ids are
    quoted."""
    server = start_server("--log-format", "json", "--log-rate", "0.5", "--tenant", "team=2")
    with wire.connect(server.address) as service:
        for ids in (EVIL_IDS, [f"bad-{i}" for i in range(2000 - len(EVIL_IDS))]):
            requests = (wire.small_request(request_id=one, softcap=-1) for one in ids)
            answers = service.AttendStream(requests, timeout=wire.SECONDS,
                                           metadata=[("x-attend-tenant", "team")])
            # In the order in which they were written.
            assert sorted(answer.request_id for answer in answers) == sorted(ids)
    suppressed = server.metric("attend_log_lines_suppressed_total")
    assert server.stop() == 0
    lines = log_lines(server.log_path)
    failed = [line for line in lines if line["message"] == "request failed"]
    assert len(failed) + suppressed == 2000
    assert len(failed) < 200
    said = sorted(line["request_id"] for line in failed[:len(EVIL_IDS)])
    assert said == sorted(EVIL_IDS)
    for line in failed:
        assert line["level"] == "warn" and line["code"] == "INVALID_ARGUMENT"
        assert line["tenant"] == "team" and "softcap" in line["error"]
        assert isinstance(line["id"], int) and line["peer"]
    # The log alone shows how many there were.
    assert sum(line.get("lines", 0) for line in lines) == suppressed


def test_text_logs_quote_client_data(start_server):
    server = start_server()
    with wire.connect(server.address) as service:
        for one in EVIL_IDS:
            with pytest.raises(grpc.RpcError):
                service.Attend(wire.small_request(request_id=one, softcap=-1),
                               timeout=wire.SECONDS)
    assert server.stop() == 0
    lines = [line for line in server.log().splitlines() if "request failed" in line]
    assert len(lines) == len(EVIL_IDS)
    assert all(line.isprintable() and 'code="INVALID_ARGUMENT"' in line for line in lines)
    assert r'request_id="x code=OK message=\"fine\" peer=1.2.3.4" code="INV' in lines[0]


def test_sighup_recreates_a_rotated_log_and_ends_nothing(start_server, tmp_path):
    path = tmp_path / "attend.log"
    server = start_server("--log-file", path)
    harness.wait_for("its lines", lambda: "serving" in path.read_text())
    path.rename(tmp_path / "attend.log.1")
    server.signal(signal.SIGHUP)
    harness.wait_for("a new log", lambda: path.exists() and "reopened" in path.read_text())
    with wire.connect(server.address) as service, pytest.raises(grpc.RpcError):
        service.Attend(wire.small_request(request_id="late", softcap=-1), timeout=wire.SECONDS)
    assert server.stop() == 0
    assert "late" in path.read_text() and "drained" in path.read_text()
    assert "serving" in (tmp_path / "attend.log.1").read_text()


def test_sighup_without_a_log_file_is_ignored_and_logged_once(start_server):
    server = start_server()
    for _ in range(3):
        server.signal(signal.SIGHUP)
        harness.wait_for("the log to say so", lambda: "SIGHUP" in server.log())
        wire.assert_serves(server.address)
    assert server.stop() == 0
    assert server.log().count("SIGHUP") == 1


def test_two_sigterms_at_once_count_as_one(start_server):
    """Supervisors signal a process and its group: accepted requests are still answered."""
    server = start_server("--lanes", "1")
    with wire.connect(server.address) as service:
        slow = service.Attend.future(wire.slow_request(), timeout=60)
        harness.wait_for("the lane to be busy", lambda: server.metric("attend_lanes_busy") == 1)
        # Two pending signals of the same number are one to the kernel.
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGINT)
        assert slow.result().raw
    assert server.wait() == 0, server.log()


@pytest.mark.parametrize("flag", ["--log-file", "--ready-file"])
def test_a_missing_log_folder_is_an_error_and_not_created(flag, tmp_path):
    missing = tmp_path / "missing"
    done = subprocess.run([harness.binary("attend-server"), "--device", "cpu", "--listen",
                           "127.0.0.1:0", "--metrics-listen", "off", flag, missing / "file"],
                          env=harness.clean_env(), capture_output=True, text=True,
                          timeout=harness.START_SECONDS_MAX)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and f"{flag[2:]} {missing}/file" in done.stderr
    assert not missing.exists()
