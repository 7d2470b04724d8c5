# SPDX-License-Identifier: Apache-2.0
"""The same functions in process, or on the server of the enclosing `connect` block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attend_kernels
from attend_kernels._library import invalid, unimplemented

from . import _connection
from ._arguments import check_answer, check_names
from ._options import Array, Attention, CallOptions, Wanted, named

if TYPE_CHECKING:
    from typing_extensions import Unpack

# These have a meaning on a server only.
_SERVERS = ("check", "priority", "request_id", "timeout", "tenant", "traceparent", "transport")


def _in_process(what: str, given: Any) -> dict[str, Any]:
    """The options in attend_kernels' form. Its defaults are the same."""
    if not given:
        return given
    check_names(what, given)
    if given.get("check"):
        raise unimplemented("check needs a server: use attend.connect")
    return {name: value for name, value in given.items() if name not in _SERVERS}


@Attention.of
def attention(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """softmax(scale * q k^T, capped, plus bias, minus ALiBi, under the mask) v, exactly: in this
    process, or on the server of the enclosing `connect` block. The same kernel gives the same bits.

    Arguments and results are those of Client.attention. In process, `check` is refused, and the
    options for servers (priority, request_id, timeout, tenant, traceparent, transport) are ignored;
    tensors are computed where they are, NumPy's on GPU 0 if there is one, else on the CPU."""
    client = _connection.connected()
    if client is not None:
        return client.attention(q, k, v, **options)
    return attend_kernels.attention(q, k, v, **_in_process("attention", options))


@named
def backward(d_o: Array, q: Array, k: Array, v: Array, o: Array = None, lse: Array = None, *,
             d_lse: Array = None, wanted: Wanted = ("q", "k", "v"),
             **options: Unpack[CallOptions]) -> tuple[Any, ...]:
    """Client.backward, in this process or on the server of the enclosing `connect` block."""
    client = _connection.connected()
    if client is not None:
        return client.backward(d_o, q, k, v, o, lse, d_lse=d_lse, wanted=wanted, **options)
    given = _in_process("backward", options)
    check_answer(o, lse)
    if o is None:
        o, lse = attend_kernels.attention(q, k, v, **{**given, "return_lse": True})
    if given.get("tree") is not None:
        raise invalid("tree is given, must be None: its gradients are those of a bias of bool")
    for name in ("return_lse", "o_dtype", "tree", "tree_lengths"):
        given.pop(name, None)
    return attend_kernels.attention_backward(d_o, q, k, v, o, lse, d_lse=d_lse, wanted=wanted,
                                             **given)
