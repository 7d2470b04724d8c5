# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules: import, export, and when the tensor is deleted."""

import ctypes
import gc

import attend_kernels
import numpy as np
import pytest
from attend_kernels import _dlpack, _library

from cuda_tensor import DlpackTensor


def test_import_reads_every_field():
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for with_strides in (True, False):
        for offset in (0, 64):
            tensor = DlpackTensor(values, with_strides=with_strides, byte_offset=offset)
            taken = _dlpack.Import("q", tensor.__dlpack__(stream=1))
            assert (taken.address, taken.shape) == (values.ctypes.data, (2, 3, 4))
            assert (taken.strides, taken.dtype, taken.device) == ((12, 4, 1), "float32", 0)
            assert tensor.deleted == 0
            del taken
            assert tensor.deleted == 1
    turned = DlpackTensor(values.T)
    assert _dlpack.Import("q", turned.__dlpack__()).strides == (1, 4, 12)


def test_a_capsule_is_imported_once():
    tensor = DlpackTensor(np.zeros(3, np.float32))
    capsule = tensor.__dlpack__()
    taken = _dlpack.Import("q", capsule)
    with pytest.raises(attend_kernels.Error, match="q.__dlpack__.. returned no capsule"):
        _dlpack.Import("q", capsule)
    del taken
    assert tensor.deleted == 1


@pytest.mark.parametrize("tensor,message", [
    (DlpackTensor(np.zeros(3, np.int16)), "k has DLPack type code 0, 16 bits, 1 lanes"),
    (DlpackTensor(np.zeros(3, np.float32), device_type=10), "k is on DLPack device type 10"),
])
def test_refused_capsules_are_deleted_too(tensor, message):
    with pytest.raises(attend_kernels.Error, match=message):
        _dlpack.Import("k", tensor.__dlpack__())
    gc.collect()
    assert tensor.deleted == 1


def test_exported_memory_lives_until_the_importer_deletes_it(fake):
    array = _dlpack.DeviceArray(_library.Memory(0, 96), (2, 3, 4), "float32", 0)
    address = array.data_ptr()
    assert (array.nbytes, array.__dlpack_device__()) == (96, (2, 0))
    taken = _dlpack.Import("x", array.__dlpack__())
    del array
    gc.collect()
    assert address in fake.blocks
    assert (taken.address, taken.shape, taken.strides) == (address, (2, 3, 4), (12, 4, 1))
    del taken
    gc.collect()
    assert not fake.blocks and not _dlpack._exports


def test_a_capsule_that_is_not_imported_frees_its_memory(fake):
    array = _dlpack.DeviceArray(_library.Memory(0, 8), (4,), "float16", 0)
    capsule = array.__dlpack__()
    del array
    assert fake.blocks
    del capsule
    gc.collect()
    assert not fake.blocks


@pytest.mark.parametrize("own,consumer,waits", [(0, None, 0), (0, 1, 0), (0, 7, 1), (7, 7, 0),
                                                (7, 1, 1), (7, None, 1), (7, -1, 0)])
def test_export_waits_unless_the_streams_are_the_same(fake, own, consumer, waits):
    waited = []
    fake.attend_synchronize = lambda device, stream: waited.append(stream) or 0
    array = _dlpack.DeviceArray(_library.Memory(0, 8), (4,), "float16", own)
    array.__dlpack__(stream=consumer)
    assert waited == [own or None] * waits


def test_structs_have_the_c_sizes():
    assert ctypes.sizeof(_dlpack.DLTensor) == 48  # dlpack.h on a 64-bit machine
    assert ctypes.sizeof(_dlpack.DLManagedTensor) == 64
