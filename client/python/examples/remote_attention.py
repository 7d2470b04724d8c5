# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention computed by an attend server: Attend in the forward pass, Backward for the
gradients, over gRPC.

Needs grpcio and the stubs of proto/attend/v1 on PYTHONPATH (README.md, From Python).
"""

import grpc
import torch
from attend.v1 import attention_pb2 as pb
from attend.v1 import attention_pb2_grpc as rpc

_DTYPES = {torch.float16: pb.DTYPE_FLOAT16, torch.bfloat16: pb.DTYPE_BFLOAT16,
           torch.float32: pb.DTYPE_FLOAT32}
_ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _put(request, field, tensor):
    """Fills in a tensor of the request, whose bytes are the next entry of raw."""
    field.CopyFrom(pb.Tensor(dtype=_DTYPES[tensor.dtype], shape=tensor.shape))
    request.raw.append(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


def _take(raw, meta, device):
    dtype, = (name for name, number in _DTYPES.items() if number == meta.dtype)
    values = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return values.reshape(tuple(meta.shape)).to(device)


def _request(q, k, v, options):
    request = pb.AttendRequest(**options)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _put(request, getattr(request, name), tensor)
    return request


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, service, options, q, k, v):
        answer = service.Attend(_request(q, k, v, dict(options, return_lse=True)))
        o, lse = (_take(raw, meta, q.device)
                  for raw, meta in zip(answer.raw, (answer.o, answer.lse)))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.service, ctx.options = service, options
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o):
        q, k, v, o, lse = ctx.saved_tensors
        request = _request(q, k, v, ctx.options)
        for name, tensor in (("o", o), ("lse", lse), ("d_o", d_o)):
            _put(request, getattr(request.backward, name), tensor)
        answer = ctx.service.Backward(request)
        found = answer.gradients
        return None, None, *(_take(raw, meta, q.device) for raw, meta in
                             zip(answer.raw, (found.d_q, found.d_k, found.d_v)))


class RemoteAttention:
    """Called as torch.nn.functional.scaled_dot_product_attention, for [B, H, L, D] without a mask:

        attention = RemoteAttention("127.0.0.1:8001")
        o = attention(q, k, v, is_causal=True, enable_gqa=True)
    """

    def __init__(self, address):
        self._channel = grpc.insecure_channel(address, options=_ANY_SIZE)
        self._service = rpc.AttentionServiceStub(self._channel)

    def __call__(self, q, k, v, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if not enable_gqa and q.shape[1] != k.shape[1]:
            raise ValueError(f"key has {k.shape[1]} heads, must have query's {q.shape[1]}")
        kind = pb.Mask.KIND_CAUSAL_TOP_LEFT if is_causal else pb.Mask.KIND_NONE
        options = dict(mask=pb.Mask(kind=kind))
        if scale is not None:
            options["scale"] = scale
        if dropout_p > 0:  # drawn once; the backward pass is told the same
            seed = int(torch.randint(2**63 - 1, ()))
            options.update(dropout_p=dropout_p, dropout_seed=seed)
        return _Attention.apply(self._service, options, q, k, v)

    def close(self):
        self._channel.close()
