# SPDX-License-Identifier: Apache-2.0
"""Shared memory from plain Python: socket, mmap and generated messages."""

import mmap
import os
import socket

import wire

ALIGN = 256


class Client:
    """A connection to the server's socket and the regions made with it."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(wire.SECONDS)
        self.socket.connect(path)

    def ask(self, **request):
        """The reply, and the descriptor that came with it if there is one. ConnectionResetError:
        the server has closed the connection."""
        self.socket.send(wire.shm.RegionRequest(**request).SerializeToString())
        packet, files, _, _ = socket.recv_fds(self.socket, 4096, 1)
        if not packet:
            raise ConnectionResetError(f"no reply to {request}")
        return wire.shm.RegionReply.FromString(packet), files

    def create(self, size):
        reply, files = self.ask(create=wire.shm.CreateRegion(bytes=size))
        assert reply.HasField("created"), reply
        return Region(reply.created.token, mmap.mmap(files[0], reply.created.bytes), files[0])

    def close(self):
        self.socket.close()


class Region:
    def __init__(self, token, memory, file):
        self.token, self.memory, self.file = token, memory, file

    def place(self, offset):
        return wire.pb.SharedMemory(region=self.token, offset=offset)

    def take(self, request):
        """Moves the request's tensors into the region, and has O and LSE written behind them."""
        offset = 0
        names = ("q", "k", "v", "bias")[:len(request.raw)]
        for name, raw in zip(names, request.raw):
            self.memory[offset:offset + len(raw)] = raw
            getattr(request, name).shared_memory.CopyFrom(self.place(offset))
            offset += -(-len(raw) // ALIGN) * ALIGN
        size = len(request.raw[0])
        del request.raw[:]
        request.o_placement.shared_memory.CopyFrom(self.place(offset))
        if request.return_lse:
            behind = offset + -(-size // ALIGN) * ALIGN
            request.lse_placement.shared_memory.CopyFrom(self.place(behind))
        return request

    def bytes_of(self, tensor):
        assert tensor.shared_memory.region == self.token
        begin = tensor.shared_memory.offset
        return self.memory[begin:begin + tensor.byte_length]

    def close(self):
        """Within this process."""
        self.memory.close()
        os.close(self.file)
