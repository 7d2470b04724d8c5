# SPDX-License-Identifier: Apache-2.0
"""Several servers as one: a name server for them, and loads that run while they come and go."""

import json
import signal
import socket
import struct
import subprocess
import threading

import harness

NAME = "attend.fleet.test"


class Dns:
    """A name server on loopback with one name, whose addresses the test sets."""

    def __init__(self):
        self._addresses = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def set(self, *addresses):
        self._addresses = [socket.inet_aton(address) for address in addresses]

    def target(self, port):
        """The servers at this port of all its addresses."""
        return f"dns://127.0.0.1:{self._socket.getsockname()[1]}/{NAME}:{port}"

    def close(self):
        self._socket.sendto(b"", self._socket.getsockname())  # wakes the thread, and ends it
        self._thread.join()
        self._socket.close()

    def _serve(self):
        while True:
            query, peer = self._socket.recvfrom(4096)
            if not query:
                return
            self._socket.sendto(self._answer(query), peer)

    def _answer(self, query):
        end = query.index(0, 12) + 5  # of the query: its name, type and class
        kind = struct.unpack("!H", query[end - 4:end - 2])[0]
        addresses = self._addresses if kind == 1 else []  # A
        records = b"".join(struct.pack("!HHHIH", 0xC00C, 1, 1, 0, 4) + each for each in addresses)
        return (query[:2] + struct.pack("!HHHHH", 0x8180, 1, len(addresses), 0, 0) +
                query[12:end] + records)


class Load:
    """`attend-client load` in the background, with small calls. The phase before the measurement
    gives it `warmup` seconds to connect to all servers. `enter`: called first in its process."""

    def __init__(self, folder, server, *args, shape="B1,H1,L16,D64", warmup=0, enter=None):
        self.json = folder / "load.json"
        command = [harness.binary("attend-client"), "load", "--server", server, "--shape",
                   shape, "--warmup", warmup, "--json", self.json, "--quiet", *args]
        self.process = subprocess.Popen([str(part) for part in command], env=harness.clean_env(),
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, preexec_fn=enter)

    def finish(self, code=0):
        """Waits for its end, and returns the results of its only step."""
        said, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == code, said
        step, = json.loads(self.json.read_text())["steps"]
        return step

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        return self.finish(130)

    def kill(self):
        self.process.kill()
        self.process.communicate()


def answered(server):
    """Number of requests that the server has answered."""
    return server.metric("attend_requests_total", code="OK")


def counts(step):
    """Answers of a load's step, by the servers' ids."""
    return {each["id"]: each["answered"] for each in step["servers"]}
