# SPDX-License-Identifier: Apache-2.0
"""Places where others might read a token: the log, the access log, dumps, error messages, metrics.
None of them contains it."""

import base64
import pathlib

import grpc

import harness
import sessions
import strangers
import wire
from strangers import TENANTS, TOKENS, TOKENS_FILE, ask, bearer, refusal

# A token that belongs to no caller.
WRONG = strangers.token()
# Refused ways to present a token, and tokens that belong to another caller or have expired.
SHOWN = [
    bearer(WRONG), bearer(TOKENS["expired"]), bearer(TOKENS["informed"]),
    bearer(TOKENS["blue"], ("x-attend-tenant", "green")),
    bearer(TOKENS["blue"], *bearer(TOKENS["blue"])), bearer(TOKENS["blue"] + " more"),
    [("authorization", TOKENS["blue"])], [("authorization", "Basic " + TOKENS["blue"])],
    [("authorization", "Token " + TOKENS["blue"])], bearer(TOKENS["blue"] * 8),
]


def told(server):
    """The refusals' messages for every way to present a token, by kind of call."""
    words = []
    with grpc.insecure_channel(server.address) as channel:
        for metadata in SHOWN:
            answers = [ask(channel, path, metadata) for path in (
                wire.ATTEND, "/attend.v1.AttentionService/AttendStream",
                "/attend.v1.AttentionService/AttendChunked",
                "/attend.v1.SessionService/CreateSession", "/attend.v1.AdminService/GetStatus",
                "/no.such.Service/Method")]
            assert all(answer.code is not grpc.StatusCode.OK for answer in answers)
            words += [f"{answer.message} {answer.trailers}" for answer in answers]
        other = sessions.Client(channel, "")
        other.metadata = bearer(TOKENS["green"])
        words.append(str(refusal(lambda: other.call("GetSession", session=b"x" * 16))))
    regions = strangers.Regions(server.regions)
    for of in (WRONG, TOKENS["expired"], TOKENS["informed"]):
        words.append(str(regions.identify(of)))
    regions.close()
    return words


def forms(token):
    raw = token.encode()
    # Base64 at each of three offsets, without the characters that depend on neighbours.
    coded = [base64.b64encode(bytes(pad) + raw)[4:-4].decode() for pad in range(3)]
    return [token, raw.hex(), raw.hex(" "), *coded]


def test_no_token_is_in_a_log_an_error_a_dump_or_a_metric(start_server, tmp_path):
    (tmp_path / "tokens").write_text(TOKENS_FILE)
    dumps, access = tmp_path / "dumps", tmp_path / "access.log"
    server = start_server(
        TENANTS, "--tokens", tmp_path / "tokens", "--log-level=trace", "--log-rate=0",
        "--access-log", access, "--check-dump-dir", dumps, "--check-dump-interval=0",
        "--session-memory=16MiB", "--shared-memory", "--shared-memory-socket",
        tmp_path / "regions" / "sock", program=harness.program_of_tests("attend-faulty-server"),
        env={"ATTEND_FAULT": "corrupt"})
    server.regions = tmp_path / "regions" / "sock"
    with wire.connect(server.address) as service:
        for name in ("blue", "computes"):  # checks fail, so that there are dumps
            answer = service.Attend(wire.small_request(check=True, request_id=name),
                                    metadata=bearer(TOKENS[name]), timeout=wire.SECONDS)
            assert not answer.check.ok
        assert len(list(service.AttendStream(iter([wire.small_request()]),
                                             metadata=bearer(TOKENS["green"])))) == 1
    words = told(server)
    harness.wait_for("two dumps", lambda: len(list(dumps.glob("*/report.json"))) == 2)
    # The last call is not one of a refused caller, whose lines are limited.
    harness.wait_for("the last call's line", lambda: "/GetSession" in access.read_text())
    assert access.read_text().count("UNAUTHENTICATED") > 10
    written = [path for path in [access, pathlib.Path(server.log_path), *dumps.rglob("*")]
               if path.is_file()]
    assert len(written) == 2 + 2 * 3
    texts = {str(path): path.read_bytes().decode("latin-1") for path in written}
    texts |= {"refusals": "\n".join(words), "metrics": server.metrics_text()}
    assert "computes" in texts[str(access)] and "informed" in texts["refusals"]  # names are told
    for name, token in {**TOKENS, "unknown": WRONG}.items():
        for where, text in texts.items():
            for form in forms(token):
                assert form not in text, f"the token of {name} is in {where}"
