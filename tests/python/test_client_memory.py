# SPDX-License-Identifier: Apache-2.0
"""Client.empty on a GPU, and answers in memory shared with the server, with a fake client library
that uses host memory as GPU memory."""

import ctypes
import gc

import attend
import numpy as np
import pytest
from attend import _library
from attend_kernels import DeviceArray, _dlpack

import cuda_tensor

SHAPE = (1, 2, 3, 8)
STREAM = 0  # without torch only the default stream is used


class FakeClientLibrary:
    """The part of libattend_client.so that calls with tensors on GPU 0 need. Fills O with 7."""

    def __init__(self):
        self.log, self.blocks, self.answers = [], {}, {}

    def last_error(self):
        return b""

    def open(self, _, handle):
        handle._obj.value = 1
        return 0

    def _block(self, byte_count):
        block = ctypes.create_string_buffer(byte_count + 1)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def allocate(self, _, memory, byte_count, address):
        self.log.append(("allocate", memory, byte_count))
        address._obj.value = self._block(byte_count)
        return 0

    def release(self, _, address):
        self.log.append(("release", address))
        del self.blocks[address]

    def start(self, _, params, call):
        q, v = params._obj.q, params._obj.v
        self.log.append(("start", q.data, q.memory))
        count = q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3]
        o = self._block(4 * count)
        ctypes.memmove(o, np.full(count, 7, np.float32).tobytes(), 4 * count)
        call._obj.value = number = 100 + len(self.answers)
        self.answers[number] = _library.TensorStruct(o, q.dtype, 4, q.shape, q.memory)
        return 0

    def wait(self, _, nanoseconds, ended):
        ended._obj.value = 1
        return 0

    def get(self, call, answer):
        answer = answer._obj
        answer.o = self.answers[call]
        for name in ("message", "request_id", "kernel", "kernel_reason", "device", "transport",
                     "check_detail"):
            setattr(answer, name, b"")
        return 0

    def copy(self, call, tensor, to, to_memory, stream):
        self.log.append(("copy", int(call), to_memory))
        ctypes.memmove(to, tensor._obj.data, 4 * np.prod(SHAPE))
        return 0

    def used(self, call, stream):
        self.log.append(("used", int(call), stream))

    def call_free(self, call):
        self.log.append(("call_free", int(call)))

    def shut_down(self, _):
        pass

    def close(self, _):
        pass

    def taken(self):
        log, self.log = self.log, []
        return log


@pytest.fixture
def library(monkeypatch):
    made = FakeClientLibrary()
    monkeypatch.setattr(_library, "_library", made)
    yield made
    gc.collect()
    assert not _library._allocated and not _library._on_gpus


@pytest.fixture
def client(library):
    with attend.Client() as made:
        yield made


class TorchDtype:
    def __str__(self):
        return "torch.float16"


@pytest.mark.parametrize("dtype,name", [
    ("bfloat16", "bfloat16"), ("float32", "float32"), (np.float16, "float16"),
    (np.dtype("float16"), "float16"), (TorchDtype(), "float16")])
def test_an_array_on_a_gpu_supports_every_interface(client, library, dtype, name):
    array = client.empty(SHAPE, dtype, device="cuda:0")
    byte_count = (4 if name == "float32" else 2) * 48
    assert library.taken() == [("allocate", 1, byte_count)]
    assert isinstance(array, DeviceArray)
    assert (array.shape, array.dtype, array.nbytes) == (SHAPE, name, byte_count)
    assert array.__dlpack_device__() == (_dlpack.CUDA, 0)
    address = array.data_ptr()
    if name != "bfloat16":
        interface = array.__cuda_array_interface__
        assert interface["data"] == (address, False) and interface["shape"] == SHAPE
    taken = _dlpack.Import("array", array.__dlpack__())
    assert (taken.address, taken.shape, taken.dtype, taken.device) == (address, SHAPE, name, 0)
    del array
    assert library.taken() == []  # the importer still uses the memory
    del taken
    assert library.taken() == [("release", address)]


def test_devices_by_name(client, library):
    for device, memory in (("cuda", 1), ("cuda:3", 4), (cuda_tensor.Device("cuda", 2), 3)):
        client.empty(5, device=device)
        assert library.taken()[0] == ("allocate", memory, 20)
    for device in ("cpu", cuda_tensor.Device("cpu")):
        assert isinstance(client.empty(5, device=device), np.ndarray)
        assert library.taken()[0] == ("allocate", 0, 20)


@pytest.mark.parametrize("arguments,words", [
    (dict(device="tpu"), "device is 'tpu', must be 'cpu' or 'cuda:0'"),
    (dict(device="cuda:-1"), "device is 'cuda:-1'"),
    (dict(device="cuda", dtype="int8"), "dtype is 'int8', must be float16, bfloat16 or float32"),
    (dict(device="cuda", shape=(2, -1)), "shape is -1"),
    (dict(device="cuda", shape=(2**40, 2**40)), "shape's bytes")])
def test_invalid_arguments_are_refused(client, library, arguments, words):
    with pytest.raises(attend.Error, match=words.replace("[", "\\[")):
        client.empty(**{"shape": SHAPE, **arguments})
    assert library.taken() == []


def test_inputs_and_answers_are_not_copied(client, library):
    q, k, v = (client.empty(SHAPE, device="cuda:0") for _ in range(3))
    library.taken()
    o = client.attention(q, k, v)
    assert library.taken() == [("start", q.data_ptr(), 1)]
    assert isinstance(o, DeviceArray) and o.shape == SHAPE
    assert o.data_ptr() == library.answers[100].data
    taken = _dlpack.Import("o", o.__dlpack__())
    del o
    gc.collect()
    assert library.taken() == []
    del taken
    assert library.taken() == [("used", 100, STREAM or None), ("call_free", 100)]
    first = q.data_ptr()
    del q
    assert library.taken() == [("release", first)]


def test_views_of_an_array_are_not_copied(client, library):
    whole = client.empty((3, *SHAPE), device="cuda:0")
    parts = [cuda_tensor.PtrTensor(np.ctypeslib.as_array(
        (ctypes.c_float * 48).from_address(whole.data_ptr() + n * 192)).reshape(SHAPE))
        for n in range(3)]
    # stands in for torch.from_dlpack, which converts the answer
    cuda_tensor.from_dlpack = lambda array: array
    try:
        o = client.attention(*parts)
    finally:
        del cuda_tensor.from_dlpack
    assert isinstance(o, DeviceArray) and o.data_ptr() == library.answers[100].data


def test_answers_are_copied_if_an_input_was_not_allocated_by_the_client(client, library, fake):
    q, k, v = (cuda_tensor.DlpackTensor(np.zeros(SHAPE, np.float32)) for _ in range(3))
    lent = client.empty(SHAPE, device="cuda:0")
    library.taken()
    o = client.attention(q, lent, v)
    assert [each[0] for each in library.taken()] == ["start", "copy", "call_free"]
    assert o.data_ptr() != library.answers[100].data
