# SPDX-License-Identifier: Apache-2.0
"""Requests of AttendChunked, split and assembled by hand."""

import queue

import grpc
import pytest

import wire

TENSORS = ("q", "k", "v", "bias")


def header_of(request):
    header = wire.pb.AttendRequest()
    header.CopyFrom(request)
    header.ClearField("raw")
    for name in TENSORS[:len(request.raw)]:
        getattr(header, name).chunked.SetInParent()
    return header


def chunks_of(request, size):
    for tensor, raw in enumerate(request.raw, start=wire.pb.TENSOR_NAME_Q):
        for at in range(0, len(raw), size):
            yield wire.pb.AttendChunkedRequest(tensor=tensor, offset=at, data=raw[at:at + size])


def assemble(messages):
    """The answer as a unary call would return it, from messages of any number of streams."""
    answer = next(m.response for m in messages if m.HasField("response"))
    parts = [bytearray(answer.o.byte_length)]
    if answer.HasField("lse"):
        parts.append(bytearray(answer.lse.byte_length))
    missing = sum(map(len, parts))
    for message in messages:
        if message.data:
            part = parts[message.tensor - wire.pb.TENSOR_NAME_O]
            part[message.offset:message.offset + len(message.data)] = message.data
            missing -= len(message.data)
    assert missing == 0
    answer.raw.extend(map(bytes, parts))
    return answer


class Stream:
    """One stream whose messages are sent one by one."""

    def __init__(self, service, *first, metadata=None):
        self._queue = queue.SimpleQueue()
        self.call = service.AttendChunked(iter(self._queue.get, None), timeout=wire.SECONDS,
                                          metadata=metadata)
        for message in first:
            self.send(message)

    def send(self, message):
        self._queue.put(message)

    def half_close(self):
        self._queue.put(None)

    def fail(self):
        """Code and details of the end, which must be an error."""
        with pytest.raises(grpc.RpcError) as error:
            for _ in self.call:
                pass
        self.half_close()  # ends the thread that sends
        return error.value.code(), error.value.details()
