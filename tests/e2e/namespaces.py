# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces, each with a link to the first, which can be
cut."""

import concurrent.futures
import ctypes
import os
import shutil
import subprocess

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)


def _check(code):
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _run(*command):
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def missing():
    """The reason why this process cannot create namespaces; None if it can."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "not root, or no ip"
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(lambda: Hosts(1).close()).result()
        except (OSError, AssertionError) as error:
            return f"no network namespaces with links: {error}"
    return None


class Hosts:
    """The calling thread's host, for as long as the thread lives, and `number` links to it from one
    other host, the clients'. There, the thread's host is 10.9.1.1, 10.9.2.1, ... Programs that the
    thread starts run on its host, or on the other one if it calls enter() first."""

    def __init__(self, number):
        self._open = []
        here, self._other = self._make(), self._make()
        try:
            self._enter(here)
            for link in range(1, number + 1):
                # Only the first name stays in this namespace.
                _run(*f"ip link add near{link} type veth peer name far{link}".split(), "netns",
                     f"/proc/{os.getpid()}/fd/{self._other}")
                self._up(f"near{link}", f"10.9.{link}.1/24")
            self._enter(self._other)
            for link in range(1, number + 1):
                self._up(f"far{link}", f"10.9.{link}.2/24")
            self._enter(here)
        except BaseException:
            self.close()
            raise

    def _make(self):
        _check(_libc.unshare(_NEW_NETWORK))
        _run("ip", "link", "set", "lo", "up")
        self._open.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        return self._open[-1]

    @staticmethod
    def _enter(namespace):
        _check(_libc.setns(namespace, _NEW_NETWORK))

    @staticmethod
    def _up(name, address):
        _run("ip", "addr", "add", address, "dev", name)
        _run("ip", "link", "set", name, "up")

    def enter(self):
        """Moves the calling thread or process to the other host."""
        self._enter(self._other)

    @staticmethod
    def cut(link):
        """Silently drops packets of this link from now on."""
        _run("ip", "link", "set", f"near{link}", "down")

    @staticmethod
    def mend(link):
        _run("ip", "link", "set", f"near{link}", "up")

    def close(self):
        while self._open:
            os.close(self._open.pop())
