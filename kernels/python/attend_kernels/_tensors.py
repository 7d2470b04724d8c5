# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library as address, shape, strides and dtype."""

import array
import dataclasses
import functools
import math
import sys

from . import _cuda_interface, _dlpack
from ._library import CPU, DTYPES, ITEM_BYTES, Memory, invalid, unimplemented


@dataclasses.dataclass
class Tensor:
    """One array. `device` is a CUDA ordinal, CPU, or None for a NumPy array, which may be computed
    on any device and has address 0 until it is placed there. Strides count elements. `owner` keeps
    the memory alive."""
    name: str
    kind: str  # "numpy", "data_ptr" or "dlpack": the kind that results match
    address: int
    shape: tuple
    strides: tuple
    dtype: str
    device: object
    owner: object

    def contiguous(self):
        return dataclasses.replace(self, strides=_dlpack.packed_strides(self.shape))


def is_numpy(value):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _has_data_ptr(value):
    return hasattr(value, "data_ptr") and hasattr(value, "stride")


# Cached: torch's dtypes and devices are few, and asking them takes longer.
@functools.lru_cache
def _dtype_name(dtype):
    return str(dtype).rpartition(".")[2]


@functools.lru_cache
def _place(device):
    """CPU, a CUDA ordinal, or None for any other torch device."""
    if device.type == "cuda":
        return device.index or 0
    return CPU if device.type == "cpu" else None


def device_of(value):
    """The CUDA ordinal of `value`, or None if it is in host memory (or not an array)."""
    if _has_data_ptr(value):
        where = _place(value.device)
        return None if where == CPU else where
    if not is_numpy(value) and hasattr(value, "__dlpack_device__"):
        kind, index = value.__dlpack_device__()
        return int(index) if int(kind) in (_dlpack.CUDA, _dlpack.CUDA_MANAGED) else None
    if hasattr(value, "__cuda_array_interface__"):
        return _cuda_interface.device_of(value)
    return None


def dlpack_on_host(value):
    """Whether `value` is a DLPack array (not NumPy's) in host memory."""
    return not is_numpy(value) and hasattr(value, "__dlpack_device__") and \
        int(value.__dlpack_device__()[0]) == _dlpack.CPU_TYPE


def stays_on_host(value):
    """Whether `value` is in host memory and used in place on the CPU: a torch or DLPack tensor."""
    if _has_data_ptr(value):
        return _place(value.device) == CPU
    return dlpack_on_host(value)


def in_forward_mode():
    """Whether a torch tensor may have a tangent."""
    autograd = getattr(sys.modules.get("torch"), "autograd", None)
    return autograd is not None and getattr(autograd.forward_ad, "_current_level", 0) >= 0


def check_tangent(name, value):
    """Error if a torch tensor has a forward-mode tangent, for which there is no derivative."""
    if not in_forward_mode() or not isinstance(value, sys.modules["torch"].Tensor):
        return
    if sys.modules["torch"].autograd.forward_ad.unpack_dual(value).tangent is not None:
        raise unimplemented(f"{name} has a tangent, but attention has no derivative in forward "
                            f"mode")


def _check_gradient(name, value):
    """Error if a torch tensor requires grad, which this function would drop."""
    check_tangent(name, value)
    if not getattr(value, "requires_grad", False):
        return
    torch = sys.modules.get("torch")
    if torch is None or torch.is_grad_enabled():
        raise invalid(f"{name} requires grad, which this function would drop: use attend.torch, or "
                      f"{name}.detach()")


def check_nested(name, value):
    """Error, with advice, for torch's NestedTensor, which has no plain memory."""
    if getattr(value, "is_nested", False):
        raise invalid(f"{name} is a NestedTensor, must be a plain tensor: pass its values in "
                      f"layout 'LHD', its offsets as cu_seqlens_q or cu_seqlens_k, or all of it to "
                      f"attend.torch.scaled_dot_product_attention")


def _check_dtype(name, dtype, allowed):
    if dtype not in allowed:
        raise invalid(f"{name} has dtype {dtype}, must be {' or '.join(allowed)}")


def _check_whole(name, value):
    """Error if the memory alone would lose a mask or a sign."""
    if is_numpy(value):
        numpy = sys.modules["numpy"]
        if type(value) is not numpy.ndarray and isinstance(value, numpy.ma.MaskedArray):
            raise invalid(f"{name} is a masked array, must be a plain one: {name}.filled(...)")
        return
    check_nested(name, value)
    if getattr(value, "is_neg", None) is not None and value.is_neg():
        raise invalid(f"{name} is a torch tensor with the negative bit, must be plain: "
                      f"{name}.resolve_neg()")


def read(name, value, stream, allowed=tuple(DTYPES)):
    """A Tensor over `value`, without a copy. Error: it is not an array, its dtype is not in
    `allowed`, it is neither on the host nor on CUDA, or it requires grad."""
    _check_gradient(name, value)
    _check_whole(name, value)
    if is_numpy(value):
        _check_dtype(name, value.dtype.name, allowed)
        if not value.dtype.isnative:
            raise invalid(f"{name} has dtype {value.dtype.str}, must have this machine's byte "
                          f"order")
        return Tensor(name, "numpy", 0, value.shape, _dlpack.packed_strides(value.shape),
                      value.dtype.name, None, value)
    if _has_data_ptr(value):
        dtype, device = _dtype_name(value.dtype), _place(value.device)
        _check_dtype(name, dtype, allowed)
        if device is None:
            raise invalid(f"{name} is on {value.device}, must be on the CPU or a CUDA device")
        try:
            return Tensor(name, "data_ptr", value.data_ptr(), tuple(value.shape),
                          tuple(value.stride()), dtype, device, value)
        except RuntimeError as failure:  # sparse, nested
            raise invalid(f"{name} has no plain memory: {failure}") from None
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        if dlpack_on_host(value):
            capsule = value.__dlpack__()
        elif device_of(value) is not None:
            capsule = value.__dlpack__(stream=stream or _dlpack.LEGACY_DEFAULT_STREAM)
        else:
            raise invalid(f"{name} is on DLPack device {value.__dlpack_device__()}, must be on the "
                          f"CPU or CUDA")
        taken = _dlpack.Import(name, capsule)
        _check_dtype(name, taken.dtype, allowed)
        return Tensor(name, "dlpack", taken.address, taken.shape, taken.strides, taken.dtype,
                      taken.device, taken)
    if hasattr(value, "__cuda_array_interface__"):
        dtype, address, shape, strides = _cuda_interface.read(name, value, stream)
        _check_dtype(name, dtype, allowed)
        return Tensor(name, "dlpack", address, shape, strides, dtype, device_of(value), value)
    raise invalid(f"{name} is a {type(value).__name__}, must be a NumPy array, or have data_ptr(), "
                  f"__dlpack__() or __cuda_array_interface__")


def is_mask(value):
    """Whether `value` is a NumPy array or torch tensor of bool."""
    torch = sys.modules.get("torch")
    tensor = torch is not None and isinstance(value, torch.Tensor)
    return (tensor or is_numpy(value)) and str(value.dtype).rpartition(".")[2] == "bool"


def packed_mask(mask, name="bias"):
    """Packs an array or tensor of bool into one of uint8, eight elements to a byte from the lowest
    bit."""
    _check_whole(name, mask)
    if is_numpy(mask):
        return sys.modules["numpy"].packbits(mask, axis=-1, bitorder="little")
    torch, columns = sys.modules["torch"], mask.shape[-1]
    byte_count = -(-columns // 8)
    ones = mask.view(torch.uint8).clamp(max=1)  # any other byte of a bool is True
    if columns % 8 == 0 and mask.numel() > 0:
        # The product of eight bytes of 0 or 1 with this has their bits, in order, in its last byte.
        products = ones.flatten().view(torch.int64) * 0x0102040810204080
        packed = products.view(torch.uint8)[7::8].contiguous()
        return packed.view(*mask.shape[:-1], byte_count)
    whole = torch.nn.functional.pad(ones, (0, 8 * byte_count - columns))
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (whole.unflatten(-1, (byte_count, 8)) << places).sum(-1, dtype=torch.uint8)


def numbers(name, value, code):
    """A host sequence (list, NumPy array, CPU tensor; nested or flat) as an array.array of `code`,
    and its shape."""
    _check_gradient(name, value)
    try:
        value = value.tolist() if hasattr(value, "tolist") else list(value)
        shape = (len(value),)
    except TypeError:
        raise invalid(f"{name} is {value!r}, must be numbers in a list, array or tensor") from None
    if value and isinstance(value[0], (list, tuple)):
        shape = (len(value), len(value[0]))
        if any(not isinstance(row, (list, tuple)) or len(row) != shape[1] for row in value):
            raise invalid(f"{name} has rows of different lengths")
        value = [number for row in value for number in row]
    try:
        return array.array(code, value), shape
    except (TypeError, OverflowError) as failure:
        raise invalid(f"{name} holds no plain numbers: {failure}") from None


def overlaps_itself(shape, strides, item=1):
    """Whether two elements of an array may share memory: some stride is smaller than the span of
    the smaller strides. `item`: an element's size in the strides' unit."""
    if 0 in shape:
        return False
    span = item
    for stride, size in sorted((abs(stride), size) for size, stride in zip(shape, strides)
                               if size > 1):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def empty_like(tensor, shape, dtype, stream):
    """A Tensor over an uninitialised C-contiguous array of the same library on the same device; a
    DeviceArray for DLPack."""
    if tensor.kind == "numpy":
        numpy = sys.modules["numpy"]
        made = numpy.empty(shape, numpy.float32 if dtype == "float32" else tensor.owner.dtype)
        address = 0
    elif tensor.kind == "data_ptr":
        if dtype == tensor.dtype:
            made = tensor.owner.new_empty(shape)
        else:
            package = sys.modules[type(tensor.owner).__module__.partition(".")[0]]
            made = tensor.owner.new_empty(shape, dtype=getattr(package, dtype))
        address = made.data_ptr()
    else:
        memory = Memory(tensor.device, ITEM_BYTES[dtype] * math.prod(shape))
        made, address = _dlpack.DeviceArray(memory, shape, dtype, stream), memory.address
    return Tensor("result", tensor.kind, address, shape, _dlpack.packed_strides(shape), dtype,
                  tensor.device, made)
