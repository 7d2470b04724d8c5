# SPDX-License-Identifier: Apache-2.0
"""Exact attention on CUDA GPUs, in process: attend's kernels through their C interface.

    import attend_kernels
    o = attend_kernels.attention(q, k, v, causal=True)

q, k and v are NumPy arrays (copied to GPU 0 and back), torch CUDA tensors or anything else with
data_ptr() (used in place), or DLPack tensors such as CuPy's and JAX's. Nothing but the
standard library is needed for the last two. The library libattend_kernels.so is looked for in
$ATTEND_KERNELS_LIBRARY, beside this module, and in the lib and build folders around it.
"""

from ._attention import attention, attention_batch, release_workspaces, select
from ._dlpack import DeviceArray
from ._library import Error, device_count

__all__ = ["DeviceArray", "Error", "attention", "attention_batch", "device_count",
           "release_workspaces", "select"]
