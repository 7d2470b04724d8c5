# SPDX-License-Identifier: Apache-2.0
"""Arguments that attention() refuses: each message names the argument, its value and the bound."""

import attend_kernels
import numpy as np
import pytest

from cuda_tensor import Device, DlpackTensor, PtrTensor


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8)
READ_ONLY = zeros(2, 4, 5, 8)
READ_ONLY.flags.writeable = False
LHD = dict(q=zeros(6, 4, 8), k=zeros(9, 2, 8), v=zeros(9, 2, 8), layout="LHD",
           cu_seqlens_q=[0, 2, 6], cu_seqlens_k=[0, 4, 9])

DENSE = [
    (dict(layout="BLDH"), "layout is 'BLDH', must be BHLD, BLHD or LHD"),
    (dict(alignment="left"), "alignment is 'left', must be bottom_right or top_left"),
    (dict(q=[1.0]), "q is a list, must be a NumPy array, or have data_ptr"),
    (dict(q=zeros(2, 5, 8)), "q has 3 dimensions, layout BHLD needs 4"),
    (dict(q=Q.astype(np.int32)), "q has dtype int32, must be float16 or bfloat16 or float32 or"),
    (dict(k=K.astype(np.float16)), "k has dtype float16, must be q's, float32"),
    (dict(k=PtrTensor(K)), "k has device 0, must be q's, the host"),
    (dict(q=PtrTensor(Q, Device("xpu"))), "q is on xpu:0, must be on the CPU or a CUDA device"),
    (dict(k=PtrTensor(K, Device("cpu"))), "k has device the CPU, must be q's, the host"),
    (dict(device="tpu"), "device is 'tpu', must be 'cpu' or 'cuda:N'"),
    (dict(device="cpu:1"), "device is 'cpu:1', must be 'cpu' or 'cuda:N'"),
    (dict(q=PtrTensor(Q), device="cuda:1"), "device is 'cuda:1', but q is on cuda:0"),
    (dict(q=PtrTensor(Q, Device("cpu")), device="cuda"), "device is 'cuda', but q is on the CPU"),
    (dict(q=Q.astype(">f4")), "q has dtype >f4, must have this machine's byte order"),
    (dict(k=zeros(2, 2, 7, 9)), "k has head dim 9, must be 8"),
    (dict(k=zeros(3, 2, 7, 8)), "k has batch 3, must be 2"),
    (dict(v=zeros(2, 3, 7, 8)), "v has heads 3, must be 2"),
    (dict(v=zeros(2, 2, 6, 8)), "v has rows 6, must be 7"),
    (dict(window=(-2, 0)), "window's left side is -2, must be in [-1, 2^63)"),
    (dict(window=(2**63, 0)), "window's left side is 9223372036854775808, must be in [-1, 2^63)"),
    (dict(window=5), "window is 5, must be None or (left, right)"),
    (dict(layout=[]), "layout is [], must be BHLD, BLHD or LHD"),
    (dict(kernel=None), "kernel is None, must be a str"),
    (dict(kernel="cpu\0"), "must have no NUL"),
    (dict(scale="x"), "scale is 'x', must be a number"),
    (dict(sinks=1.0), "sinks is 1.0, must be numbers in a list"),
    (dict(q=np.ma.masked_less(Q, 5)), "q is a masked array, must be a plain one: q.filled(...)"),
    (dict(bias=np.ma.masked_less(zeros(5, 7, dtype=bool), 5)), "bias is a masked array"),
    (dict(bias=zeros(3, 5, 7)), "bias has shape (3, 5, 7), must broadcast to (2, 4, 5, 7)"),
    (dict(bias=zeros(5, 1)), "bias has shape (5, 1), must broadcast"),
    (dict(bias=zeros(3, 5, 7, dtype=bool)), "bias has shape (3, 5, 7), must broadcast to"),
    (dict(bias=zeros(5, 7, dtype=float)), "bias has dtype float64, must be float16, bfloat16 or"),
    (dict(bias=zeros(dtype=bool)), "bias has dtype bool, must be float16"),
    (dict(dropout_p=0.5), "dropout_seed is None, dropout_p 0.5 needs one"),
    (dict(dropout_p=0.5, dropout_seed=-1), "dropout_seed is -1, must be in [0, 2^64)"),
    (dict(dropout_seed=2**64), "dropout_seed is 18446744073709551616, must be in [0, 2^64)"),
    (dict(dropout_p=0.5, dropout_seed=0.5), "dropout_seed is not an integer"),
    (dict(sinks=[0.0] * 3), "sinks has shape (3,), must be (4,)"),
    (dict(sinks=["a"]), "sinks holds no plain numbers"),
    (dict(alibi_slopes=[[0.0] * 4] * 3), "alibi_slopes has shape (3, 4), must be (4,) or (2, 4)"),
    (dict(alibi_slopes=[[0.0] * 4, [0.0]]), "alibi_slopes has rows of different lengths"),
    (dict(alibi_slopes=[[0.0] * 4, 0.0]), "alibi_slopes has rows of different lengths"),
    (dict(q_lengths=[1]), "q_lengths has shape (1,), must be (2,)"),
    (dict(q_lengths=[1, 6]), "q_lengths[1] is 6, must be in [0, 5]"),
    (dict(kv_lengths=[-1, 6]), "kv_lengths[0] is -1, must be in [0, 7]"),
    (dict(kv_lengths=[1.5, 6]), "kv_lengths holds no plain numbers"),
    (dict(cu_seqlens_q=[0, 5]), "cu_seqlens_q is given, but layout BHLD has none"),
    (dict(out=zeros(2, 4, 5, 7)), "out has shape (2, 4, 5, 7), must be (2, 4, 5, 8)"),
    (dict(out=zeros(2, 4, 5, 8, dtype=np.float16)), "out has dtype float16, must have float32"),
    (dict(out=READ_ONLY), "out is read-only, must be writable"),
    (dict(o_dtype="float16"), "o_dtype is 'float16', must be q's dtype or 'float32'"),
    (dict(kernel="none"), 'kernel is "none", must be one of'),  # the library's message
]

PACKED = [
    (dict(q=Q), "q has 4 dimensions, layout LHD needs 3"),
    (dict(q_lengths=[1]), "q_lengths is given, but layout LHD has none"),
    (dict(cu_seqlens_k=None), "cu_seqlens_k is None, layout LHD needs it"),
    (dict(cu_seqlens_k=[]), "cu_seqlens_k has no elements, must have B + 1"),
    (dict(cu_seqlens_k=[0, 9]), "cu_seqlens_k has 2 elements, must have cu_seqlens_q's 3"),
    (dict(cu_seqlens_k=[1, 4, 9]), "cu_seqlens_k[0] is 1, must be 0"),
    (dict(cu_seqlens_k=[0, 9, 4]), "cu_seqlens_k falls after element 1, must rise"),
    (dict(cu_seqlens_k=[0, 4, 10]), "cu_seqlens_k[2] is 10, must be in [0, 9]"),
    (dict(max_seqlen_q=3), "max_seqlen_q is 3, must be at least 4"),
]


class WithGradient(np.ndarray):
    requires_grad = True


def refused(message, function, *args, **arguments):
    with pytest.raises(attend_kernels.Error) as caught:
        function(*args, **arguments)
    assert message in str(caught.value)
    assert (caught.value.code, caught.value.status) == (3, "INVALID_ARGUMENT")


@pytest.mark.parametrize("change,message", DENSE)
def test_dense_arguments(fake, change, message):
    refused(message, attend_kernels.attention, **{**dict(q=Q, k=K, v=K), **change})


@pytest.mark.parametrize("change,message", PACKED)
def test_packed_arguments(fake, change, message):
    refused(message, attend_kernels.attention, **{**LHD, **change})


def test_gpu_tensors(fake):
    q, k = PtrTensor(Q), PtrTensor(K)
    turned = PtrTensor(np.zeros((2, 4, 8, 5), np.float32).swapaxes(-1, -2))
    refused("q has stride 5 in its last dimension, must be 1", attend_kernels.attention, turned, k,
            k)
    other = PtrTensor(K, Device("cuda", 1))
    refused("v has device 1, must be q's, 0", attend_kernels.attention, q, k, other)
    refused("sinks has dtype float16, must be float32", attend_kernels.attention, q, k, k,
            sinks=PtrTensor(np.zeros(4, np.float16)))
    refused("q_lengths has dtype float32, must be int64", attend_kernels.attention, q, k, k,
            q_lengths=PtrTensor(np.zeros(2, np.float32)))
    refused("max_seqlen_q is None, must be given if cu_seqlens_q is on the GPU",
            attend_kernels.attention,
            **{**LHD, **{n: PtrTensor(LHD[n]) for n in "qkv"},
               "cu_seqlens_q": PtrTensor(np.array([0, 2, 6]))})
    refused("q is on DLPack device (10, 0), must be on the CPU or CUDA", attend_kernels.attention,
            DlpackTensor(Q, device_type=10), k, k)
    refused("k has device 0, must be q's, the CPU", attend_kernels.attention,
            DlpackTensor(Q, device_type=1), k, k)


@pytest.mark.parametrize("name", ["q", "v", "bias", "sinks", "out"])
def test_tensors_that_require_grad_are_refused(fake, name):
    arguments = dict(q=PtrTensor(Q), k=PtrTensor(K), v=PtrTensor(K))
    shapes = dict(bias=(5, 7), sinks=(4,), out=(2, 4, 5, 8))
    arguments.setdefault(name, PtrTensor(zeros(*shapes.get(name, ()))))
    arguments[name].requires_grad = True
    refused(f"{name} requires grad, which this function would drop: use attend.torch, or "
            f"{name}.detach()", attend_kernels.attention, **arguments)
    host = zeros(4).view(WithGradient)
    refused("sinks requires grad", attend_kernels.attention, Q, K, K, sinks=host)
    assert not fake.launches


def test_arguments_of_batches(fake):
    good = dict(q=Q, k=K, v=K)
    refused("calls[1] has no argument casual", attend_kernels.attention_batch,
            [good, {**good, "casual": True}])
    refused("calls[0] lacks v", attend_kernels.attention_batch, [dict(q=Q, k=K)])
    refused("calls[1]: window's left side is -5", attend_kernels.attention_batch,
            [good, {**good, "window": (-5, 0)}])
    refused("calls[1]: device and stream are (0, 9), must be calls[0]'s, (0, 0)",
            attend_kernels.attention_batch, [good, {**good, "stream": 9}])
    refused("select has no argument casual", attend_kernels.select, Q, K, K, casual=True)
    assert not fake.launches


def test_a_failed_allocation_is_resource_exhausted(fake):
    fake.attend_malloc = lambda *_: 8
    fake.error = b"cudaErrorMemoryAllocation in allocating"
    with pytest.raises(attend_kernels.Error) as caught:
        attend_kernels.attention(Q, K, K)
    assert caught.value.status == "RESOURCE_EXHAUSTED" and "allocating" in str(caught.value)
