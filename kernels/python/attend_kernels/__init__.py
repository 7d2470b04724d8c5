# SPDX-License-Identifier: Apache-2.0
"""Exact attention on CUDA GPUs and on the CPU, in process: attend's kernels through their C
interface.

    import attend_kernels
    o, lse = attend_kernels.attention(q, k, v, causal=True, return_lse=True)
    d_q, d_k, d_v = attend_kernels.attention_backward(d_o, q, k, v, o, lse, causal=True)

q, k and v are torch tensors (or anything else with data_ptr()) or DLPack tensors such as CuPy's and
JAX's, which are computed in place; or NumPy arrays, which are copied to GPU 0 and back, or computed
in place on the CPU if there is no GPU or device="cpu". The first two need only the standard
library. The library libattend_kernels.so is searched for in $ATTEND_KERNELS_LIBRARY, beside this
module, and in the lib and build folders around it.
"""

from ._attention import attention, attention_batch, release_workspaces, select
from ._dlpack import DeviceArray
from ._gradients import attention_backward, select_backward
from ._library import Error, device_count
from ._tree import tree_from_parents

__version__ = "0.1.0"
__all__ = ["DeviceArray", "Error", "__version__", "attention", "attention_backward",
           "attention_batch", "device_count", "release_workspaces", "select", "select_backward",
           "tree_from_parents"]
