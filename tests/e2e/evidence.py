# SPDX-License-Identifier: Apache-2.0
"""Evidence of each scenario of test_operate.py besides its alerts, as listed in deploy/operate.md:
a log line, and a metric that has changed since the server's start."""

import collections
import re

import alerts
import harness

# `line`: the page's name for it, None if the section names none; `also`: further text in it.
Seen = collections.namedtuple("Seen", "line also metric labels")

SEEN = {
    "a_certificate_ends": Seen("certificates not reloaded; the previous ones stay in use", "key",
                               "attend_tls_reloads_total", {"result": "failed"}),
    "a_changed_file_is_wrong": Seen("reload failed; the previous version stays in use", "streams",
                                    "attend_reload_failed", {"what": "limits"}),
    "a_caller_has_no_token": Seen("caller refused", 'peer=.*code="UNAUTHENTICATED"',
                                  "attend_rejected_requests_total", {"reason": "no_credentials"}),
    "a_device_is_lost": Seen("device lost", "cpu", "attend_device_healthy", {}),
    # Such devices are only counted here, not probed, so there is no log line.
    "a_gpu_is_left_out": Seen(None, "", "attend_devices_left_out", {}),
    "answers_are_wrong": Seen("reference check failed", 'transport="inline"',
                              "attend_reference_checks_total",
                              {"result": "failed", "transport": "inline"}),
    "answers_in_shared_memory_are_wrong": Seen(
        "reference check failed", 'transport="shm"', "attend_reference_checks_total",
        {"result": "failed", "transport": "shm"}),
    "dumps_cannot_be_written": Seen("check dump failed", "/dev/full/dumps",
                                    "attend_check_dumps_total", {"result": "failed"}),
    "no_thread_answers": Seen(None, "", "attend_heartbeat_unanswered_seconds", {}),
    "the_log_cannot_be_written": Seen("log lines are lost", "No space left on device",
                                      "attend_log_write_errors_total", {}),
    "more_requests_than_the_queue_takes": Seen(
        "request failed", 'code="RESOURCE_EXHAUSTED".*queue', "attend_rejected_requests_total",
        {"reason": "queue_full"}),
    "more_requests_than_deadlines_allow": Seen(
        "request failed", 'code="RESOURCE_EXHAUSTED".*deadline', "attend_deadline_requests_total",
        {"outcome": "refused"}),
    "requests_take_long": Seen(None, "", "attend_phase_duration_seconds_count",
                               {"phase": "kernel"}),
    "one_tenant_floods": Seen("request failed", 'tenant="a".*peer=', "attend_tenant_requests_total",
                              {"tenant": "a", "code": "RESOURCE_EXHAUSTED"}),
    "memory_is_full": Seen("request failed", 'code="RESOURCE_EXHAUSTED".*bytes',
                           "attend_rejected_requests_total", {"reason": "memory"}),
    "clients_do_not_read": Seen("call ended because the client did not read its answer", "peer=",
                                "attend_unread_calls_total", {}),
    "clients_give_no_time": Seen("request failed", 'code="DEADLINE_EXCEEDED".*peer=',
                                 "attend_short_deadlines_total", {}),
    "the_server_reads_late": Seen("request failed", 'code="CANCELLED".*tenant=',
                                  "attend_early_cancellations_total", {}),
    "more_connections_than_are_taken": Seen("connections:", " 4, 4 per peer",
                                            "attend_connections_refused_total", {}),
    "no_descriptor_is_left": Seen("no connection can be accepted", "Too many open files",
                                  "attend_accept_errors_total", {}),
    "a_drain_waits": Seen("draining:", "1 requests", "attend_draining", {}),
    "it_is_down": Seen(None, "", "up", {}),
    "it_restarts": Seen(None, "", "process_start_time_seconds", {}),
    "sessions_push_each_other_out": Seen(
        None, "", "attend_sessions_evicted_idle_seconds_count", {}),
    "sessions_have_no_room": Seen(None, "", "attend_rejected_requests_total",
                                  {"reason": "sessions"}),
}
# Queried from Prometheus: metrics that are not a server's own, or of servers that replace each
# other.
OF_PROMETHEUS = ("up", "process_start_time_seconds")
# Events before the server can be scraped for the first time.
FROM_THE_START = ("attend_devices_left_out",)


def value(scenario, server, prometheus):
    """The scenario's metric; 0 if it has no series yet, None if it cannot be read."""
    seen = SEEN[scenario]
    if seen.metric in OF_PROMETHEUS:
        return prometheus.value(seen.metric, scenario)
    return server.metric(seen.metric, **seen.labels) or 0


def before(scenario, server, prometheus):
    if SEEN[scenario].metric in FROM_THE_START:
        return 0
    harness.wait_for("the metric", lambda: value(scenario, server, prometheus) is not None)
    return value(scenario, server, prometheus)


def assert_seen(scenario, wanted, server, prometheus, at_first):
    """The page's sections on these alerts name the line and the metric, and both exist."""
    seen, runbooks, sections = SEEN[scenario], alerts.runbooks(), alerts.sections()
    texts = [sections[runbooks[alert]] for alert in wanted]
    named = seen.metric.removesuffix("_count")
    assert any(f"`{named}`" in text for text in texts), f"{named} is not in its section"
    lines = [line for text in texts for line in alerts.log_lines(text)]
    assert seen.line in lines or seen.line is None and (
        not lines or scenario == "a_gpu_is_left_out"), (seen.line, lines)
    if seen.line is not None:
        pattern = re.compile(f"{re.escape(seen.line)}.*{seen.also}")
        harness.wait_for(f"{pattern.pattern} in the log",
                         lambda: pattern.search(server.log()))
    harness.wait_for(f"{seen.metric} to move from {at_first}",
                     lambda: value(scenario, server, prometheus) not in (None, at_first))
