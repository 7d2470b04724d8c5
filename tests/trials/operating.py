# SPDX-License-Identifier: Apache-2.0
"""Operates a server under load: reloads limits by SIGHUP, makes admin calls, with tokens and TLS
replaces tokens and certificates, and may make one of the server's system calls fail. Each step
waits until it has taken effect."""

import threading
import traceback
from signal import SIGHUP

import harness

# Files for --limits, from none to strict, below trial.LIMITS. The tenants are a and b, as there.
LIMITS = ("", """requests-in-flight = 64
[a]
requests-in-flight = 6
bytes-per-second = "64MiB"
gflop-per-second = 4
checks = 2
streams = 4
sessions = 5
session-memory = "4MiB"
shared-memory = "512KiB"
connections = 6
""", """[b]
requests-in-flight = 3
sessions = 2
bytes-per-second = "8MiB"
""")
LEVELS = ("debug", "off", "info")
# Kinds of system calls that a loaded server makes all the time, and whose failure it survives.
FAILING = ("accept", "read", "write", "poll")


class Files:
    """The files and the admin socket that the server is started with."""

    def __init__(self, folder):
        self.limits, self.access_log = folder / "limits.toml", folder / "access.log"
        # After the lines of an earlier server.
        self.access_log_begin = self.access_log.stat().st_size if self.access_log.exists() else 0
        self.admin = f"unix:{folder}/admin.sock"
        self.limits.write_text(LIMITS[1])

    def flags(self):
        return ("--limits", self.limits, "--access-log", self.access_log, "--listen", self.admin)


class Operator:
    """Makes a step every `period` seconds on a thread, while its `with` block runs. `steps` counts
    them by name. With `system_calls`, one step makes a system call of the server fail."""

    def __init__(self, server, period, system_calls=None):
        self.server, self.period, self.system_calls = server, period, system_calls
        self.steps = {}
        self._limits = 1
        self._stop, self.fault = threading.Event(), None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, kind, *_):
        """Leaves the server without the limits of tenants that would refuse the last checks."""
        self._stop.set()
        self._thread.join()
        assert self.fault is None, self.fault
        if kind is not None or self.server.ended():
            return
        self._limits = len(LIMITS) - 1
        self.change_limits()
        self.admin("log-level", "info")

    def _run(self):
        steps = [self.change_limits, self.drain, self.level, self.evict, self.wrong_limits,
                 self.status, self.free]
        if self.server.locks is not None:
            steps[3:3] = [self.change_tokens, self.change_certificate]
        if self.system_calls is not None:
            steps.append(self.fail_a_call)
        turn = 0
        while not self._stop.wait(self.period) and not self.server.ended():
            step = steps[turn % len(steps)]
            turn += 1
            try:
                step()
            except Exception:  # raised when the block ends, unless it is ending already
                if not self._stop.is_set():
                    self.fault = f"{step.__name__}:\n{traceback.format_exc()}"
                return
            self.steps[step.__name__] = self.steps.get(step.__name__, 0) + 1

    def admin(self, *args):
        locks = self.server.locks
        return harness.run_client(
            "--server", self.server.files.admin, "admin", *args,
            env={"ATTEND_TOKEN": locks.operator} if locks else {}).stdout

    def _counts_one_more(self, metric, change, **labels):
        """Calls `change` and waits until the counter `metric` has risen."""
        def count():
            return self.server.metric(metric, **labels) or 0

        before = count()
        change()
        harness.wait_for(f"{metric} {labels}", lambda: count() > before, 60)

    def _reload(self, text, result):
        def change():
            self.server.files.limits.write_text(text)
            self.server.signal(SIGHUP)
        self._counts_one_more("attend_reloads_total", change, what="limits", result=result)

    def change_limits(self):
        self._limits = (self._limits + 1) % len(LIMITS)
        self._reload(LIMITS[self._limits], "ok")

    def wrong_limits(self):
        """An invalid file: the earlier limits stay."""
        self._reload("requests-in-flight = many\n", "failed")

    def drain(self):
        """Drains briefly, then accepts new work again."""
        assert self.admin("drain").startswith("draining")
        assert self.server.metric("attend_draining") == 1
        self._stop.wait(0.2)
        self.admin("undrain")
        assert self.server.metric("attend_draining") == 0

    def level(self):
        self.admin("log-level", LEVELS[self.steps.get("level", 0) % len(LEVELS)])

    def evict(self):
        self.admin("evict", "a")

    def free(self):
        self.admin("free", "--tenant", "b")

    def status(self):
        assert "tenant" in self.admin("status")

    def change_tokens(self):
        self._counts_one_more("attend_tokens_reloads_total", self.server.locks.change_tokens,
                              result="ok")

    def fail_a_call(self):
        """Steps run one at a time, so that no other step meets the failure."""
        kind = FAILING[self.steps.get("fail_a_call", 0) % len(FAILING)]
        before = self.system_calls.failed(kind)
        self.system_calls.fail(kind)
        harness.wait_for(f"a failed {kind}", lambda: self.system_calls.failed(kind) > before, 60)

    def change_certificate(self):
        self._counts_one_more("attend_tls_reloads_total", self.server.locks.change_certificate,
                              result="ok")
