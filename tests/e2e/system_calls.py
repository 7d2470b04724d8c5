# SPDX-License-Identifier: Apache-2.0
"""A server's system calls, which fail on request, and its wall clock: the test's side of
tests/trials/failing_calls.cc."""

import errno
import mmap
import struct
import subprocess

import harness

# Kinds of calls, in the library's order, and their default errors.
KINDS = {
    "allocate": errno.ENOMEM,  # malloc and the like, except gRPC's receive buffers
    "accept": errno.EMFILE,
    "read": errno.ECONNRESET,  # recvmsg too
    "write": errno.ECONNRESET,   # send and sendmsg too
    "mmap": errno.ENOMEM,
    "open": errno.EMFILE,        # fopen and memfd_create too
    "thread": errno.EAGAIN,      # pthread_create
    "descriptor": errno.EMFILE,  # socket, eventfd, epoll_create1
    "poll": errno.ENOMEM,        # epoll_wait, epoll_ctl, poll
}

_FRAMES, _FRAME_BYTES = 24, 160
_CALLS = struct.Struct("<QQQQq")
_CALLS_BYTES = _CALLS.size + _FRAMES * _FRAME_BYTES
_HEAD = struct.Struct("<q")  # the offset of the clock


def library():
    """The library of the build under test. Installed packages have none."""
    return harness.binary("attend-server").parents[1] / "tests/trials/failing_calls.so"


class SystemCalls:
    """Shared with one server, which starts with `env`."""

    def __init__(self, path):
        self._file = open(path, "w+b")
        self._file.truncate(_HEAD.size + len(KINDS) * _CALLS_BYTES)
        self._memory = mmap.mmap(self._file.fileno(), 0)
        self.env = {"LD_PRELOAD": str(library()), "ATTEND_TEST_CALLS": str(path)}

    def close(self):
        self._memory.close()
        self._file.close()

    def _place(self, kind, field=0):
        return _HEAD.size + list(KINDS).index(kind) * _CALLS_BYTES + 8 * field

    def _get(self, kind, field):
        return struct.unpack_from("<Q", self._memory, self._place(kind, field))[0]

    def _set(self, kind, field, value):
        struct.pack_into("<q", self._memory, self._place(kind, field), value)

    def made(self, kind):
        """Calls so far."""
        return self._get(kind, 0)

    def failed(self, kind):
        return self._get(kind, 3)

    def fail(self, kind, nth=1, count=1, error=None):
        """The N-th call from now (1: the next) fails, and as many after it as `count` says."""
        self.heal(kind)
        self._set(kind, 4, KINDS[kind] if error is None else error)
        first = self.made(kind) + nth
        self._set(kind, 1, first)
        self._set(kind, 2, min(first + count, (1 << 63) - 1))

    def heal(self, kind):
        self._set(kind, 2, 0)

    def where(self, kind):
        """The call stack of the last failed call, as named in the programs' symbols."""
        begin = self._place(kind, _CALLS.size // 8)
        frames = [self._memory[at:at + _FRAME_BYTES].split(b"\0")[0].decode(errors="replace")
                  for at in range(begin, begin + _FRAMES * _FRAME_BYTES, _FRAME_BYTES)]
        return [_name(frame) for frame in frames if frame]

    def move_clock(self, seconds):
        """Total offset from the kernel's clock."""
        _HEAD.pack_into(self._memory, 0, round(seconds * 1e9))


_names = {}


def _name(frame):
    """FUNCTION (FILE) of "FILE+0xOFFSET SYMBOL", if the file's symbols have one."""
    if frame not in _names:
        place, _, symbol = frame.partition(" ")
        path, _, offset = place.rpartition("+")
        before = hex(int(offset, 16) - 1)  # inside the call, not the instruction after it
        done = subprocess.run(["addr2line", "-Cfe", path, before], capture_output=True, text=True,
                              check=False)
        name = (done.stdout.splitlines() or ["??"])[0]
        if name == "??":
            name = subprocess.run(["c++filt", symbol], capture_output=True, text=True,
                                  check=False).stdout.strip() or "??"
        _names[frame] = f"{name} ({path.rpartition('/')[2]})"
    return _names[frame]
