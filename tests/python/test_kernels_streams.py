# SPDX-License-Identifier: Apache-2.0
"""Streams: the order of allocations, record_stream() calls and launches with torch tensors, and the
workspace of each stream."""

import sys
import threading
import time

import attend_kernels
import numpy as np
import pytest

from cuda_tensor import PtrTensor
from fake_torch import FakeTorch, Stream

CURRENT = Stream(9)
TENSORS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")


@pytest.fixture
def torch(fake, monkeypatch):
    """A fake torch whose current stream is CURRENT; launches are recorded in its events."""
    module, run = FakeTorch(CURRENT), fake.attend_run_batch

    def noted(params, count, workspace, workspace_bytes, stream):
        module.events.append(("launch", stream or 0))
        return run(params, count, workspace, workspace_bytes, stream)

    monkeypatch.setattr(fake, "attend_run_batch", noted)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def packed(make):
    """Arguments with int32 lengths, which the call has to convert."""
    begins = np.array([0, 2, 3], np.int32)
    arrays = (np.ones((3, 2, 4), np.float32),) * 3 + (begins,) * 2
    return {**{name: make(name, array) for name, array in zip(TENSORS, arrays)}, "layout": "LHD",
            "max_seqlen_q": 2, "max_seqlen_k": 2, "return_lse": True}


def made(*streams):
    return [(what, stream) for what, stream in zip(("long", "long", "new_empty", "new_empty"),
                                                   streams * 4)]


def recorded(events):
    return [event for event in events if event[0].startswith("record new")]


def test_tensors_are_recorded_on_a_torch_stream_that_is_not_current(torch):
    asked = Stream(5)
    o, lse = attend_kernels.attention(**packed(torch.Tensor), stream=asked)
    assert torch.events == [
        *((f"record {name}", 5) for name in TENSORS), *made(5),
        (f"record {o.name}", 9), (f"record {lse.name}", 9), ("launch", 5)]
    assert torch.current_stream(0) is CURRENT and (o.values == 1).all()


@pytest.mark.parametrize("handle", [5, 0, 1])
def test_with_a_bare_handle_only_the_calls_own_memory_is_recorded(torch, handle):
    attend_kernels.attention(**packed(torch.Tensor), stream=handle)
    own = 0 if handle == 1 else handle
    assert torch.events[:4] == made(own) and torch.events[-1] == ("launch", handle)
    assert torch.events[4:-1] == recorded(torch.events) and len(torch.events) == 7


@pytest.mark.parametrize("asked", [None, 9, Stream(9)])
def test_nothing_is_recorded_on_the_current_stream(torch, asked):
    attend_kernels.attention(**packed(torch.Tensor), stream=asked)
    assert torch.events == [*made(9), ("launch", 9)]


def test_out_is_not_recorded_as_an_allocation_of_the_call(torch):
    q = torch.Tensor("q", np.ones((1, 1, 2, 4), np.float32))
    out = torch.Tensor("out", np.zeros((1, 1, 2, 4), np.float32))
    attend_kernels.attention(q, q, q, out=out, stream=Stream(5))
    assert torch.events == [*(("record q", 5),) * 3, ("record out", 5), ("launch", 5)]


def test_a_refused_call_restores_the_current_stream(torch):
    arguments = {**packed(torch.Tensor), "sinks": [1.0]}
    with pytest.raises(attend_kernels.Error, match="sinks"):
        attend_kernels.attention(**arguments, stream=Stream(5))
    assert torch.current_stream(0) is CURRENT and ("launch", 5) not in torch.events


def test_each_call_of_a_batch_is_recorded(torch):
    calls = [dict(packed(torch.Tensor), stream=asked) for asked in (Stream(5), 5)]
    attend_kernels.attention_batch(calls)
    assert [event for event in torch.events if event[0] in ("long", "new_empty")] == 2 * made(5)
    assert len(recorded(torch.events)) == 4 and torch.events[-1] == ("launch", 5)


def test_tensors_of_other_libraries_do_not_use_torch(torch, fake):
    attend_kernels.attention(**packed(lambda _, array: PtrTensor(array)), stream=5)
    assert torch.events == [("launch", 5)]


def test_torch_is_not_imported(fake, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    attend_kernels.attention(**packed(lambda _, array: PtrTensor(array)), stream=5)
    assert "torch" not in sys.modules


def ones():
    return (np.ones((1, 1, 2, 4), np.float32),) * 3


def both(*streams):
    """Calls attention on all streams concurrently; returns the exceptions."""
    raised = []

    def work(stream):
        try:
            attend_kernels.attention(*ones(), stream=stream)
        except Exception as failure:  # raised by the patched launch
            raised.append(failure)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_launches_of_different_streams_overlap_and_those_of_one_do_not(fake, monkeypatch):
    run, meet = fake.attend_run_batch, threading.Barrier(2)

    def together(*arguments):
        meet.wait(timeout=20)  # raises if the other launch has to wait for this one
        return run(*arguments)

    monkeypatch.setattr(fake, "attend_run_batch", together)
    assert not both(3, 4)
    inside = []

    def alone(*arguments):
        inside.append(1)
        time.sleep(0.002)
        assert len(inside) == 1
        code = run(*arguments)
        inside.pop()
        return code

    monkeypatch.setattr(fake, "attend_run_batch", alone)
    assert not both(*[3] * 8)


def test_a_workspace_is_freed_when_its_launch_fails(fake, monkeypatch):
    run = fake.attend_run_batch

    def broken(params, count, workspace, *_):
        fake.blocks[workspace][0:1] = b"\x07"  # a launch that was cut short
        fake.error = b"it broke"
        return 13

    monkeypatch.setattr(fake, "attend_run_batch", broken)
    with pytest.raises(attend_kernels.Error, match="it broke"):
        attend_kernels.attention(*(PtrTensor(x) for x in ones()))
    assert not fake.blocks
    monkeypatch.setattr(fake, "attend_run_batch", run)
    attend_kernels.attention(*ones())  # asserts that a workspace begins with zeros


def test_the_workspace_of_a_destroyed_stream_is_freed(fake, monkeypatch):
    wait, tensors = fake.attend_synchronize, [PtrTensor(x) for x in ones()]

    def gone(device, stream):
        fake.error = b"no such stream"
        return 13 if stream == 3 else 0

    for stream in (3, 4):
        attend_kernels.attention(*tensors, stream=stream)
    monkeypatch.setattr(fake, "attend_synchronize", gone)
    with pytest.raises(attend_kernels.Error, match="no such stream"):
        attend_kernels.release_workspaces()
    assert not fake.blocks
    attend_kernels.attention(*tensors, stream=3)
    fake.workspace_bytes = 65536
    with pytest.raises(attend_kernels.Error, match="no such stream"):  # the workspace has to grow
        attend_kernels.attention(*tensors, stream=3)
    assert not fake.blocks
    monkeypatch.setattr(fake, "attend_synchronize", wait)
    attend_kernels.attention(*tensors, stream=3)
