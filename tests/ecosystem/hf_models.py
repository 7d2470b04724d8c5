# SPDX-License-Identifier: Apache-2.0
"""Small transformers models with random weights, and how their answers are judged.

No bound for a whole model follows from its dtype alone, so the bound is measured: the same model
runs in double precision with attention in plain PyTorch ("plain" below), and the error of its own
eager attention in the dtype under test shows what rounding does to this model. attend's error may
be twice as large, as everywhere in this project, plus the rounding of the largest logit. NaN never
passes."""

import dataclasses

import torch
import transformers
from torch.nn import functional
from transformers import masking_utils

COMMON = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
              num_attention_heads=4, initializer_range=0.2, max_position_embeddings=512)
GROUPED = dict(COMMON, num_key_value_heads=2)


@dataclasses.dataclass(frozen=True)
class Family:
    config: type
    model: type
    options: dict
    causal: bool = True

    def make(self, implementation, dtype=torch.float32, sinks=True, **options):
        """A model with the same weights for every implementation. Without `sinks`, their logits
        are -1e4."""
        torch.manual_seed(11)
        model = self.model(self.config(**{**self.options, **options},
                                       attn_implementation=implementation))
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, mean=0.0 if sinks else -1e4)
        return model.to(dtype).eval()


FAMILIES = {
    "llama": Family(transformers.LlamaConfig, transformers.LlamaForCausalLM, GROUPED),
    "mistral": Family(transformers.MistralConfig, transformers.MistralForCausalLM,
                      dict(GROUPED, sliding_window=5)),
    "gemma2": Family(transformers.Gemma2Config, transformers.Gemma2ForCausalLM,
                     dict(GROUPED, head_dim=16, sliding_window=6, query_pre_attn_scalar=16,
                          attn_logit_softcapping=2.0)),
    "gpt_oss": Family(transformers.GptOssConfig, transformers.GptOssForCausalLM,
                      dict(GROUPED, head_dim=16, sliding_window=6, num_local_experts=4,
                           num_experts_per_tok=2, experts_implementation="eager")),
    "bert": Family(transformers.BertConfig, transformers.BertForMaskedLM, COMMON,
                   causal=False),
}


def plain(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None,
          dropout=0.0, **_):
    """Attention with all scores in memory, in the tensors' dtype. Rows that see no key are 0."""
    assert dropout == 0
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    elif attention_mask is not None:
        scores = scores + attention_mask.to(scores.dtype)
    sinks = scores.new_full((1, 1, 1, 1), torch.finfo(scores.dtype).min) if s_aux is None else \
        s_aux.to(scores.dtype).reshape(1, -1, 1, 1)
    scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :-1]
    weights = weights * (scores[..., :-1] > float("-inf")).any(-1, keepdim=True)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _whole_mask(**arguments):
    arguments.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return masking_utils.sdpa_mask(**arguments)


transformers.AttentionInterface.register("plain", plain)
transformers.AttentionMaskInterface.register("plain", _whole_mask)


def batch(padding=None, length=21, sequences=3, seed=3):
    """Token ids and a mask, [sequences, length]; the first two sequences are padded."""
    ids = torch.randint(3, 97, (sequences, length),
                        generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, cut in ((0, length // 3), (1, 2)) if padding else ():
        mask[row, slice(0, cut) if padding == "left" else slice(length - cut, None)] = 0
    return ids, mask


def within_rounding(ours, eagers, exact, dtype, what, largest=None):
    """Asserts that the error of `ours` is at most twice that of the eager attention, plus rounding.
    `largest`: the largest summand, if it exceeds the results."""
    ours, eagers, exact = (x.detach().double() for x in (ours, eagers, exact))
    largest = exact.abs().max().item() if largest is None else largest
    bound = 2 * (eagers - exact).abs().max().item() + torch.finfo(dtype).eps * largest
    off = (ours - exact).abs().max().item()
    assert off <= bound, f"{what}: {off:.2e} off, may be {bound:.2e} where {largest:.1f} is largest"
    return off, bound


def loss_of(model, ids, mask):
    """The cross entropy over all tokens that are not padding."""
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    wanted = ids.masked_fill(mask == 0, -100)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), wanted[:, 1:].flatten())
