# SPDX-License-Identifier: Apache-2.0
"""The masks of transformers as attend represents them: each is equal to transformers' own matrix,
and a matrix is used only if nothing shorter describes the mask."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import attend.transformers  # noqa: E402, F401
from hf_models import FAMILIES, batch, plain, within_rounding  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402

OURS = AttentionInterface()["attend"]
MAKE = AttentionMaskInterface()["attend"]
PADDINGS = {"left": [0, 3, 17], "right": [0, 3, 17], "all": [0, 20, 5], "between": [4, 2, 9],
            "holes": [5, 7, 11]}
FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "both_sides": masking_utils.sliding_window_bidirectional_mask_function(4),
    "chunks": masking_utils.chunked_causal_mask_function(6, torch.zeros(3, dtype=torch.int)),
    "or": masking_utils.or_masks(masking_utils.causal_mask_function,
                                 lambda b, h, q, k: (q < 5) & (k < 9)),
}


class Layer:
    is_causal = True
    training = False


def padded(kind, length):
    """A padding mask, [3, length] of bool."""
    keep, places = torch.ones(3, length, dtype=torch.bool), torch.arange(length)
    for row, cut in enumerate(PADDINGS[kind]):
        if kind in ("right", "all"):
            keep[row, length - cut:] = False
        elif kind == "holes":
            keep[row] = places % cut != 0
        else:
            keep[row, :cut] = False
            if kind == "between":
                keep[row, length - cut:] = False
    return keep


def tensors(q_length, kv_length):
    generator = torch.Generator().manual_seed(q_length)
    return [torch.randn(3, heads, rows, 16, generator=generator)
            for heads, rows in ((4, q_length), (2, kv_length), (2, kv_length))]


def check(mask, dense, q, k, v, **options):
    got, weights = OURS(Layer, q, k, v, mask, **options)
    bias = options.pop("position_bias", None)
    wide = [x.double() for x in (q, k, v)]
    if bias is not None:
        dense = torch.where(dense, bias, float("-inf"))
    exact, _ = plain(Layer, *wide, dense, **options)
    own, _ = plain(Layer, q, k, v, dense, **options)
    assert weights is None and got.is_contiguous() and got.shape == own.shape
    within_rounding(got, own, exact, torch.float32, "o")


STEPS = [(20, 0), (1, 19), (7, 13)]
STATIC = ("causal", "window", "chunks")  # masks of decoders


@pytest.mark.parametrize("padding", [None, *PADDINGS])
@pytest.mark.parametrize("name,q_length,past,unfilled", [
    *((name, *step, 0) for name in FUNCTIONS for step in STEPS),
    *((name, *step, 9) for name in STATIC for step in STEPS)])
def test_masks(name, q_length, past, unfilled, padding):
    """`past` keys are in the cache; a static cache has `unfilled` further rows."""
    length = past + q_length
    arguments = dict(batch_size=3, q_length=q_length, kv_length=length + unfilled, q_offset=past,
                     mask_function=FUNCTIONS[name],
                     attention_mask=None if padding is None else padded(padding, length))
    mask = MAKE(**arguments)
    dense = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    q, k, v = tensors(q_length, length + unfilled)
    check(mask, dense, q, k, v)
    assert mask.is_dense == ("dense" in vars(mask)) == (name in ("chunks", "or"))


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_unfilled_rows_of_a_static_cache_are_not_read(padding):
    q, k, v = tensors(7, 29)
    k[:, :, 20:] = v[:, :, 20:] = float("nan")
    mask = MAKE(batch_size=3, q_length=7, kv_length=29, q_offset=torch.tensor(13),
                attention_mask=None if padding is None else padded(padding, 20))
    assert OURS(Layer, q, k, v, mask)[0].isfinite().all()


def test_representations_of_padding_masks():
    def made(padding, past=0, **options):
        keep = None if padding is None else padded(padding, 20)
        return MAKE(batch_size=3, q_length=20 - past, kv_length=20, q_offset=past,
                    attention_mask=keep, **options)

    assert made(None).is_plain and made(None, 19).is_plain
    assert made("right").lengths.tolist() == [20, 17, 3]
    assert made("left").may_be_packed and not made("left", 19).may_be_packed
    rows, ends = made("left").packed
    assert ends.tolist() == [0, 20, 37, 40] and rows.tolist() == [*range(20), *range(23, 40),
                                                                 *range(57, 60)]
    assert made("holes").lengths is None and not made("holes").may_be_packed


@pytest.mark.parametrize("padding", [None, *PADDINGS])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_biases_by_position(name, padding):
    arguments = dict(batch_size=3, q_length=20, kv_length=20, mask_function=FUNCTIONS[name],
                     attention_mask=None if padding is None else padded(padding, 20))
    bias = torch.randn(1, 4, 20, 20)
    dense = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    check(MAKE(**arguments), dense, *tensors(20, 20), position_bias=bias)


@pytest.mark.parametrize("options", [dict(softcap=1.5), dict(s_aux=torch.randn(4)),
                                     dict(scaling=0.6)])
@pytest.mark.parametrize("padding", [None, *PADDINGS])
def test_other_terms_with_every_mask(options, padding):
    arguments = dict(batch_size=3, q_length=20, kv_length=20,
                     mask_function=FUNCTIONS["window"],
                     attention_mask=None if padding is None else padded(padding, 20))
    dense = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    check(MAKE(**arguments), dense, *tensors(20, 20), **options)


def test_masks_given_as_tensors():
    q, k, v = tensors(7, 13)
    keep = torch.rand(3, 1, 7, 15) < 0.7
    check(keep, keep[..., :13], q, k, v)
    numbers = torch.zeros(3, 1, 7, 15).masked_fill(~keep, torch.finfo(torch.float32).min)
    check(numbers, keep[..., :13], q, k, v)
    check(keep, keep[..., :13], q, k, v, position_bias=torch.randn(1, 4, 7, 13))


def test_layers_without_a_mask():
    q, k, v = tensors(13, 13)
    check(None, torch.ones(13, 13, dtype=torch.bool).tril(), q, k, v)
    check(None, torch.ones(13, 13, dtype=torch.bool), q, k, v, is_causal=False)
    check(None, torch.ones(13, 13, dtype=torch.bool).tril().triu(-3), q, k, v, sliding_window=4)
    check(None, torch.ones(1, 13, dtype=torch.bool), q[:, :, :1], k, v)


def packed_batch():
    """Three sequences in one row: ids [1, 40], their positions and their lengths."""
    ids, lengths = batch(length=40, sequences=1)[0], [20, 17, 3]
    return ids, torch.cat([torch.arange(length) for length in lengths])[None], lengths


@pytest.mark.parametrize("ends_too", [False, True])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.causal])
def test_packed_sequences_equal_separate_ones(name, ends_too):
    ids, positions, lengths = packed_batch()
    ends = torch.tensor([0, 20, 37, 40], dtype=torch.int32)
    options = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=20, max_length_k=20)
    family = FAMILIES[name]
    with torch.no_grad():
        ours = family.make("attend")(ids, position_ids=positions, use_cache=False,
                                     **options if ends_too else {}).logits
        eagers = family.make("eager")(ids, position_ids=positions, use_cache=False).logits
        alone = [family.make("plain").double()(part).logits for part in ids.split(lengths, dim=1)]
    within_rounding(ours, eagers, torch.cat(alone, 1), torch.float32, name)


def test_packed_gradients():
    ids, positions, _ = packed_batch()
    found = []
    for implementation, dtype in (("attend", torch.float32), ("eager", torch.float32),
                                  ("plain", torch.float64)):
        model = FAMILIES["mistral"].make(implementation).to(dtype)
        model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        found.append(torch.cat([x.grad.flatten().double() for x in model.parameters()]))
    within_rounding(*found, torch.float32, "gradients")


@pytest.mark.parametrize("options,words", [
    (dict(output_attentions=True), "output_attentions is True, but attend never has the weights"),
    (dict(block_indices=torch.zeros(1)), "its attention block_indices, which attend does not"),
    (dict(attention_mask=torch.ones(3, 13)), "attention_mask has 2 dimensions, must have 4"),
    (dict(attention_mask=MAKE(batch_size=3, q_length=13, kv_length=20, q_offset=7)),
     "the mask is for 13 queries and 20 keys, but there are 13 and 13"),
    (dict(cu_seq_lens_q=torch.tensor([0, 39])), "must both be given, and alike"),
    (dict(cu_seq_lens_q=torch.tensor([0, 20]), cu_seq_lens_k=torch.tensor([0, 20])),
     "end at 20, must end at the 39 rows of both"),
    (dict(cu_seq_lens_q=torch.tensor([0, 20, 39]), cu_seq_lens_k=torch.tensor([0, 20, 39]),
          attention_mask=MAKE(batch_size=3, q_length=13, kv_length=13,
                              attention_mask=padded("left", 13))), "disagree on where"),
])
def test_unsupported_arguments_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        OURS(Layer, *tensors(13, 13), **{"attention_mask": None, **options})


def test_causal_layers_without_a_mask_must_be_square():
    with pytest.raises(ValueError, match="has 7 queries and 13 keys, must have as many"):
        OURS(Layer, *tensors(7, 13), None)


def test_output_attentions_is_refused():
    ids, mask = batch()
    with pytest.raises(ValueError, match="output_attentions is True"):
        FAMILIES["bert"].make("attend")(ids, attention_mask=mask, output_attentions=True)
