# SPDX-License-Identifier: Apache-2.0
"""transformers models with attend's attention in process, compared with their own eager attention:
logits, gradients, generated tokens. hf_models.py has the bounds."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import attend.transformers  # noqa: E402, F401
from hf_models import FAMILIES, batch, loss_of, within_rounding  # noqa: E402
from transformers import StaticCache  # noqa: E402

DECODERS = [name for name, family in FAMILIES.items() if family.causal]
PADDINGS = [None, "left", "right"]


def logits(model, ids, mask):
    """Logits of the tokens that are not padding."""
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[mask.bool()]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name, dtype, padding):
    family, inputs = FAMILIES[name], batch(padding)
    exact, eagers, ours = (
        logits(family.make(implementation, dtype).to(kind), *inputs)
        for implementation, kind in (("plain", torch.float64), ("eager", dtype), ("attend", dtype)))
    within_rounding(ours, eagers, exact, dtype, name)


@pytest.mark.parametrize("name,other", [
    ("mistral", dict(sliding_window=None)), ("gemma2", dict(attn_logit_softcapping=None)),
    ("gemma2", dict(sliding_window=512)), ("gpt_oss", dict(sliding_window=512)),
    ("gpt_oss", dict(sinks=False))])
def test_the_bounds_detect_a_missing_feature(name, other):
    """Without the feature for which a family is tested, its logits are far outside the bound."""
    family, inputs = FAMILIES[name], batch()
    exact, eagers = (logits(family.make(implementation).to(dtype), *inputs)
                     for implementation, dtype in (("plain", torch.float64),
                                                   ("eager", torch.float32)))
    without = logits(family.make("attend", **other), *inputs)
    assert (without - exact).abs().max() > 1000 * (eagers - exact).abs().max()


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_all_weights(name, padding):
    family, inputs, found = FAMILIES[name], batch(padding), []
    for implementation, dtype in (("attend", torch.float32), ("eager", torch.float32),
                                  ("plain", torch.float64)):
        model = family.make(implementation).to(dtype)
        loss_of(model, *inputs).backward()
        found.append({key: x.grad for key, x in model.named_parameters() if x.grad is not None})
    assert found[0].keys() == found[2].keys()
    # Some gradients are sums that are 0 in exact arithmetic, such as that of the keys' bias.
    largest = max(x.abs().max().item() for x in found[2].values())
    for key in found[0]:
        within_rounding(*(grads[key] for grads in found), torch.float32, f"{name}: {key}", largest)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e9, -1e4])
def test_gradients_with_rows_masked_by_a_finite_number(value):
    """All keys of padding rows are masked, and these rows are part of the loss. float32 has at most
    three digits of their scores, so the reference is eager attention instead of a model in
    double precision."""
    ids, keep = batch("left")
    seen = torch.ones(21, 21, dtype=torch.bool).tril() & keep.bool()[:, None, None, :]
    mask = torch.zeros(seen.shape).masked_fill(~seen, value)
    assert not seen.any(-1).all()
    found = []
    for implementation in ("attend", "eager"):
        model = FAMILIES["llama"].make(implementation)
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        found.append([x.grad for x in model.parameters()])
    for ours, eagers in zip(*found, strict=True):
        assert (ours - eagers).abs().max() <= 1e-2 * eagers.abs().max()


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens(name, padding):
    ids, mask = batch(padding)
    options = dict(attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
    eagers, ours = (FAMILIES[name].make(implementation).generate(ids, **options)
                    for implementation in ("eager", "attend"))
    assert torch.equal(ours, eagers) and ours.shape == (3, 45)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens_with_a_static_cache(name, padding):
    ids, mask = batch(padding)
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    family, tokens = FAMILIES[name], []
    for implementation in ("eager", "attend"):
        model = family.make(implementation)
        cache = StaticCache(config=model.config, max_cache_len=40)
        tokens.append(model.generate(ids, past_key_values=cache, **options))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", DECODERS)
def test_beam_search(name):
    ids, mask = batch("left")
    options = dict(attention_mask=mask, max_new_tokens=8, num_beams=3, do_sample=False,
                   pad_token_id=0)
    assert torch.equal(*(FAMILIES[name].make(implementation).generate(ids, **options)
                         for implementation in ("eager", "attend")))


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_in_two_parts(name):
    """The second part's queries see the first part's keys in the cache."""
    ids, mask = batch("left")
    model, whole = FAMILIES[name].make("attend"), FAMILIES[name].make("plain").double()
    exact, eagers = logits(whole, ids, mask), logits(FAMILIES[name].make("eager"), ids, mask)
    with torch.no_grad():
        first = model(ids[:, :12], attention_mask=mask[:, :12], use_cache=True)
        second = model(ids[:, 12:], attention_mask=mask, past_key_values=first.past_key_values)
    ours = torch.cat([first.logits, second.logits], 1)[mask.bool()]
    within_rounding(ours, eagers, exact, torch.float32, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_in_training(dtype):
    """Dropout applies in training only, and the seed determines the mask."""
    family = FAMILIES["llama"]
    model, (ids, mask) = family.make("attend", dtype, attention_dropout=0.5), batch("left")
    still = logits(model, ids, mask)
    assert torch.equal(still, logits(family.make("attend", dtype), ids, mask))
    model.train()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(logits(model, ids, mask))
    assert torch.equal(*runs[:2]) and not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], still)
    torch.manual_seed(1)
    loss_of(model, ids, mask).backward()
    assert all(x.grad.isfinite().all() for x in model.parameters())


def test_autocast():
    ids, mask = batch("left")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eagers, ours = (logits(FAMILIES["llama"].make(implementation), ids, mask)
                        for implementation in ("eager", "attend"))
    exact = logits(FAMILIES["llama"].make("plain").double(), ids, mask)
    within_rounding(ours, eagers, exact, torch.bfloat16, "autocast")


def test_gradient_checkpointing():
    inputs, found = batch("left"), []
    for checkpoints in (False, True):
        model = FAMILIES["gemma2"].make("attend").train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        loss_of(model, *inputs).backward()
        found.append([x.grad for x in model.parameters()])
    assert all(map(torch.equal, *found))


def test_torch_compile():
    ids, mask = batch("left")
    model = FAMILIES["gemma2"].make("attend")
    wanted = logits(model, ids, mask)
    got = logits(torch.compile(model, backend="aot_eager"), ids, mask)
    assert (got - wanted).abs().max() <= 16 * torch.finfo(torch.float32).eps * wanted.abs().max()
