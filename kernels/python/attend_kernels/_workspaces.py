# SPDX-License-Identifier: Apache-2.0
"""Device memory that launches use while they run, kept for later launches."""

import contextlib
import threading

from ._library import WORKSPACE_ZERO_BYTES, Error, Memory, check, library


class _Workspace:
    """The workspace of one device and stream. `lock` guards `memory`, which may be None."""

    def __init__(self, device, stream):
        self.lock = threading.Lock()
        self.device, self.stream, self.memory = device, stream, None

    def grow(self, byte_count):
        """Ensures at least `byte_count` bytes, the first ones zero in stream order. Error: out of
        memory, or an earlier launch has failed."""
        if self.memory is not None and self.memory.bytes >= byte_count:
            return
        check(self.free())
        memory = Memory(self.device, max(byte_count, WORKSPACE_ZERO_BYTES))
        check(library().attend_memset(self.device, memory.address, 0, WORKSPACE_ZERO_BYTES,
                                      self.stream or None))
        self.memory = memory

    def free(self):
        """Waits for the launches that use the memory, and releases it even if they failed. Returns
        their status code."""
        if self.memory is None:
            return 0
        code = library().attend_synchronize(self.device, self.stream or None)
        self.memory = None
        return code


class Workspaces:
    """One workspace per device and stream, as large as the largest call so far."""

    def __init__(self):
        self._lock = threading.Lock()  # guards the dict, not its entries
        self._by_place = {}

    def use(self, device, stream, byte_count):
        """A context with the address of at least `byte_count` bytes for one launch, or None for 0
        bytes. No other thread has it within the context, since launches that share a workspace must
        be ordered. After a failure the memory is released, because its first bytes may no longer be
        zero."""
        return self._use(device, stream, byte_count) if byte_count else contextlib.nullcontext()

    @contextlib.contextmanager
    def _use(self, device, stream, byte_count):
        with self._lock:
            workspace = self._by_place.setdefault((device, stream), _Workspace(device, stream))
        with workspace.lock:
            try:
                workspace.grow(byte_count)
                yield workspace.memory.address
            except BaseException:
                workspace.free()
                raise

    def release(self):
        """Frees all memory, even if an Error says that waiting for a stream failed."""
        with self._lock:
            workspaces = list(self._by_place.values())
        failure = None
        for workspace in workspaces:
            with workspace.lock:
                try:
                    check(workspace.free())
                except Error as one:
                    failure = failure or one
        if failure is not None:
            raise failure
