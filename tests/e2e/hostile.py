# SPDX-License-Identifier: Apache-2.0
"""Tools of a hostile client, and checks that it has left nothing behind: raw sockets and HTTP/2
frames, a server with small limits, and readings of its process."""

import collections
import contextlib
import os
import pathlib
import resource
import select
import socket
import time

import harness
import wire

# Small enough that an attack of a few megabytes is visible.
SMALL_LIMITS = ("--memory-budget", "64MiB", "--max-request-bytes", "16MiB", "--cpu-threads", "2",
                "--stream-requests-max", "4")

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0, 1, 3, 4, 6, 7, 8, 9)
END_STREAM = ACK = 1
END_HEADERS = 4
PADDED = 8
PRIORITY_FIELDS = 0x20
INITIAL_WINDOW_SIZE = 4  # a setting
CANCEL = 8  # an error code
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def descriptors_max(number):
    """For start_server(limits=...): the maximal number of descriptors."""
    return {resource.RLIMIT_NOFILE: (number, number)}


# The server's process.


def _status(server, field):
    with server.alive():
        lines = dict(line.split(":", 1) for line in server.proc("status").splitlines())
        return int(lines[field].split()[0])


def rss_bytes(server):
    return _status(server, "VmRSS") << 10


def threads(server):
    return _status(server, "Threads")


def thread_names(server):
    """The number of threads with each name."""
    names = collections.Counter()
    with server.alive():
        for each in os.listdir(f"/proc/{server.process.pid}/task"):
            with contextlib.suppress(FileNotFoundError):  # it has ended in the meantime
                names[server.proc(f"task/{each}/comm").strip()] += 1
    return names


def descriptors(server):
    with server.alive():
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def cpu_seconds(server):
    """User and system time so far."""
    fields = server.proc("stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def grows_at_most(server, bytes_max):
    """The peak of resident memory grows by at most this much inside the block."""
    with server.alive():
        # Resets the peak.
        pathlib.Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    before = rss_bytes(server)
    yield
    grown = (_status(server, "VmHWM") << 10) - before
    assert grown <= bytes_max, f"resident memory grew by {grown} bytes, may grow by {bytes_max}"


def leaves_nothing(server, seconds=30):
    """After the block the server has as many descriptors as before, nothing in flight, and
    serves."""
    return leaves_nothing_of(server, lambda: wire.assert_serves(server.address), seconds)


@contextlib.contextmanager
def leaves_nothing_of(server, assert_serves, seconds=30):
    """Like assert_recovers(), but assert_serves() checks whether the server serves."""
    assert_serves()  # created once, at the first call
    before = descriptors(server)
    yield
    assert_serves()
    harness.wait_for("nothing in flight",
                     lambda: server.metric("attend_inflight_requests") == 0, seconds)
    harness.wait_for("the descriptors to be back", lambda: descriptors(server) <= before, seconds)


# Sockets and frames.


def open_socket(address, seconds=10, source=None):
    """A connected socket to HOST:PORT, [HOST]:PORT or unix:PATH; from the host `source`."""
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(seconds)
        connection.connect(address.removeprefix("unix:"))
        return connection
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)), timeout=seconds,
                                    source_address=(source, 0) if source else None)


@contextlib.contextmanager
def idle_sockets(address, number):
    """This many sockets that the kernel has connected and that never send anything."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(open_socket(address)) for _ in range(number)]


def ended(connection):
    """True once the server has closed it; data sent before is read and dropped."""
    connection.settimeout(30)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def shape_request(batch, heads, rows, keys, dim, dim_v, dtype="float16"):
    """A request of zeros."""
    request = wire.pb.AttendRequest()
    size = 4 if dtype == "float32" else 2
    for name, shape in (("q", (batch, heads, rows, dim)), ("k", (batch, heads, keys, dim)),
                        ("v", (batch, heads, keys, dim_v))):
        getattr(request, name).CopyFrom(wire.tensor(dtype, shape))
        elements = shape[0] * shape[1] * shape[2] * shape[3]
        request.raw.append(bytes(elements * size))
    return request


def unread_request():
    """24 KiB that ask for an answer of 6 MiB: one key, rows of one element in and 256 out."""
    return shape_request(1, 1, 6144, 1, 1, 256, "float32").SerializeToString()


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _hpack_length(number):
    return bytes([number]) if number < 127 else b"\x7f" + varint(number - 127)


def literal(name, value):
    """HPACK: a literal header without indexing, without Huffman coding."""
    return b"\0" + _hpack_length(len(name)) + name + _hpack_length(len(value)) + value


def frame(kind, flags, stream, payload):
    """An HTTP/2 frame."""
    return (len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") +
            payload)


def grpc_message(payload, declared=None):
    """A gRPC message that declares this many bytes (None: its actual length)."""
    return b"\0" + (len(payload) if declared is None else declared).to_bytes(4, "big") + payload


def messages(data):
    """The gRPC messages in a stream's bytes, which end with a complete one."""
    found = []
    while data:
        size = 5 + int.from_bytes(data[1:5], "big")
        assert len(data) >= size, "a message that is not whole"
        found.append(data[5:size])
        data = data[size:]
    return found


def call_headers(path, *more):
    """The header block of a gRPC call to `path`; `more`: pairs of bytes."""
    return b"\x83\x86" + b"".join(literal(*pair) for pair in (
        (b":path", path.encode()), (b":authority", b"x"), (b"content-type", b"application/grpc"),
        (b"te", b"trailers"), *more))


# The first bytes of a connection.
HELLO = PREFACE + frame(SETTINGS, 0, 0, b"")


def admitted(connection):
    """True once the server has acknowledged the client's settings, so that its connection no longer
    makes room for others; false if it closed."""
    came = b""
    while frame(SETTINGS, ACK, 0, b"") not in came:
        more = connection.recv(1 << 16)
        if not more:
            return False
        came += more
    return True


class Http2:
    """One connection, frame by frame. `window`: bytes that the server may send on a stream before
    grant() allows more. `connected`: the socket to use, if any."""

    def __init__(self, address, window=65535, seconds=10, source=None, connected=None):
        self.socket = connected or open_socket(address, seconds, source)
        self._rest = b""
        self._held = collections.deque()  # frames that came while it sent
        self._next_stream = 1
        self._initial = 65535
        self._windows = {0: 65535}
        setting = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + window.to_bytes(4, "big")
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, setting))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, kind, flags, stream, payload=b""):
        self.socket.sendall(frame(kind, flags, stream, payload))

    def open(self, path, *more, flags=0):
        """Opens a stream for a call to `path`; returns its number."""
        stream = self._next_stream
        self._next_stream += 2
        self._windows[stream] = self._initial
        self.send(HEADERS, flags | END_HEADERS, stream, call_headers(path, *more))
        return stream

    def data(self, stream, payload, flags=0):
        """DATA frames of at most 16 KiB, as the server's windows allow. Frames received meanwhile
        are kept for read_frame()."""
        rest = payload
        while True:
            piece = rest[:min(16 << 10, max(0, self._windows[0]), max(0, self._windows[stream]))]
            if rest and not piece:
                self._held.append(self._next_frame())
                assert self._held[-1] is not None, "the server closed"
                continue
            rest = rest[len(piece):]
            self._send_piece(stream, piece, 0 if rest else flags)
            if not rest:
                break

    def _send_piece(self, stream, piece, flags=0):
        self.send(DATA, flags, stream, piece)
        self._windows[0] -= len(piece)
        self._windows[stream] -= len(piece)

    def reset(self, stream, code=CANCEL):
        self.send(RST_STREAM, 0, stream, code.to_bytes(4, "big"))

    def grant(self, stream, number):
        """Lets the server send that many further bytes; stream 0: on the connection."""
        self.send(WINDOW_UPDATE, 0, stream, number.to_bytes(4, "big"))

    def _read(self, number):
        while len(self._rest) < number:
            more = self.socket.recv(1 << 16)
            if not more:
                return None
            self._rest += more
        out, self._rest = self._rest[:number], self._rest[number:]
        return out

    def read_frame(self):
        """(kind, flags, stream, payload) of the next frame; None when the server closed."""
        return self._held.popleft() if self._held else self._next_frame()

    def _next_frame(self):
        try:
            head = self._read(9)
            payload = head and self._read(int.from_bytes(head[:3], "big"))
        except ConnectionResetError:
            return None
        if payload is None or head is None:
            return None
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
        if kind == WINDOW_UPDATE and stream in self._windows:
            self._windows[stream] += int.from_bytes(payload, "big")
        if kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
        return kind, flags, stream, payload

    def _take_settings(self, payload):
        for at in range(0, len(payload), 6):
            if int.from_bytes(payload[at:at + 2], "big") == INITIAL_WINDOW_SIZE:
                initial = int.from_bytes(payload[at + 2:at + 6], "big")
                for each in self._windows.keys() - {0}:
                    self._windows[each] += initial - self._initial
                self._initial = initial

    def wait_for_frame(self, kind, stream=None):
        """The payload of the next frame of that kind (and stream); fails if the server closes.
        Answers settings and pings on the way."""
        while True:
            got = self.read_frame()
            assert got is not None, f"the server closed, no frame of kind {kind}"
            if got[0] == SETTINGS and not got[1] & ACK:
                self.send(SETTINGS, ACK, 0)
            if got[0] == PING and not got[1] & ACK:
                self.send(PING, ACK, 0, got[3])
            if got[0] == kind and stream in (None, got[2]):
                return got[3]

    def answers(self, stream):
        """Reads until the server ends the stream; returns how many messages came. Fails if the
        stream is reset before its trailers."""
        got = b""
        while True:
            frame_read = self.read_frame()
            assert frame_read is not None, "the server closed"
            kind, flags, of, payload = frame_read
            if of != stream:
                continue
            assert kind != RST_STREAM, f"reset with error {int.from_bytes(payload, 'big')}"
            got += payload if kind == DATA else b""
            if flags & END_STREAM and kind in (DATA, HEADERS):
                return len(messages(got))

    def wait_for_close(self):
        """Reads until the server closes the connection."""
        while self.read_frame() is not None:
            pass


class Sender(Http2):
    """A client that sends on its last call as fast as the server allows, and drops all answers."""

    def __init__(self, address, path, *more, window=65535, source=None):
        super().__init__(address, window, source=source)
        self.stream = self.open(path, *more)
        self.sent = 0

    def begin(self, path, *more):
        """Begins another call, on which it sends from now on."""
        self.stream = self.open(path, *more)

    def send_all(self, data):
        """False once the server accepts no more."""
        rest = memoryview(data)
        while len(rest) > 0:
            size = min(len(rest), 16 << 10, self._windows[0], self._windows[self.stream])
            if size <= 0:
                if not self._wait():
                    return False
                continue
            try:
                self._send_piece(self.stream, bytes(rest[:size]))
            except OSError:
                return False  # the server has closed: it may
            rest = rest[size:]
            self.sent += size
        return True

    def window(self, stream):
        """The bytes that it may send; negative if the server has revoked some of them."""
        return self._windows[stream]

    def takes(self, number):
        """Whether it may send that many bytes now."""
        return min(self._windows[0], self._windows[self.stream]) >= number

    def read_for(self, seconds):
        """Reads what the server has sent in the meantime. False once the server accepts no more."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            came = self._rest or select.select([self.socket], [], [], left)[0]
            if came and not self._wait():
                return False
        return True

    def _wait(self):
        """Reads a frame. False once the server accepts no more."""
        got = self.read_frame()
        if got is None or got[0] in (RST_STREAM, GOAWAY):
            return False
        if got[0] == SETTINGS and not got[1] & ACK:
            self.send(SETTINGS, ACK, 0)
        if got[0] == PING and not got[1] & ACK:
            self.send(PING, ACK, 0, got[3])
        return True
