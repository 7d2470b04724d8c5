# SPDX-License-Identifier: Apache-2.0
"""Invalid calls for the trials: corrupted messages, wrong fields, bytes that are not HTTP/2."""

import contextlib
import copy
import socket
import urllib.error
import urllib.request

import grpc

import hostile
import wire
from caller import CODE, SECONDS, check, code_of

# Codes with which the server may refuse an invalid message.
REFUSALS = (CODE.INVALID_ARGUMENT, CODE.UNIMPLEMENTED, CODE.NOT_FOUND, CODE.FAILED_PRECONDITION,
            CODE.OUT_OF_RANGE, CODE.RESOURCE_EXHAUSTED)
SERVICE = "/attend.v1.AttentionService/"
NUMBERS = (0, 1, -1, 2, 255, 256, 257, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1,
           -(1 << 63))
FLOATS = (0.0, -0.0, 1e-40, 3e38, -3e38, float("inf"), float("-inf"), float("nan"), 1e-7)


def spoil(caller, message):
    """The message with some of its bytes changed."""
    data, random = bytearray(message), caller.random
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(data) + 1)
        # Most bytes of a message are tensors; the fields that describe them come first.
        if random.random() < 0.7:
            at = min(at, random.randrange(80))
        way = random.randrange(5)
        if way == 0:
            del data[at:]
        elif way == 1 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif way == 2:
            del data[at:at + random.randrange(1, 20)]
        elif way == 3:
            data[at:at] = random.randbytes(random.randrange(1, 20))
        else:
            data[at:at] = data[at:at + random.randrange(1, 40)]
    return bytes(data)


def _wrong_fields(caller, request):
    """The request with one or two fields that may be wrong."""
    random, request = caller.random, copy.deepcopy(request)
    for _ in range(random.choice((1, 1, 2))):
        tensor = getattr(request, random.choice(("q", "k", "v")))
        number, real = random.choice(NUMBERS), random.choice(FLOATS)
        random.choice((
            lambda: tensor.shape.__setitem__(random.randrange(len(tensor.shape)), number),
            lambda: tensor.shape.append(number),
            lambda: tensor.shape.pop(),
            lambda: setattr(tensor, "dtype", random.choice((0, 1, 2, 3, 4, 9, -1))),
            lambda: setattr(tensor, "byte_length", number % (1 << 64)),
            lambda: tensor.chunked.SetInParent(),
            lambda: setattr(tensor.shared_memory, "region", random.randbytes(16)),
            lambda: setattr(request, "layout", random.choice((0, 1, 2, 3, 7))),
            lambda: request.q_lengths.append(number),
            lambda: request.kv_lengths.append(number),
            lambda: request.cu_q.extend([number, 0]),
            lambda: request.cu_kv.append(number),
            lambda: setattr(request, "scale", real),
            lambda: setattr(request, "softcap", real),
            lambda: request.alibi_slopes.append(real),
            lambda: request.sinks.append(real),
            lambda: setattr(request, "dropout_p", real),
            lambda: setattr(request, "kernel",
                            random.choice(("auto", "cpu_flash", "none", "x" * 300))),
            lambda: setattr(request, "priority", random.choice((-101, 101, 5, 1 << 30))),
            lambda: setattr(request.mask, "kind", random.choice((0, 1, 2, 3, 4, 5, 9))),
            lambda: setattr(request.mask, "window_left", number),
            lambda: setattr(request, "request_id", "\u202e\n\"" * random.randrange(1, 50)),
            lambda: setattr(request, "o_dtype", random.choice((0, 1, 2, 3, 4))),
            lambda: request.sessions.add(session=random.randbytes(16), length=number),
            lambda: request.backward.SetInParent(),
            lambda: request.raw.append(b"1234"),
            lambda: request.raw.pop() if request.raw else None,
            lambda: setattr(request.o_placement.shared_memory, "offset", 256),
        ))()
        if not tensor.shape:
            break
    return request


def broken(caller):
    """A unary call with a corrupted message or wrong fields. If it is answered, it was still valid:
    the same message must get the same answer again, and pass the server's own check in double
    precision."""
    random = caller.random
    problem = random.choice(caller.problems.forward + caller.problems.backward)
    request = problem.message(request_id=caller.name("broken"))
    if random.random() < 0.5:
        message = spoil(caller, request.SerializeToString())
    else:
        message = _wrong_fields(caller, request).SerializeToString()
    method = caller.channel.unary_unary(SERVICE + ("Backward" if problem.backward else "Attend"),
                                        response_deserializer=wire.pb.AttendResponse.FromString)
    code, answer, details = code_of(method.future(message, timeout=SECONDS,
                                                  metadata=caller.metadata()))
    caller.end("broken", code)
    check(code is CODE.OK or code in (*REFUSALS, *caller.target.refusals),
          f"broken: {code.name}: {details}; the message: {message[:4000].hex()}")
    if code is CODE.OK:
        _confirm(caller, method, message, answer, problem.backward)


def _confirm(caller, method, message, answer, backward):
    # `check` is appended to the bytes instead of parsing the message: implementations of Protobuf
    # disagree on which corrupted messages they accept.
    asking = message + wire.pb.AttendRequest(check=True).SerializeToString()
    second = caller.take("broken, confirmed", method.future(
        asking, timeout=SECONDS, metadata=caller.metadata()),
        (CODE.NOT_FOUND, CODE.FAILED_PRECONDITION))
    if second is not None:
        check(list(second.raw) == list(answer.raw),
              f"one message, two answers: {message[:4000].hex()}")
        report = second.check
        check(report.ok or backward and (report.undecided or report.detail.startswith(
            "O and LSE are not those of q, k and v")),
              f"{report.detail}; the message: {message[:4000].hex()}")


def odd_calls(caller):
    """Calls with empty or random messages, unknown methods, and metadata of all sizes."""
    random = caller.random
    method, request = random.choice((
        (SERVICE + "GetServerInfo", b""), ("/grpc.health.v1.Health/Check", b""),
        (SERVICE + "Nothing", b"x"), ("/x", b""), ("/attend.v1.SessionService/GetSession", b"\xff"),
        ("/attend.v1.SessionService/CreateSession", random.randbytes(40)),
        ("/inference.GRPCInferenceService/ModelInfer", random.randbytes(200)),
        (SERVICE + "Attend", b""), (SERVICE + "Backward", random.randbytes(60))))
    metadata = caller.metadata()
    if random.random() < 0.2:
        metadata.append(("x-large", "y" * random.choice((100, 7000, 20000))))
    if random.random() < 0.2:
        metadata[0] = ("x-attend-tenant", random.choice(("unknown", "\"a b\"", "x" * 1000)))
    code, _, details = code_of(caller.channel.unary_unary(method).future(
        request, timeout=SECONDS, metadata=metadata))
    caller.end("odd", code)
    check(code is CODE.OK or code in (*REFUSALS, *caller.target.refusals, CODE.PERMISSION_DENIED),
          f"{method}: {code.name}: {details}")


def empty_stream(caller):
    """A unary call with no message, or with two."""
    messages = iter([b""] * caller.random.choice((0, 2)))
    code, _, details = code_of(caller.channel.stream_unary(SERVICE + "Attend").future(
        messages, timeout=SECONDS, metadata=caller.metadata()))
    caller.end("no message", code)
    check(code in (*REFUSALS, *caller.target.refusals), f"no message: {code.name}: {details}")


def bad_chunks(caller):
    """A chunked call whose messages are in an invalid order."""
    random = caller.random
    problem = random.choice(caller.problems.forward)
    pb = wire.pb
    messages = []
    for _ in range(random.randrange(1, 6)):
        messages.append(random.choice((
            lambda: pb.AttendChunkedRequest(token=random.randbytes(random.choice((0, 16, 17)))),
            lambda: pb.AttendChunkedRequest(header=problem.request),
            lambda: pb.AttendChunkedRequest(tensor=random.randrange(14),
                                            offset=random.choice(NUMBERS) % (1 << 64),
                                            data=random.randbytes(random.randrange(100))),
            lambda: pb.AttendChunkedRequest()))().SerializeToString())
    call = caller.channel.stream_stream(SERVICE + "AttendChunked")(
        iter(messages), timeout=SECONDS, metadata=caller.metadata())
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass
    caller.end("bad chunks", call.code())
    check(call.code() in (*REFUSALS, *caller.target.refusals, CODE.CANCELLED),
          f"bad chunks: {call.code()}: {call.details()}")


def garbage(caller):
    """A connection that does not speak HTTP/2, or sends random frames."""
    random = caller.random
    body = random.choice((
        lambda: random.randbytes(random.randrange(1, 3000)),
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: hostile.PREFACE[:random.randrange(1, 24)],
        lambda: hostile.HELLO + b"".join(
            hostile.frame(random.randrange(12), random.randrange(256), random.randrange(8),
                          random.randbytes(random.randrange(60))) for _ in range(8)),
        lambda: hostile.HELLO + hostile.frame(
            hostile.HEADERS, hostile.END_HEADERS, 1, hostile.call_headers(wire.ATTEND)) +
        hostile.frame(hostile.DATA, 0, 1, hostile.grpc_message(b"", random.choice(
            (1, 1 << 20, 1 << 31, (1 << 32) - 1))))))()
    with contextlib.suppress(OSError):
        with hostile.open_socket(caller.target.address) as connection:
            connection.sendall(body)
            if random.random() < 0.5:
                connection.settimeout(0.05)
                connection.recv(1000)
            if random.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
    caller.outcomes["garbage", "sent"] += 1


def scrape(caller):
    """Requests to the metrics' port, some of them invalid."""
    if not caller.target.metrics:
        return
    path = caller.random.choice(("metrics", "metrics", "nothing", "metrics?" + "x" * 3000))
    try:
        with urllib.request.urlopen(f"http://{caller.target.metrics}/{path}", timeout=30) as answer:
            check(answer.status == 200 and b"attend_requests_total" in answer.read(), "no metrics")
        caller.outcomes["scrape", "OK"] += 1
    except urllib.error.HTTPError as error:
        check(error.code in (401, 404, 413, 414, 431), f"/{path[:20]}: {error.code}")
        caller.outcomes["scrape", str(error.code)] += 1
    except OSError:
        caller.outcomes["scrape", "closed"] += 1
