# SPDX-License-Identifier: Apache-2.0
"""Calls of AttentionService for the trials: unary, streamed and chunked, complete or abandoned."""

import itertools
import queue

import grpc

import chunked
import wire
from caller import CODE, SECONDS, check, code_of


def _problem(caller):
    """A random problem, and its request with a unique id and random optional fields."""
    pool = caller.problems
    kind = caller.random.random()
    problem = caller.random.choice(pool.large if kind < 0.02 else
                                   pool.backward if kind < 0.15 else pool.forward)
    return problem, problem.message(request_id=caller.name("good"),
                                    check=caller.random.random() < 0.05,
                                    priority=caller.random.choice((0, 0, 0, -3, 7)))


def _begin(caller, problem, request, timeout=SECONDS, **options):
    method = caller.attention.Backward if problem.backward else caller.attention.Attend
    return method.future(request, timeout=timeout, metadata=caller.metadata(), **options)


def unary(caller):
    """One call, or four concurrent ones."""
    asked = [_problem(caller) for _ in range(caller.random.choice((1, 4)))]
    begun = [(problem, request.request_id, _begin(caller, problem, request))
             for problem, request in asked]
    for problem, request_id, call in begun:
        answer = caller.take("unary", call)
        caller.note(request_id, call.code())
        if answer is not None:
            caller.expect("unary", problem, answer)


def compressed(caller):
    """The server refuses compressed messages by design. gRPC sends a message uncompressed if gzip
    does not make it smaller, so the request id is padded to be compressible."""
    problem, request = _problem(caller)
    request.request_id += "-" * 64
    code, _, details = code_of(_begin(caller, problem, request,
                                      compression=grpc.Compression.Gzip))
    caller.end("compressed", code)
    check(code is CODE.UNIMPLEMENTED or code in caller.target.refusals,
          f"a compressed message: {code.name}: {details}")


def given_up(caller):
    """A call that is cancelled, or whose deadline may pass. If it is answered all the same, the
    answer must be right."""
    problem, request = _problem(caller)
    by_deadline = caller.random.random() < 0.5
    seconds = caller.random.choice((1e-9, 1e-4, 1e-3, 3e-3, 1e-2))
    call = _begin(caller, problem, request, timeout=seconds if by_deadline else SECONDS)
    if not by_deadline:
        for _ in range(caller.random.randrange(3)):
            call.done()
        call.cancel()
    code, answer, details = code_of(call)
    kind = "deadline" if by_deadline else "cancel"
    caller.end(kind, code)
    check(code in (CODE.OK, CODE.DEADLINE_EXCEEDED if by_deadline else CODE.CANCELLED,
                   *caller.target.refusals), f"{kind}: {code.name}: {details}")
    if code is CODE.OK:
        caller.expect(kind, problem, answer)


def stream(caller, spoil=None):
    """Up to a dozen requests on one stream, some corrupted by `spoil`. Each must get one answer,
    unless the stream is cancelled, as some are."""
    sent, messages = {}, []
    bad = 0
    for _ in range(caller.random.randrange(1, 13)):
        problem, request = _problem(caller)
        if spoil is not None and caller.random.random() < 0.2:
            request.request_id = caller.name("spoilt")
            messages.append(spoil(caller, request.SerializeToString()))
            bad += 1
        else:
            sent[request.request_id] = problem
            messages.append(request.SerializeToString())
    expected = len(messages)
    gives_up = caller.random.random() < 0.1
    call = caller.channel.stream_stream(
        "/attend.v1.AttentionService/AttendStream",
        response_deserializer=wire.pb.AttendResponse.FromString)(
            iter(messages), timeout=SECONDS, metadata=caller.metadata())
    answers = 0
    try:
        for answer in call:
            answers += 1
            _take_of_stream(caller, answer, sent, bad > 0)
            if gives_up and caller.random.random() < 0.3:
                call.cancel()
        code = call.code()
        check(answers == expected, f"a stream of {expected} requests has {answers} answers")
    except grpc.RpcError:
        code = call.code()
        check((gives_up and code is CODE.CANCELLED) or code in caller.target.refusals,
              f"a stream: {code.name}: {call.details()}")
    if not gives_up:
        for request_id in sent:
            caller.note(request_id, code)
    caller.end("stream", code)


def _take_of_stream(caller, answer, sent, some_are_bad):
    problem = sent.pop(answer.request_id, None)
    if problem is None:
        check(some_are_bad and not answer.request_id.startswith("good-"),
              f"{answer.request_id!r} is answered twice, or was not sent")
        caller.outcomes["spoilt of a stream", _code_name(answer)] += 1
        return
    name = _code_name(answer)
    caller.outcomes["request of a stream", name] += 1
    if name == "OK":
        caller.expect("stream", problem, answer)
    else:
        caller.note(answer.request_id, CODE[name])
        check(CODE[name] in caller.target.refusals,
              f"a request of a stream: {name}: {answer.status.message}")


_NAMES = {code.value[0]: code.name for code in CODE}


def _code_name(answer):
    return _NAMES.get(answer.status.code, str(answer.status.code))


def in_chunks(caller):
    """A chunked request over one to three streams, in chunks of any size and order; some requests
    are left incomplete."""
    problem = caller.random.choice(caller.problems.forward + caller.problems.large)
    request = problem.message(request_id=caller.name("good"))
    total, streams = sum(map(len, request.raw)), caller.random.choice((1, 1, 2, 3))
    size = caller.random.choice((7, 100, 5000, 1 << 20))
    in_order = streams == 1 and size * 1000 > total and caller.random.random() < 0.5
    if not in_order:  # limits how many chunks may arrive with gaps between them
        size = max(size, total // 50 + 1)
    pieces = list(chunked.chunks_of(request, max(size, total // 1000 + 1)))
    if not in_order:
        caller.random.shuffle(pieces)
    way = caller.random.random()
    lacks = cancels = False
    if way < 0.15:
        del pieces[caller.random.randrange(len(pieces)):]
        lacks, cancels = True, way < 0.07
    transfer = _Transfer(caller, request, streams)
    code, answer = transfer.run(pieces, cancels)
    caller.end("chunked", code)
    if not lacks:
        caller.note(request.request_id, code)
    if code is CODE.OK:
        check(not lacks, "a chunked request that lacks bytes was answered")
        check(list(answer.raw) == problem.answer, "chunked: the answer has other bits")
    elif cancels:
        check(code in (CODE.CANCELLED, CODE.INVALID_ARGUMENT, *caller.target.refusals), code)
    elif lacks:
        check(code in (CODE.INVALID_ARGUMENT, *caller.target.refusals), f"lacks bytes: {code}")
    else:
        check(code in caller.target.refusals, f"chunked: {code}: {transfer.details}")


class _Transfer:
    """A chunked request over several streams of one connection."""

    def __init__(self, caller, request, streams):
        self._caller, self._request, self._number = caller, request, streams
        self._metadata = caller.metadata()
        self._queues, self._calls = [], []
        self.details = ""

    def _open(self, first):
        messages = queue.SimpleQueue()
        messages.put(first)
        self._queues.append(messages)
        self._calls.append(self._caller.attention.AttendChunked(
            iter(messages.get, None), timeout=SECONDS, metadata=self._metadata))
        return self._calls[-1]

    def run(self, pieces, cancels):
        """Returns the request's status code, which the first stream reports, and the answer."""
        got = []
        try:
            header = chunked.header_of(self._request)
            first = self._open(wire.pb.AttendChunkedRequest(header=header))
            grant = next(first).grant
            for _ in range(self._number - 1):
                next(self._open(wire.pb.AttendChunkedRequest(token=grant.token)))
            for piece, messages in zip(pieces, itertools.cycle(self._queues)):
                messages.put(piece)
            if cancels:
                first.cancel()
        except grpc.RpcError:
            pass
        for messages in reversed(self._queues):  # the first stream is closed last
            messages.put(None)
        for call in self._calls:
            try:
                got.extend(call)
            except grpc.RpcError:
                pass
        self.details = self._calls[0].details()
        codes = [call.code() for call in self._calls]
        refused = [code for code in codes[1:] if code in self._caller.target.refusals]
        if codes[0] is CODE.INVALID_ARGUMENT and refused:  # chunks of a refused stream are missing
            return refused[0], None
        if codes[0] is not CODE.OK:
            return codes[0], None
        check(all(code is CODE.OK for code in codes[1:]) or
              any(code in self._caller.target.refusals for code in codes), f"chunked: {codes}")
        if any(code is not CODE.OK for code in codes):  # chunks of the answer were lost with it
            return next(code for code in codes if code is not CODE.OK), None
        return CODE.OK, chunked.assemble(got)
