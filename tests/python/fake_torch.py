# SPDX-License-Identifier: Apache-2.0
"""The parts of torch that attend_kernels uses, in host memory: streams, and tensors that record
each call and the current stream in `events`."""

import contextlib

from cuda_tensor import Device, PtrTensor


class Stream:
    def __init__(self, handle):
        self.cuda_stream = handle


class ExternalStream(Stream):
    def __init__(self, handle, device=None):
        assert handle and device == 0  # for 0, torch would make a new stream
        super().__init__(handle)


class FakeTorch:
    """Stands in for the module torch in sys.modules, and for torch.cuda."""
    Stream, ExternalStream = Stream, ExternalStream

    def __init__(self, current):
        self.cuda, self.events, self._default = self, [], Stream(0)
        self._current = [current]
        torch = self

        class Tensor(PtrTensor):
            def __init__(self, name, values, device=Device()):
                super().__init__(values, device)
                self.name = name

            def _made(self, what, like):
                torch.note(what)
                return Tensor(f"new {len(torch.events)}", like.values)

            def new_empty(self, shape, dtype=None):
                return self._made("new_empty", super().new_empty(shape, dtype))

            def long(self):
                return self._made("long", super().long())

            def record_stream(self, stream):
                torch.events.append((f"record {self.name}", stream.cuda_stream))

        Tensor.__module__ = PtrTensor.__module__  # which has float32
        self.Tensor = Tensor

    def note(self, what):
        self.events.append((what, self._current[-1].cuda_stream))

    def current_stream(self, device):
        assert device == 0
        return self._current[-1]

    def default_stream(self, device):
        assert device == 0
        return self._default

    @contextlib.contextmanager
    def stream(self, stream):
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()
