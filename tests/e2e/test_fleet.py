# SPDX-License-Identifier: Apache-2.0
"""Three servers under load: how calls are distributed, and what is lost when one drains, is killed,
is cut off, or starts late. Every call is counted."""

import base64
import concurrent.futures
import contextlib
import queue
import signal

import grpc
import hpack
import numpy as np
import pytest

import certificates
import fleet
import harness
import hostile
import namespaces
import wire
from fleet import answered, counts
from harness import run_client, wait_for

CALLERS = 4
# Runs until its test ends it.
ENDLESS = ("--duration", "600", "--concurrency", CALLERS)


class Fleet:
    """Servers named a, b, ... at one port of 127.0.1.1, 127.0.1.2, ..., started one by one."""

    def __init__(self, start, *args):
        self._start, self._args = start, args
        self.port = harness.free_port()
        self.servers = []

    def add(self, also=""):
        number = len(self.servers)
        server = self._start("--server-id", "abc"[number], *self._args,
                             listen=f"127.0.1.{number + 1}:{self.port}{also}")
        self.servers.append(server)
        return server

    @property
    def list(self):
        return ",".join(server.address for server in self.servers)


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def make_fleet(start_server):
    def make(*args, servers=3):
        made = Fleet(start_server, *args)
        for _ in range(servers):
            made.add()
        return made

    return make


@pytest.fixture
def load(tmp_path):
    running = []

    def start(*args, **options):
        running.append(fleet.Load(tmp_path, *args, **options))
        return running[-1]

    yield start
    for each in running:
        each.kill()


def test_calls_are_spread_and_counted_by_server(make_fleet, load):
    made = make_fleet()
    step = load(made.list, "--count", "300", "--concurrency", CALLERS, "--connections", "2",
                warmup=0.5).finish()
    assert step["status"] == {"OK": 300}
    assert {each["address"] for each in step["servers"]} == set(made.list.split(","))
    assert sum(counts(step).values()) == 300
    for name, server in zip("abc", made.servers):
        assert counts(step)[name] <= answered(server)
    # Calls alternate between servers on each of the two connections.
    assert all(95 <= count <= 105 for count in counts(step).values()), counts(step)


def test_the_table_shows_calls_by_server(make_fleet):
    made = make_fleet(servers=2)
    table = run_client("load", "--server", made.list, "--shape", "B1,H1,L16,D64", "--count", "10",
                       "--warmup", "0.5", "--concurrency", "1", "--quiet").stdout
    assert f"by server: {made.servers[0].address} (a) 5, {made.servers[1].address} (b) 5" in table


def test_a_drain_loses_no_call(make_fleet, load):
    made = make_fleet()
    running = load(made.list, *ENDLESS, "--attempts", "5")
    going, *staying = made.servers
    wait_for("every server's calls", lambda: all(answered(server) for server in made.servers))
    assert going.stop() == 0, going.log()
    before = [answered(server) for server in staying]
    wait_for("calls of the others",
             lambda: all(answered(s) > b + 50 for s, b in zip(staying, before)))
    step = running.stop()
    assert set(step["status"]) == {"OK"}, step["status"]
    # Calls sent to it after it stopped serving were refused, and answered by another server.
    assert step["retries"] <= 2 * CALLERS
    assert sum(counts(step).values()) == step["sent"]


def test_a_drain_by_an_operator_sends_calls_elsewhere_and_back(make_fleet, load, tmp_path):
    made = make_fleet(servers=2)
    socket = tmp_path / "operator.sock"
    third = made.add(also=f",unix:{socket}")
    running = load(made.list, *ENDLESS, "--attempts", "5")
    wait_for("its calls", lambda: answered(third))
    run_client("admin", "drain", "--server", f"unix:{socket}")
    wait_for("the end of its work", lambda: third.metric("attend_inflight_requests") == 0)
    other = made.servers[0]
    before = answered(other)
    wait_for("calls of another", lambda: answered(other) > before + 50)
    drained = answered(third)
    before = answered(other)
    wait_for("calls of another", lambda: answered(other) > before + 50)
    assert answered(third) == drained, "a draining server gets nothing new"
    run_client("admin", "undrain", "--server", f"unix:{socket}")
    wait_for("its calls again", lambda: answered(third) > drained)
    assert set(running.stop()["status"]) == {"OK"}


def test_a_kill_loses_at_most_the_calls_in_flight(make_fleet, load):
    made = make_fleet()
    running = load(made.list, *ENDLESS, "--allow", "UNAVAILABLE")
    dying, *staying = made.servers
    wait_for("every server's calls", lambda: all(answered(server) for server in made.servers))
    dying.kill()
    before = [answered(server) for server in staying]
    wait_for("calls of the others",
             lambda: all(answered(s) > b + 50 for s, b in zip(staying, before)))
    step = running.stop()
    assert step["status"].get("UNAVAILABLE", 0) <= CALLERS, step["status"]
    assert set(step["status"]) <= {"OK", "UNAVAILABLE"}


def test_calls_in_flight_on_a_lost_server_are_retried_elsewhere(make_fleet, load):
    made = make_fleet()
    running = load(made.list, *ENDLESS, "--attempts", "5")
    wait_for("every server's calls", lambda: all(answered(server) for server in made.servers))
    made.servers[0].kill()
    before = answered(made.servers[1])
    wait_for("calls of another", lambda: answered(made.servers[1]) > before + 50)
    step = running.stop()
    assert set(step["status"]) == {"OK"}, step["status"]
    assert step["retries"] <= 2 * CALLERS


@pytest.fixture
def names():
    made = fleet.Dns()
    yield made
    made.close()


def test_a_new_server_is_used_once_old_connections_expire(make_fleet, load, names):
    made = make_fleet("--max-connection-age", "1", servers=2)
    names.set("127.0.1.1", "127.0.1.2")
    running = load(names.target(made.port), *ENDLESS)
    wait_for("both servers' calls", lambda: all(answered(server) for server in made.servers))
    late = made.add()
    assert answered(late) == 0
    names.set("127.0.1.1", "127.0.1.2", "127.0.1.3")
    wait_for("the new server's calls", lambda: answered(late) > 50)
    step = running.stop()
    assert set(step["status"]) == {"OK"}, step["status"]
    for name, server in zip("abc", made.servers):
        assert 0 <= answered(server) - counts(step)[name] <= CALLERS, "but for the last ones"


def test_expiring_connections_end_no_stream(make_fleet):
    server, = make_fleet("--max-connection-age", "0.2", servers=1).servers
    with wire.connect(server.address) as stub:
        requests = queue.SimpleQueue()
        answers = stub.AttendStream(iter(requests.get, None), timeout=wire.SECONDS)

        def on_stream():
            requests.put(wire.small_request())
            return next(answers)

        def replaced():
            on_stream()
            stub.Attend(wire.small_request(), timeout=wire.SECONDS)
            return server.metric("attend_connections") == 2

        wait_for("a second connection beside the stream's", replaced)
        on_stream()
        requests.put(None)
        assert list(answers) == []


# Pings after a second of silence; calls in flight are retried elsewhere.
ASKING = (*ENDLESS, "--attempts", "5", "--keepalive-time", "1", "--keepalive-timeout", "0.5")


def assert_left_out_until_back(servers, running, cut, mend):
    """Starts a load with ASKING on the first server, which cut() disconnects until mend()."""
    cut_off, *others = servers
    wait_for("every server's calls", lambda: all(answered(server) for server in servers))
    cut()
    try:
        before = [answered(server) for server in others]
        wait_for("calls of the others, many times the callers",
                 lambda: all(answered(s) > b + 500 for s, b in zip(others, before)), 20)
    finally:
        mend()
    before = answered(cut_off)
    wait_for("its calls again", lambda: answered(cut_off) > before + 50, 20)
    step = running.stop()
    assert set(step["status"]) == {"OK"}, step["status"]
    # The call of each caller when the link was cut, and the first attempts to reach the server
    # again.
    assert step["retries"] <= 4 * CALLERS


def test_a_hanging_server_is_left_out_until_it_responds(make_fleet, load):
    made = make_fleet()
    hangs = made.servers[0]
    assert_left_out_until_back(made.servers, load(made.list, *ASKING),
                               lambda: hangs.signal(signal.SIGSTOP),
                               lambda: hangs.signal(signal.SIGCONT))


def test_a_server_behind_a_cut_link_is_left_out_until_it_responds(start_server, load):
    def partition():
        with contextlib.closing(namespaces.Hosts(3)) as hosts:
            servers = [start_server("--insecure", listen=f"10.9.{link}.1:0")
                       for link in (1, 2, 3)]
            running = load(",".join(server.address for server in servers), *ASKING,
                           enter=hosts.enter)
            assert_left_out_until_back(servers, running, lambda: hosts.cut(1),
                                       lambda: hosts.mend(1))

    if missing := namespaces.missing():
        pytest.skip(missing)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(partition).result()


def test_the_streams_of_one_upload_reach_one_server(make_fleet, load):
    made = make_fleet()
    # 32 MiB over four streams: large enough that each stream still finds the request.
    step = load(made.list, "--count", "9", "--concurrency", "2", "--connections", "4",
                "--transport", "chunked", "--discard-output", shape="B1,H64,L512,D64").finish()
    assert step["status"] == {"OK": 9} and sum(counts(step).values()) == 9
    for server in made.servers:
        assert "stream refused" not in server.log(), "it knew every token"


def test_sessions_stay_with_their_server(make_fleet, tmp_path):
    made = make_fleet()
    on = ("--server", made.list)
    shape = ("--heads-kv", "1", "--dim", "32")
    anywhere = run_client("session", "create", *shape, *on).stdout.strip()
    assert anywhere.partition("@")[2] in made.list.split(",")
    names = [run_client("session", "create", *shape, "--server", server.address).stdout.strip() +
             f"@{server.address}" for server in made.servers]
    k = np.random.default_rng(1).standard_normal((1, 1, 5, 32), np.float32)
    np.save(tmp_path / "k.npy", k)
    files = [part for name in "kv" for part in (f"--{name}", tmp_path / "k.npy")]
    for name in names:
        assert "5 tokens" in run_client("session", "append", name, *files, *on).stdout
    first, other, _ = names
    fork = run_client("session", "fork", first, *on).stdout.strip()
    assert fork.partition("@")[2] == first.partition("@")[2]
    both = run_client("session", "attend", first, other, "--q", tmp_path / "k.npy", *on,
                      check=False)
    assert both.returncode == 1 and "sessions[1] is on" in both.stderr, both.stderr
    for name in (*names, fork, anywhere):
        run_client("session", "free", name, *on)
    for server in made.servers:
        assert server.metric("attend_sessions") == 0


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_a_load_of_sessions_over_several_servers(make_fleet, flags):
    made = make_fleet()
    done = run_client("load", "--server", made.list, "--sessions", "6", "--context", "20",
                      "--decode", "5", "--shape", "B1,H2,L16,D32", "--verify", "1", "--quiet",
                      *flags)
    assert "FAILED 0" in done.stdout, done.stdout
    # The servers they are made on depend on which are connected by then.
    assert sum(answered(server) for server in made.servers) == 6 * (1 + 5)


def test_memory_is_shared_with_one_server_of_this_host(start_server, tmp_path):
    port = harness.free_port()
    servers = [start_server("--shared-memory", "--shared-memory-socket", tmp_path / f"{n}.sock",
                            listen=f"127.0.1.{n}:{port}") for n in (1, 2)]
    listed = ",".join(server.address for server in servers)
    run_client("load", "--server", listed, "--shape", "B1,H1,L16,D64", "--count", "20", "--warmup",
               "0", "--transport", "shm", "--quiet")
    bytes_of = [server.metric("attend_transport_bytes_total", transport="shm")
                for server in servers]
    assert sorted(bool(each) for each in bytes_of) == [False, True], "one has all of it"


def load_told(server, method):
    """The load report of an answer, an OrcaLoadReport of rps_fractional (6) and
    application_utilization (9), both fixed64; None: none. gRPC's clients do not show it."""
    decoder = hpack.Decoder()
    with hostile.Http2(server.address) as client:
        stream = client.open(f"/attend.v1.AttentionService/{method}")
        client.data(stream, hostile.grpc_message(wire.small_request().SerializeToString()),
                    hostile.END_STREAM)
        decoder.decode(client.wait_for_frame(hostile.HEADERS, stream))
        client.wait_for_frame(hostile.DATA, stream)
        trailers = dict(decoder.decode(client.wait_for_frame(hostile.HEADERS, stream)))
    assert trailers["grpc-status"] == "0"
    if "endpoint-load-metrics-bin" not in trailers:
        return None
    text = trailers["endpoint-load-metrics-bin"]
    report = base64.b64decode(text + "=" * (-len(text) % 4))
    assert len(report) == 18 and report[0] == 6 << 3 | 1 and report[9] == 9 << 3 | 1
    return report


def test_every_answer_names_its_server_and_its_load(start_server):
    server = start_server("--server-id", "attend-0", "--load-reports")
    with wire.connect(server.address) as stub:
        info, call = stub.GetServerInfo.with_call(wire.pb.GetServerInfoRequest())
        assert info.server_id == "attend-0"
        assert ("attend-server-id", "attend-0") in call.initial_metadata()

        stream = stub.AttendStream(iter([wire.small_request()]))
        assert len(list(stream)) == 1
        assert ("attend-server-id", "attend-0") in stream.initial_metadata()
        refused = stub.Attend.future(wire.pb.AttendRequest())
        assert refused.exception() is not None
        assert ("attend-server-id", "attend-0") in refused.initial_metadata()
    report = wait_for("the first second's report", lambda: load_told(server, "Attend"))
    rate, busy = np.frombuffer(report[1:9] + report[10:], "<f8")
    assert rate > 0 and 0 < busy <= 1
    assert load_told(server, "AttendStream")


def test_server_ids_are_unique(start_server):
    names = set()
    for server in (start_server(), start_server()):
        with wire.connect(server.address) as stub:
            _, call = stub.Attend.with_call(wire.small_request())
            names.add(dict(call.initial_metadata())["attend-server-id"])
    assert len(names) == 2 and all(len(name) == 16 for name in names)


def test_grpcs_python_spreads_calls_as_the_readme_says(make_fleet):
    made = make_fleet()
    code = (harness.ROOT / "proto/README.md").read_text().split("```python\nspread")[1]
    code = "spread" + code.split("```")[0].replace("dns:///attend.example:8001",
                                                   f"ipv4:{made.list}")
    scope = {"grpc": grpc, "options": wire.UNLIMITED}
    exec(code, scope)
    with scope["servers"] as channel:
        stub = wire.stub.AttentionServiceStub(channel)

        def answers():
            _, call = stub.Attend.with_call(wire.small_request(), timeout=wire.SECONDS)
            return dict(call.initial_metadata())["attend-server-id"]

        wait_for("all three", lambda: {answers() for _ in range(3)} == set("abc"))


@pytest.mark.parametrize("server, flags, said", [
    ("127.0.0.1:1,[::1]:1", (), "of IPv4 or of IPv6 addresses"),
    ("127.0.0.1:1,localhost:1", (), "localhost is not one"),
    ("127.0.0.1:1,,127.0.0.2:1", (), "an empty entry before or after a comma"),
    ("10.0.0.1:1,127.0.0.1:1", ("--token-file", "token"), "in the clear"),
    ("127.0.0.1:1,127.0.0.2:1", ("--tls-ca", "system"), "tls_server_name"),
    ("127.0.0.1:1", ("--keepalive-time", "0.5"), "--keepalive-time"),
])
def test_invalid_server_lists_are_refused(tmp_path, server, flags, said):
    (tmp_path / "token").write_text("0123456789abcdef0123\n")
    flags = [tmp_path / flag if flag == "token" else flag for flag in flags]
    done = run_client("info", "--server", server, *flags, check=False)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_calls_chunks_and_sessions_over_tls(make_fleet, load, ca, tmp_path):
    made = make_fleet(*ca.serve())
    # Certificates are for one name, whatever the address.
    trust = ("--tls-ca", ca.ca, "--tls-server-name", "localhost")
    step = load(made.list, "--count", "9", "--concurrency", "3", "--connections", "2",
                "--transport", "chunked", "--discard-output", *trust,
                shape="B1,H32,L256,D64").finish()
    assert step["status"] == {"OK": 9} and sum(counts(step).values()) == 9
    name = run_client("session", "create", "--heads-kv", "1", "--dim", "32", "--server", made.list,
                      *trust).stdout.strip()
    run_client("session", "free", name, "--server", made.list, *trust)
