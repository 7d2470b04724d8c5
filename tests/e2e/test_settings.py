# SPDX-License-Identifier: Apache-2.0
"""Flags, environment and configuration file of the server; log formats; exit codes."""

import json
import re
import subprocess

import pytest

import harness
import wire


def run_server(*args, env=None):
    """Runs the server with settings with which it must exit by itself."""
    return subprocess.run([str(harness.binary("attend-server")), *args], capture_output=True,
                          text=True, timeout=30, env=harness.clean_env(**(env or {})))


@pytest.mark.parametrize("args", [
    ["--no-such-flag"], ["--lanes", "many"], ["--lanes", "-1"], ["--max-queue", "0"],
    ["--device", "tpu"], ["--device", "cuda:x"], ["--reference-check", "sometimes"],
    ["--reference-check", "sample:2"], ["--log-level", "loud"], ["--log-format", "xml"],
    ["--listen", "nowhere"], ["--listen", "127.0.0.1:99999"], ["--metrics-listen", "8002x"],
    ["--message-memory-max", "1GiB"],
    ["--memory-budget", "4GiBB"], ["--memory-budget", "-1"], ["--drain-timeout", "-1"],
    ["--tenant", "a"], ["--tenant", "a=0"], ["--tenant", "a=1,a=2"], ["--priority-aging-ms", "0"],
    ["--shared-memory-max", "0"], ["--shared-memory-client-regions", "0"],
    ["--cuda-ipc"], ["--oip-shared-memory", "/attend"], ["--oip", "--oip-shared-memory", "attend"],
    ["--oip", "--oip-shared-memory-regions", "0"],
    ["--oip", "--oip-shared-memory-bytes", "0"], ["--oip-cuda-shared-memory"],
    ["--chunked-streams-max", "0"], ["--chunked-idle-timeout", "0"],
    ["--config", "/nonexistent.toml"], ["stray"],
], ids=" ".join)
def test_bad_flags_are_one_line(args):
    done = run_server(*args)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    assert args[-1].lstrip("-") in lines[0] or args[0].lstrip("-") in lines[0]


def test_the_readme_names_exactly_the_flags():
    done = run_server("--help")
    assert done.returncode == 0 and not done.stderr
    assert "ATTEND_LISTEN" in done.stdout
    flags = set(re.findall(r"^ +(?:-\w,)?(--[a-z][a-z-]*)", done.stdout, re.M))
    page = (harness.ROOT / "server/app/README.md").read_text()
    table = page[page.index("| Flags |"):page.index("**A new setting**")]
    assert set(re.findall(r"`(--[a-z-]+)`", table[table.index("\n"):])) == flags


def info(server):
    with wire.connect(server.address) as service:
        return service.GetServerInfo(wire.pb.GetServerInfoRequest(), timeout=wire.SECONDS)


def test_flag_beats_file_beats_environment(start_server, tmp_path):
    config = tmp_path / "attend.toml"
    config.write_text('max-queue = 11\nstream-requests-max = 12\nlanes = 1\n'
                      'reference-check = "all"\n')
    server = start_server("--config", str(config), "--max-queue", "31",
                          env={"ATTEND_MAX_QUEUE": "21", "ATTEND_STREAM_REQUESTS_MAX": "22",
                               "ATTEND_MAX_REQUEST_BYTES": "7MiB"})
    limits = info(server).limits
    assert limits.queue_requests_max == 31 and limits.request_bytes_max == 7 << 20
    assert limits.stream_requests_max == 12
    assert info(server).devices[0].lanes == 1
    assert info(server).reference_check == "all"


def test_the_start_logs_addresses_device_and_kernel(start_server):
    server = start_server()
    log = server.log()
    for word in (server.address, server.metrics_address, "cpu", "cpu_flash"):
        assert word in log, word
    assert server.ready["pid"] == server.process.pid


def test_json_logs(start_server):
    """Every line is an object; a failed request is one warning with its id and status."""
    server = start_server("--log-format", "json", "--log-level", "debug")
    with wire.connect(server.address) as service:
        service.Attend(wire.small_request(request_id='good "one"\n'), timeout=wire.SECONDS)
        with pytest.raises(Exception):
            service.Attend(wire.small_request(request_id="bad-one", softcap=-1),
                           timeout=wire.SECONDS)
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert len(lines) > 3
    about_bad = [line for line in lines if "bad-one" in json.dumps(line)]
    assert len(about_bad) == 1
    assert about_bad[0]["level"] in ("warn", "warning")
    assert "INVALID_ARGUMENT" in json.dumps(about_bad[0])
    assert [line for line in lines if "good" in json.dumps(line)]


def test_log_level_and_file(start_server, tmp_path):
    path = tmp_path / "attend.log"
    server = start_server("--log-level", "warn", "--log-file", str(path))
    with wire.connect(server.address) as service:
        service.Attend(wire.small_request(request_id="quiet"), timeout=wire.SECONDS)
        with pytest.raises(Exception):
            service.Attend(wire.small_request(request_id="loud", softcap=-1), timeout=wire.SECONDS)
    assert server.stop() == 0
    text = path.read_text()
    assert "loud" in text and "quiet" not in text


def test_ready_file_is_whole(start_server):
    server = start_server()
    assert json.loads((server.folder / "ready.json").read_text()) == server.ready
    assert server.stop() == 0
