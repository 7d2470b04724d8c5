# SPDX-License-Identifier: Apache-2.0
"""The access log of a real server: one line for each call, whatever clients send and disks do."""

import json
import os
import signal

import grpc
import pytest

import certificates
import harness
import strangers
import wire


def lines(path, count):
    """The first `count` lines, parsed; they are written a moment after their calls have ended."""
    harness.wait_for(f"{count} lines", lambda: path.read_text().count("\n") >= count)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_kind_of_call_has_its_line(start_server, tmp_path):
    path = tmp_path / "access.log"
    server = start_server("--access-log", path, "--tenant", "team=2")
    tenant = [("x-attend-tenant", "team")]
    with grpc.insecure_channel(server.address) as channel:
        service = wire.stub.AttentionServiceStub(channel)
        sessions = wire.sessions_stub.SessionServiceStub(channel)
        service.Attend(wire.small_request(request_id="one", heads=2, check=True), metadata=tenant)
        with pytest.raises(grpc.RpcError):
            service.Attend(wire.small_request(request_id="bad", softcap=-1))
        requests = [wire.small_request(request_id=name) for name in ("two", "three")]
        assert len(list(service.AttendStream(iter(requests)))) == 2
        service.GetServerInfo(wire.pb.GetServerInfoRequest())
        with pytest.raises(grpc.RpcError):
            sessions.GetSession(wire.sessions_pb.GetSessionRequest(session=b"none"))
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/attend.v1.AttentionService/Nothing")(b"")
    said = lines(path, 7)
    by_id = {line["request_id"]: line for line in said if "request_id" in line}
    one, bad = by_id["one"], by_id["bad"]
    assert one["code"] == "OK" and one["tenant"] == "team" and one["peer"].startswith("ipv4:127.")
    assert one["method"] == wire.ATTEND
    assert one["transport"] == "inline" and one["pass"] == "forward"
    assert [one[name] for name in ("dtype", "batch", "heads_q", "heads_kv", "len_q", "len_k", "dim",
                                   "dim_v")] == ["float32", 1, 2, 2, 16, 16, 64, 64]
    assert one["bytes_in"] > 3 * 2 * 16 * 64 * 4 and one["bytes_out"] == 2 * 16 * 64 * 4
    assert one["device"] == "cpu" and one["kernel"].startswith("cpu_")
    assert one["batch_requests"] >= 1 and one["check_us"] >= 0
    phases = ("receive_us", "queue_us", "copy_in_us", "kernel_us", "copy_out_us")
    assert 0 <= sum(one[name] for name in phases) <= one["total_us"]
    assert bad["code"] == "INVALID_ARGUMENT" and "softcap" in bad["error"]
    assert bad["tenant"] == "default" and "kernel" not in bad and "dim" not in bad
    for name in ("two", "three"):
        assert by_id[name]["method"] == "/attend.v1.AttentionService/AttendStream"
    rest = {line["method"].rpartition("/")[2]: line["code"] for line in said
            if line.get("request_id") not in ("one", "bad", "two", "three")}
    assert rest == {"GetServerInfo": "OK", "GetSession": "NOT_FOUND", "Nothing": "UNIMPLEMENTED"}
    assert server.metric("attend_access_log_lines_total", outcome="written") == 7
    assert server.metric("attend_access_log_lines_total", outcome="lost") == 0


def test_a_full_disk_or_a_stuck_reader_loses_lines_but_no_call(start_server, tmp_path):
    full = start_server("--access-log", "/dev/full")
    wire.assert_serves(full.address)
    lost = harness.wait_for("a lost line", lambda: full.metric("attend_access_log_lines_total",
                                                               outcome="lost"))
    assert lost == 1
    harness.wait_for("the log to say so", lambda: "log lines are lost" in full.log())
    assert "No space left on device" in full.log() and full.stop() == 0

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    slow = start_server("--access-log", pipe)
    with wire.connect(slow.address) as service:
        answers = service.AttendStream(wire.small_request(length=1) for _ in range(1000))
        assert all(answer.status.code == 0 for answer in answers)
    assert slow.stop() == 0  # nor does it delay the shutdown
    os.close(reader)


def test_sighup_recreates_a_rotated_access_log(start_server, tmp_path):
    path = tmp_path / "access.log"
    server = start_server("--access-log", path, "--access-log-sample", "0")
    wire.assert_serves(server.address)  # an ordinary call: no line
    path.rename(tmp_path / "access.log.1")
    server.signal(signal.SIGHUP)
    harness.wait_for("a new file", path.exists)
    with wire.connect(server.address) as service, pytest.raises(grpc.RpcError):
        service.Attend(wire.small_request(request_id="late", softcap=-1))
    assert server.stop() == 0
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["late"]
    assert (tmp_path / "access.log.1").read_text() == ""


def test_refused_callers_are_logged_without_their_token(start_server, tmp_path):
    """Over TLS the gate refuses by headers alone, and the server itself knows the peer."""
    ca = certificates.Authority(tmp_path / "ca")
    path, known, unknown = tmp_path / "access.log", strangers.token(), strangers.token()
    (tmp_path / "tokens").write_text(strangers.line("me", known, "scopes=info"))
    unix = f"unix:{tmp_path}/s.sock"
    server = start_server("--access-log", path, "--access-log-sample", "0", "--tokens",
                          tmp_path / "tokens", *ca.serve(), listen=f"127.0.0.1:0,{unix}")

    def attend(channel, metadata):
        with pytest.raises(grpc.RpcError):
            wire.stub.AttentionServiceStub(channel).Attend(
                wire.small_request(), metadata=metadata, timeout=wire.SECONDS)

    with ca.channel(server.address) as encrypted, grpc.insecure_channel(unix) as plain:
        for metadata in ([], strangers.bearer(unknown), strangers.bearer(known)):
            attend(encrypted, metadata)
            attend(plain, metadata)
    assert server.stop() == 0
    text = path.read_text()
    assert known not in text and unknown not in text
    said = [json.loads(line) for line in text.splitlines()]
    assert [line["code"] for line in said] == ["UNAUTHENTICATED"] * 4 + ["PERMISSION_DENIED"] * 2
    assert all(line["method"] == wire.ATTEND and line["error"] and line["time"] for line in said)
    assert [line.get("caller") for line in said] == [None] * 4 + ["me"] * 2
    # On each of its two connections, by the gate or by gRPC.
    assert [line["peer"] for line in said] == [said[-2]["peer"], said[-1]["peer"]] * 3
    assert said[-2]["peer"].startswith("ipv4:127.0.0.1:")
    assert said[-1]["peer"].startswith(unix)


@pytest.mark.parametrize("seconds", ("0", "0.1"))
def test_calls_stopped_by_a_drain_are_logged(start_server, tmp_path, seconds):
    """Calls that run or wait, however short the drain."""
    path = tmp_path / "access.log"
    server = start_server("--lanes", "1", "--drain-timeout", seconds, "--access-log", path)
    with wire.connect(server.address) as service:
        calls = [service.Attend.future(wire.slow_request(8192, request_id=str(number)),
                                       timeout=600) for number in range(12)]
        harness.wait_for("all to be accepted",
                         lambda: server.metric("attend_inflight_requests") == len(calls))
        assert server.stop() == 0
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAVAILABLE}
    said = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(int(line["request_id"]) for line in said) == list(range(len(calls)))
    assert {line["code"] for line in said} == {"UNAVAILABLE"}


def test_an_access_log_in_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="access-log .*none/access.log cannot be opened"):
        harness.Server(tmp_path / "server", "--access-log", tmp_path / "none" / "access.log")
