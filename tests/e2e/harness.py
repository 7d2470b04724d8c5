# SPDX-License-Identifier: Apache-2.0
"""Real processes for the end-to-end tests: the server, its metrics, and free ports."""

import contextlib
import json
import os
import pathlib
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS_MAX = 30
STOP_SECONDS_MAX = 60
# With $ATTEND_INSTALLED, attend is the installed package of this interpreter, otherwise that of the
# sources.
INSTALLED = bool(os.environ.get("ATTEND_INSTALLED"))
PACKAGES = [] if INSTALLED else \
    [str(ROOT / folder) for folder in ("client/python", "kernels/python")]


def binary(name):
    """The server or client to test: ATTEND_BIN_DIR, or ATTEND_BUILD_DIR, or build/release."""
    if os.environ.get("ATTEND_BIN_DIR"):
        return pathlib.Path(os.environ["ATTEND_BIN_DIR"]) / name
    build = pathlib.Path(os.environ.get("ATTEND_BUILD_DIR") or ROOT / "build" / "release")
    return build / name.removeprefix("attend-") / name


def program_of_tests(name):
    """A program of the build's tests."""
    return binary("attend-server").resolve().parents[1] / "tests/server" / name


def libraries():
    """The shared libraries beside `binary`, by the variables that name them to Python."""
    names = {"ATTEND_CLIENT_LIBRARY": ("client/c", "libattend_client.so"),
             "ATTEND_KERNELS_LIBRARY": ("kernels/c", "libattend_kernels.so")}
    if os.environ.get("ATTEND_BIN_DIR"):
        folder = pathlib.Path(os.environ["ATTEND_BIN_DIR"]).resolve().parent / "lib"
        return {variable: folder / name for variable, (_, name) in names.items()}
    build = binary("attend-server").resolve().parents[1]
    return {variable: build / folder / name for variable, (folder, name) in names.items()}


def use_packages():
    """Puts PACKAGES on the path, so that `import attend` finds the right one from here on."""
    sys.path[:0] = PACKAGES
    if INSTALLED:
        # A later entry for the sources on the path does not change a completed import.
        import attend
        import attend_kernels
        for module in (attend, attend_kernels):
            assert "site-packages" in module.__file__, f"{module.__file__} is not installed"


def take_interrupts():
    """A shell ignores interrupts for processes that it starts in the background, and so would all
    children of this one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def use_libraries():
    """Tells Python of the build's libraries, unless the caller named others. Returns the missing
    ones. An installed package has its own."""
    if INSTALLED:
        return []
    for variable, path in libraries().items():
        os.environ.setdefault(variable, str(path))
    return [os.environ[name] for name in libraries() if not os.path.exists(os.environ[name])]


@contextlib.contextmanager
def at_once(number, action):
    """Repeats `action` in several threads while the block runs."""
    over = threading.Event()

    def repeat():
        while not over.is_set():
            action()

    threads = [threading.Thread(target=repeat) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def wait_for(what, condition, seconds=10):
    """Polls until condition() is true and returns its value; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def free_port():
    """A port below the ephemeral range, among 1000 reserved for this worker of pytest-xdist: no
    other process gets it before it is used, or between a server and its successor."""
    first = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = first - 1000 * worker - 1 - secrets.randbelow(1000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def clean_env(**more):
    """The environment without the caller's own settings for a server."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ATTEND_")}
    return {**env, **more}


class ServerEnded(AssertionError):
    """A server failed to start."""

    def __init__(self, code, log):
        super().__init__(f"the server ended at once, with {code}:\n{log}")
        self.code, self.log = code, log


class Server:
    """One attend-server process on free loopback ports, ready when the constructor returns.
    `limits`: passed to resource.setrlimit, as {which: (soft, hard)}. `enter`: called in the process
    before it becomes the server. `program`: another program with the same flags. `stderr`: a
    descriptor for the log, instead of the file that log() reads. `core_dumps`: lets tests that do
    not run as root read its memory maps and descriptors."""

    def __init__(self, folder, *args, listen="127.0.0.1:0", metrics="127.0.0.1:0", env=None,
                 limits=None, enter=None, program=None, stderr=None,
                 core_dumps=os.geteuid() != 0):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_path = self.folder / "server.log"
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [program or binary("attend-server"), "--listen", listen, "--metrics-listen",
                   metrics, "--device", "cpu", "--ready-file", ready, *args]
        own = {"ATTEND_CORE_DUMPS": "true"} if core_dumps else {}
        self._log = open(self.log_path, "wb")

        def prepare():
            if enter:
                enter()
            for which, values in (limits or {}).items():
                resource.setrlimit(which, values)

        self.process = subprocess.Popen([str(c) for c in command], stdout=self._log,
                                        stderr=subprocess.STDOUT if stderr is None else stderr,
                                        env=clean_env(**own, **(env or {})),
                                        preexec_fn=prepare if limits or enter else None)
        try:
            wait_for("the server to be ready", lambda: ready.exists() or self.ended(),
                     START_SECONDS_MAX)
            if self.ended():
                raise ServerEnded(self.process.returncode, self.log())
            self.ready = json.loads(ready.read_text())
        except BaseException:
            self.kill()
            raise
        self.addresses = self.ready["listen"]
        self.address = self.addresses[0]
        self.metrics_address = self.ready["metrics"]

    def ended(self):
        return self.process.poll() is not None

    def log(self):
        """Text logged so far, once the writing thread is idle."""
        wait_for("the log to be written", lambda: self.ended() or self._log_is_written())
        return self.log_path.read_text(errors="replace")

    def _log_is_written(self):
        """Whether the threads that write lines sleep. A thread that has a line is woken at once."""
        states = []
        for stat in pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                name, state = re.match(r"\d+ \((.*)\) (\w)", stat.read_text()).groups()
                states += [state] if name == "attend-lines" else []
        return not {"R", "D"}.intersection(states)

    @contextlib.contextmanager
    def alive(self):
        """If an error inside the block is caused by the server's death, reports how it died."""
        try:
            yield
        except (OSError, LookupError) as error:
            # A dying process loses its memory and sockets before its parent is notified.
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(2)
                how = f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                raise AssertionError(f"the server ended {how}, its log:\n{self.log()}") from error
            raise

    def proc(self, name):
        """The text of /proc/PID/NAME."""
        with self.alive():
            return pathlib.Path(f"/proc/{self.process.pid}/{name}").read_text()

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self, seconds=STOP_SECONDS_MAX):
        return self.process.wait(seconds)

    def stop(self):
        """SIGTERM and the exit code."""
        if not self.ended():
            self.signal(signal.SIGTERM)
        try:
            return self.wait()
        finally:
            self.kill()

    def kill(self):
        if not self.ended():
            self.process.kill()
            self.process.wait()
        self._log.close()

    def metrics_text(self):
        url = f"http://{self.metrics_address}/metrics"
        with self.alive(), urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    def metric(self, name, **labels):
        """Sum of the family's series that have these labels; None if there is none."""
        values = []
        for line in self.metrics_text().splitlines():
            match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
            if not match or match[1] != name:
                continue
            own = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            if all(own.get(k) == v for k, v in labels.items()):
                values.append(float(match[3]))
        return sum(values) if values else None


def run_client(*args, timeout=60, env=None, check=True):
    """Runs attend-client; returns the finished process, its exit code 0 unless check is false."""
    done = subprocess.run([str(binary("attend-client")), *[str(a) for a in args]],
                          capture_output=True, text=True, timeout=timeout,
                          env=clean_env(**(env or {})))
    if check:
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
