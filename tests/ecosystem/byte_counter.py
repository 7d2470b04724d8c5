# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes between a client and a server."""

import socket
import threading


class ByteCounter:
    """A context manager that forwards connections on `address` to a server."""

    def __init__(self, server):
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:{}".format(self._listener.getsockname()[1])
        self.sent = self.received = 0  # by the client
        self._sockets = [self._listener]

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:  # already closed
                pass
            each.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            host, _, port = self._server.rpartition(":")
            far = socket.create_connection((host, int(port)))
            self._sockets += [near, far]
            for source, target, counted in ((near, far, "sent"), (far, near, "received")):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(source, target, counted),
                                 daemon=True).start()

    def _pass_on(self, source, target, counted):
        try:
            while True:
                data = source.recv(65536)
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                setattr(self, counted, getattr(self, counted) + len(data))
                target.sendall(data)
        except OSError:  # closed
            return
