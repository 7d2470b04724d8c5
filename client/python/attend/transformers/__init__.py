# SPDX-License-Identifier: Apache-2.0
"""attend's attention for models of Hugging Face's transformers. Importing this registers two
attention implementations, "attend" in process and "attend-server" on the connected server:

    import attend.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attend")
"""

import functools

import transformers

from ._attention import attention
from ._cache import SessionCache
from ._masks import attend_mask

__all__ = ["SessionCache"]

for _name in ("attend", "attend-server"):
    transformers.AttentionInterface.register(
        _name, functools.partial(attention, _name == "attend-server"))
    transformers.AttentionMaskInterface.register(_name, attend_mask)
