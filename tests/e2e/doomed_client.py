# SPDX-License-Identifier: Apache-2.0
"""A client to be killed: doomed_client.py STUBS SERVER unary|stream|chunked upload|answer

It prints "there" in the middle of an upload or of an answer, and stays there: its bytes pass
through its own relay, which stops after a part of them."""

import importlib
import itertools
import signal
import socket
import sys
import threading

import grpc

PASSED_BYTES = 4 << 20  # of the upload or of the answer
CHUNK_BYTES = 256 << 10


class Relay:
    """Forwards one connection to the server. Passes at most `up` and `down` bytes; None: all."""

    def __init__(self, server, up=None, down=None):
        host, port = server.rsplit(":", 1)
        self.stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        threading.Thread(target=self._run, args=((host, int(port)), up, down), daemon=True).start()

    def _run(self, server, up, down):
        client, _ = self._listener.accept()
        upstream = socket.create_connection(server)
        self._sockets = client, upstream  # stay open
        for source, sink, left in ((client, upstream, up), (upstream, client, down)):
            threading.Thread(target=self._pass, args=(source, sink, left), daemon=True).start()

    def _pass(self, source, sink, left):
        while left is None or left > 0:
            data = source.recv(65536 if left is None else min(left, 65536))
            if not data:
                return
            sink.sendall(data)
            left = None if left is None else left - len(data)
        self.stopped.set()


def make_request(pb, moment):
    """A large request with a small answer, or the reverse. Answer: 32 MiB."""
    request = pb.AttendRequest()
    shapes = {"upload": ((65536, 64), (1, 64), (1, 1)), "answer": ((32768, 1), (1, 1), (1, 256))}
    for name, (rows, dim) in zip("qkv", shapes[moment]):
        getattr(request, name).CopyFrom(pb.Tensor(dtype=3, shape=(1, 1, rows, dim)))
        request.raw.append(bytes(rows * dim * 4))
    return request


def chunked_messages(pb, request):
    header = pb.AttendRequest()
    header.CopyFrom(request)
    header.ClearField("raw")
    for name in "qkv":
        getattr(header, name).chunked.SetInParent()
    yield pb.AttendChunkedRequest(header=header)
    for tensor, raw in enumerate(request.raw, start=1):
        for at in range(0, len(raw), CHUNK_BYTES):
            yield pb.AttendChunkedRequest(tensor=tensor, offset=at,
                                          data=raw[at:at + CHUNK_BYTES])


def main(stubs, server, way, moment):
    sys.path.insert(0, stubs)
    pb = importlib.import_module("attend.v1.attention_pb2")
    stub = importlib.import_module("attend.v1.attention_pb2_grpc")
    upload = moment == "upload"
    relay = Relay(server, up=PASSED_BYTES if upload else None,
                  down=None if upload else PASSED_BYTES)
    channel = grpc.insecure_channel(relay.address, options=[
        ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)])
    service = stub.AttentionServiceStub(channel)
    request = make_request(pb, moment)
    never = threading.Event()
    if way == "unary":
        call = service.Attend.future(request)
    elif way == "stream":
        stays_open = (never.wait() for _ in range(1))
        call = service.AttendStream(itertools.chain([request], stays_open))
    else:
        call = service.AttendChunked(chunked_messages(pb, request))
    if way != "unary":
        threading.Thread(target=lambda: list(call), daemon=True).start()
    if not relay.stopped.wait(timeout=60):
        sys.exit("the server took or gave too little")
    print("there", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
