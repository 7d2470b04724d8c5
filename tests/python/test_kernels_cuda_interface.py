# SPDX-License-Identifier: Apache-2.0
"""Arrays with __cuda_array_interface__, with the fake library."""

import attend_kernels
import numpy as np
import pytest
import reference
from attend_kernels import _cuda_interface


class Interface:
    """An array with no interface but __cuda_array_interface__."""

    def __init__(self, values, stream=None, with_strides=True, **more):
        self.values = values
        self.__cuda_array_interface__ = {
            "version": 3, "data": (values.ctypes.data if values.size else 0, False),
            "shape": values.shape, "typestr": values.dtype.str,
            "strides": values.strides if with_strides else None, "stream": stream, **more}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Takes all addresses for GPU 0's."""
    monkeypatch.setattr(_cuda_interface, "_ordinal", lambda address: 0)


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("with_strides", [True, False])
def test_arrays_are_used_on_their_device(fake, with_strides):
    q, k, v = numbers(1, 4, 5, 8), numbers(1, 2, 7, 8), numbers(1, 2, 7, 8)
    o = attend_kernels.attention(*(Interface(x, with_strides=with_strides) for x in (q, k, v)))
    wanted, _ = reference.attention(q, k, v)
    assert isinstance(o, attend_kernels.DeviceArray) and o.device_index == 0
    interface = o.__cuda_array_interface__
    assert interface["shape"] == q.shape and interface["typestr"] == "<f4"
    got = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * q.size).from_address(
        interface["data"][0])).reshape(q.shape)
    assert np.abs(got - wanted).max() < 1e-5


def test_strides_are_in_bytes(fake):
    whole = numbers(1, 5, 4, 8)
    o = attend_kernels.attention(*[Interface(whole.swapaxes(1, 2))] * 3)
    assert o.shape == (1, 4, 5, 8)
    with pytest.raises(attend_kernels.Error, match="q has strides .* must be multiples of 4"):
        odd = Interface(whole)
        odd.__cuda_array_interface__["strides"] = (640, 129, 32, 4)
        attend_kernels.attention(odd, odd, odd)


def test_unsupported_arrays_are_refused(fake):
    good = Interface(numbers(1, 1, 2, 8))
    with pytest.raises(attend_kernels.Error, match="q has dtype int64"):
        attend_kernels.attention(Interface(np.zeros((1, 1, 2, 8), np.int64)), good, good)
    with pytest.raises(attend_kernels.Error, match="q has dtype <c8"):
        attend_kernels.attention(Interface(np.zeros((1, 1, 2, 8), np.complex64)), good, good)
    with pytest.raises(attend_kernels.Error, match="q has a mask"):
        attend_kernels.attention(Interface(numbers(1, 1, 2, 8), mask=good), good, good)


def test_the_call_waits_for_the_arrays_stream(fake, monkeypatch):
    waited = []
    true = type(fake).attend_synchronize
    monkeypatch.setattr(type(fake), "attend_synchronize", lambda self, device, stream: (
        waited.append(stream), true(self, device, stream))[1])
    attend_kernels.attention(*[Interface(numbers(1, 1, 2, 8), stream=77)] * 3)
    assert waited.count(77) == 3
    waited.clear()
    attend_kernels.attention(*[Interface(numbers(1, 1, 2, 8), stream=1)] * 3)
    assert not waited, "the default stream is the call's own"
