# SPDX-License-Identifier: Apache-2.0
"""Arrays with __cuda_array_interface__ and without DLPack.

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html: a dict with the address, the
shape, strides in bytes, the type, and the stream that the array is ready on. It does not contain
the GPU; the driver finds that by the address.
"""

import ctypes

from ._dlpack import packed_strides
from ._library import check, invalid, library

_DTYPES = {"<f2": ("float16", 2), "<f4": ("float32", 4), "<f8": ("float64", 8),
           "<i8": ("int64", 8), "<i4": ("int32", 4)}
_POINTER_DEVICE = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


def _ordinal(address):
    """The GPU of a device address. Error: the driver does not know the address, or there is no
    driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as failure:
        raise invalid(f"an array has __cuda_array_interface__, but there is no driver: {failure}") \
            from None
    ordinal = ctypes.c_int()
    if driver.cuPointerGetAttribute(ctypes.byref(ordinal), _POINTER_DEVICE,
                                    ctypes.c_uint64(address)) != 0:
        raise invalid(f"{address:#x} is not an address of GPU memory")
    return ordinal.value


def device_of(value):
    """The CUDA ordinal where `value` is; 0 for an empty array, which has no address."""
    address = value.__cuda_array_interface__["data"][0]
    return _ordinal(address) if address else 0


def read(name, value, stream):
    """(dtype, address, shape, strides in elements). Waits for the array's stream if it names one
    other than `stream`."""
    given = value.__cuda_array_interface__
    kind = given["typestr"]
    dtype, item = _DTYPES.get(kind, (kind, 1))
    if given.get("mask") is not None:
        raise invalid(f"{name} has a mask in its __cuda_array_interface__")
    shape = tuple(given["shape"])
    strides = given.get("strides")
    if strides is None:
        strides = packed_strides(shape)
    elif any(stride % item for stride in strides):
        raise invalid(f"{name} has strides {tuple(strides)} in bytes, must be multiples of {item}")
    else:
        strides = tuple(stride // item for stride in strides)
    ready_on = given.get("stream")
    # The interface calls the default stream 1; here it is NULL.
    if ready_on is not None and (ready_on if ready_on != 1 else 0) != (stream or 0):
        check(library().attend_synchronize(device_of(value), None if ready_on == 1 else ready_on))
    return dtype, given["data"][0], shape, strides
