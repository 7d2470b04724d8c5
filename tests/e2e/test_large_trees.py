# SPDX-License-Identifier: Apache-2.0
"""Trees whose masks are large: they are expanded on a worker thread once a request is complete."""

import time

import numpy as np
import pytest

import harness
import wire
from reference import Case
from test_trees import client, same, tree_server, trees, values, whole

__all__ = ["client", "tree_server"]  # fixtures

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.mark.parametrize("batch, tokens, length", [(1, 1024, 1100), (4, 200, 1600)])
def test_large_trees_and_large_masks(client, random, batch, tokens, length):
    """The second mask has more than a MiB, the first has a tree of 128 KiB."""
    q, k, v = (values(random, batch, 1, length, 8) for _ in "qkv")
    tree = trees(random, 1, tokens)
    mask = whole(tree, [tokens] * batch, [length] * batch, [length] * batch, length, length)
    wanted = client.attention(q, k, v, bias=mask)
    for transport in ("inline", "chunked", "shared"):
        same([client.attention(q, k, v, tree=tree, kv_lengths=[length] * batch,
                               transport=transport)], [wanted])


def large_call(random):
    """Four sequences with a mask of more than a MiB, in a smaller message."""
    q, k, v = (values(random, 4, 1, 1600, 8) for _ in "qkv")
    case = Case(q, k, v, "float32")
    request = wire.make_request(case)
    tree = trees(random, 1, 200)
    request.tree = np.packbits(tree, axis=-1, bitorder="little").tobytes()
    request.tree_tokens = 200
    request.kv_lengths.extend([1600] * 4)
    return request


def test_large_trees_among_small_requests_of_a_stream(tree_server, random):
    small = wire.make_request(Case(*(values(random, 1, 1, 16, 8) for _ in "qkv"), "float32"))
    sent = [small, large_call(random), small, large_call(random), small]
    for number, request in enumerate(sent):
        sent[number] = wire.pb.AttendRequest()
        sent[number].CopyFrom(request)
        sent[number].request_id = str(number)
    with wire.connect(tree_server.address) as service:
        alone = {each.request_id: list(service.Attend(each, timeout=wire.SECONDS).raw)
                 for each in sent}
        answers = list(service.AttendStream(iter(sent), timeout=wire.SECONDS))
    assert {each.request_id: list(each.raw) for each in answers} == alone


def test_calls_cancelled_while_their_large_trees_are_written(tree_server, random):
    request = large_call(random)
    with wire.connect(tree_server.address) as service:
        for round_ in range(50):
            calls = [service.Attend.future(request, timeout=wire.SECONDS) for _ in range(4)]
            time.sleep(random.random() * 0.004)
            for call in calls[round_ % 2:]:
                call.cancel()
            if round_ % 2:
                assert calls[0].result().raw
        assert service.Attend(request, timeout=wire.SECONDS).raw
    harness.wait_for("nothing in flight",
                     lambda: tree_server.metric("attend_inflight_requests") == 0, 30)
