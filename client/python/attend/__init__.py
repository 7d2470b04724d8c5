# SPDX-License-Identifier: Apache-2.0
"""Exact attention: on an attend server (`attend.Client`, for asyncio `attend.aio.Client`), in
process (`attend.attention`), or either way with autograd (`attend.torch`, `attend.transformers`).

    import attend
    client = attend.Client("127.0.0.1:8001")
    o = client.attention(q, k, v, causal=True)

    o = attend.attention(q, k, v, causal=True)       # in this process
    with attend.connect("127.0.0.1:8001"):
        o = attend.attention(q, k, v, causal=True)   # on the server

When a client is made, libattend_client.so is searched for in $ATTEND_CLIENT_LIBRARY, beside this
module, and in the lib and build folders around it.
"""

import pkgutil

from attend_kernels import Error, __version__, tree_from_parents

from . import aio
from ._attention import attention, backward
from ._call import Answer, Call, Check, Timings
from ._client import Client
from ._connection import connect, connected
from ._merge import merge_partial, merge_partial_gradients
from ._session import LayerShape, Session
from ._stream import Stream

# gRPC's stubs, generated from proto/attend/v1, are the package attend.v1: both can be imported.
__path__ = pkgutil.extend_path(__path__, __name__)
__all__ = ["Answer", "Call", "Check", "Client", "Error", "LayerShape", "Session", "Stream",
           "Timings", "__version__", "aio", "attention", "backward", "connect", "connected",
           "merge_partial", "merge_partial_gradients", "tree_from_parents"]
