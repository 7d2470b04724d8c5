# SPDX-License-Identifier: Apache-2.0
"""transformers models with a server: attention, and a cache whose K and V stay on the server."""

import copy
import gc
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import attend  # noqa: E402
import attend.transformers  # noqa: E402
from byte_counter import ByteCounter  # noqa: E402
from hf_models import FAMILIES, batch, loss_of, within_rounding  # noqa: E402
from transformers import DynamicCache  # noqa: E402

DECODERS = [name for name, family in FAMILIES.items() if family.causal]
SessionCache = attend.transformers.SessionCache
PADDINGS = [None, "left"]


@pytest.fixture(autouse=True)
def connected(client):
    with attend.connect(client):
        yield
    assert not client.sessions()


def generate(model, padding, cache=None, **options):
    ids, mask = batch(padding)
    options = dict(dict(max_new_tokens=24, do_sample=False, pad_token_id=0), **options)
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, cache=cache, **options)


def forward(model, ids, mask, cache=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, cache=cache, use_cache=cache is not None).logits


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_in_process(name, padding):
    """Bit for bit. test_transformers_models.py judges their accuracy."""
    inputs, family = batch(padding), FAMILIES[name]
    assert torch.equal(forward(family.make("attend-server"), *inputs),
                       forward(family.make("attend"), *inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_those_in_process(name):
    found = []
    for implementation in ("attend-server", "attend"):
        model = FAMILIES[name].make(implementation)
        loss_of(model, *batch("left")).backward()
        found.append([x.grad for x in model.parameters() if x.grad is not None])
    assert len(found[0]) == len(found[1]) > 10 and all(map(torch.equal, *found))


def test_gradients_with_dropout_equal_those_in_process():
    found = []
    for implementation in ("attend-server", "attend"):
        model = FAMILIES["llama"].make(implementation, attention_dropout=0.3).train()
        torch.manual_seed(5)
        loss_of(model, *batch("left")).backward()
        found.append([x.grad for x in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens(name, padding, client):
    model, lengths = FAMILIES[name].make("attend-server"), [44, 44, 44]
    with SessionCache(model.config) as cache:
        tokens = generate(model, padding, cache)
        if padding:
            lengths = [37, 42, 44]
        assert [session.length() for session in cache.sessions] == lengths
        assert cache.get_seq_length() == 44 and len(client.sessions()) == 3
    assert torch.equal(tokens, generate(FAMILIES[name].make("eager"), padding))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_each_step(name, padding):
    """A prompt in two parts, then token by token, compared with the eager model on the whole."""
    ids, mask = batch(padding)
    family = FAMILIES[name]
    model, steps = family.make("attend-server"), [0, 9, 16, *range(17, 22)]
    with SessionCache(model.config) as cache:
        ours = [forward(model, ids[:, a:b], mask[:, :b], cache) for a, b in zip(steps, steps[1:])]
    exact, eagers = (forward(family.make(implementation).to(dtype), ids, mask)
                     for implementation, dtype in (("plain", torch.float64),
                                                   ("eager", torch.float32)))
    real = mask.bool()
    within_rounding(torch.cat(ours, 1)[real], eagers[real], exact[real], torch.float32, name)


@pytest.mark.parametrize("name", DECODERS)
def test_beam_search(name):
    model = FAMILIES[name].make("attend-server")
    with SessionCache(model.config) as cache:
        tokens = generate(model, "left", cache, num_beams=3, max_new_tokens=8)
    assert torch.equal(tokens, generate(FAMILIES[name].make("eager"), "left", num_beams=3,
                                        max_new_tokens=8))


def test_sampling_several_answers():
    tokens = []
    for implementation in ("attend-server", "eager"):
        model = FAMILIES["llama"].make(implementation)
        with SessionCache(model.config) as sessions:
            torch.manual_seed(2)
            tokens.append(generate(model, "left", num_return_sequences=2, do_sample=True,
                                   cache=sessions if "-" in implementation else DynamicCache()))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_deep_copy_is_a_fork(name, padding, client):
    """A prompt is computed once and continued in two ways, each as by the eager model."""
    ids, mask = batch(padding)
    model, eager = FAMILIES[name].make("attend-server"), FAMILIES[name].make("eager")
    with SessionCache(model.config) as prompt:
        forward(model, ids[:, :9], mask[:, :9], prompt)
        for seed in range(2):
            more = torch.randint(3, 97, (len(ids), 5),
                                 generator=torch.Generator().manual_seed(seed))
            whole = torch.cat([ids[:, :9], more], 1)
            there = torch.cat([mask[:, :9], torch.ones_like(more)], 1)
            with copy.deepcopy(prompt) as cache:
                assert cache.client is prompt.client and cache.get_seq_length() == 9
                assert len(client.sessions()) == 2 * len(ids)
                ours = forward(model, more, there, cache)
                assert cache.get_seq_length() == 14 and prompt.get_seq_length() == 9
            torch.testing.assert_close(ours, forward(eager, whole, there)[:, 9:])
        assert len(client.sessions()) == len(ids), "closing a copy frees only its sessions"


def test_deep_copies_of_an_empty_cache_and_within_containers(client):
    model = FAMILIES["llama"].make("attend-server")
    ids, mask = batch(None)
    with SessionCache(model.config) as empty:
        held = copy.deepcopy({"cache": empty, "again": empty})
        assert held["cache"] is held["again"] is not empty
        with held["cache"] as cache:
            assert all(layer.cache is cache for layer in cache.layers)
            assert torch.equal(forward(model, ids, mask, cache), forward(model, ids, mask))
            assert empty.get_seq_length() == 0 and repr(cache).endswith(f"tokens: {len(ids[0])}>")


def test_pickling_and_shallow_copies_are_refused(client):
    model = FAMILIES["llama"].make("attend-server")
    with SessionCache(model.config) as cache:
        forward(model, *batch(None), cache)
        for use in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="copy.deepcopy makes one whose sessions are forks"):
                use(cache)


def test_a_deep_copy_of_layers_of_different_lengths_is_refused(client):
    """A forward pass that fails half-way leaves such layers. Sessions forked so far are freed."""
    model = FAMILIES["llama"].make("attend-server")
    with SessionCache(model.config) as cache:
        forward(model, *batch(None), cache)
        config = model.config
        row = torch.ones(1, config.num_key_value_heads, 1,
                         config.hidden_size // config.num_attention_heads)
        cache.sessions[1].append(row, row, layer=0)
        with pytest.raises(attend.Error, match="FAILED_PRECONDITION: .*layers have"):
            copy.deepcopy(cache)
        gc.collect()
        assert len(client.sessions()) == len(cache.sessions)


@pytest.mark.parametrize("padding", PADDINGS)
def test_crop_reset_and_selection_of_sequences(padding):
    """Compares the logits after each operation with those of transformers' own cache."""
    ids, mask = batch(padding)
    more = torch.randint(3, 97, (3, 4), generator=torch.Generator().manual_seed(8))
    whole = torch.cat([mask, torch.ones_like(more)], 1)
    models = [FAMILIES["mistral"].make(name) for name in ("attend-server", "attend")]
    with SessionCache(models[0].config) as sessions:
        caches = [sessions, DynamicCache()]  # without the config, all layers keep all keys
        results = []
        for model, cache in zip(models, caches):
            forward(model, ids, mask, cache)
            cache.crop(-17)  # into the padding
            cache.crop(0)
            found = [forward(model, ids[:, 4:], mask, cache)]
            cache.reorder_cache(torch.tensor([2, 0, 2]))
            found.append(forward(model, more, whole[[2, 0, 2]], cache))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([1, 4, 2]))
            whole_mask = torch.cat([whole[[2, 2, 0]], torch.ones_like(more)], 1)
            found.append(forward(model, more, whole_mask, cache))
            cache.reset()
            found.append(forward(model, ids, mask, cache))
            results.append([x[:, -4:] for x in found])
        for ours, wanted in zip(*results):
            largest = wanted.abs().max()
            assert (ours - wanted).abs().max() <= 64 * torch.finfo(torch.float32).eps * largest


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_token(name, dtype, server, capsys):
    """The bytes of a step do not depend on the length of the context: q, k and v of the new token,
    O, and a few fields. Counted by the server, as messages, and on the wire."""
    def now():
        return [server.metric("attend_transport_bytes_total", transport="inline",
                              direction=direction) for direction in ("in", "out")] + [
                                  counter.sent, counter.received]

    model, steps, found, before = FAMILIES[name].make("attend-server", dtype), 8, {}, None
    with ByteCounter(server.address) as counter, attend.Client(counter.address) as client:
        for context in (16, 256):
            ids, mask = batch(length=context, sequences=1)
            with SessionCache(model.config, client) as cache:
                forward(model, ids, mask, cache)
                for step in range(2 * steps):  # the first half includes opening connections
                    before = now() if step == steps else before
                    mask = torch.cat([mask, mask[:, :1]], 1)
                    forward(model, ids[:, :1], mask, cache)
                found[context] = [(b - a) / steps for a, b in zip(before, now())]
    config = model.config
    layers, row = config.num_hidden_layers, 16 * dtype.itemsize
    rows = [config.num_attention_heads + 2 * config.num_key_value_heads, config.num_attention_heads]
    tensors = [layers * row * each for each in rows]
    with capsys.disabled():
        for context, (*messages, up, down) in found.items():
            print(f"\n{name} {dtype}, {context} tokens before: a token has {tensors[0]} bytes of "
                  f"q, k and v and {tensors[1]} of O; in messages of {messages[0]:.0f} and "
                  f"{messages[1]:.0f}; on the wire {up:.0f} and {down:.0f}", end="")
    for messages in found.values():
        for whole, own in zip(messages, tensors):
            assert own <= whole <= own + 256 * layers
    off = [abs(far - near) for near, far in zip(*found.values())]
    assert max(off[:2]) <= 8 * layers  # a length has more digits
    assert max(off[2:]) <= 64 * layers  # HTTP/2 sends window updates now and then


@pytest.mark.parametrize("implementation", ["attend", "eager", "sdpa"])
def test_other_implementations_refuse_the_cache(implementation):
    model = FAMILIES["llama"].make(implementation)
    with SessionCache(model.config) as cache, pytest.raises(
            Exception, match="K and V are on the server: use attn_implementation='attend-server'"):
        forward(model, *batch(), cache)


def refused(words, *inputs, model=None, kind=ValueError, **options):
    model = model or FAMILIES["llama"].make("attend-server")
    with SessionCache(model.config) as cache, pytest.raises(kind, match=words):
        model(*inputs, cache=cache, use_cache=True, **options)


def test_a_first_call_that_a_cache_does_not_support_is_refused():
    ids, mask = batch("right")
    with torch.no_grad():
        refused("not padded on the left", ids, mask)
        refused("takes causal masks and windows alone", ids, mask[:, None, None, :].bool())
        refused("neither position_bias nor cu_seq_lens", ids,
                cu_seq_lens_q=torch.tensor([0, 63]), cu_seq_lens_k=torch.tensor([0, 63]))
        refused("dropout is 0.5, must be 0 with a SessionCache", ids, model=FAMILIES["llama"].make(
            "attend-server", attention_dropout=0.5).train())
    refused("a SessionCache has no gradients: call the model under", ids)


def test_a_later_call_that_does_not_match_the_cache_is_refused():
    ids, mask = batch("left")
    model = FAMILIES["llama"].make("attend-server")
    with SessionCache(model.config) as cache:
        forward(model, ids, mask, cache)
        mask = torch.cat([mask, mask[:, -1:]], 1)
        with pytest.raises(ValueError, match="the batch has 2 sequences, the cache has 3"):
            forward(model, ids[:2, :1], mask[:2], cache)
        with pytest.raises(ValueError, match=r"has \[0, 2, 7\] rows of padding, had \[7, 2, 0\]"):
            forward(model, ids[:, :1], mask.flip(0), cache)
        with pytest.raises(ValueError, match="tokens_to_remove is 3, must be at most 0"):
            cache.crop(3)
        # Refused calls have changed nothing.
        assert cache.get_seq_length() == 21
        assert forward(model, ids[:, :1], mask, cache).isfinite().all()


def test_unsupported_types_of_layers_are_refused():
    config = FAMILIES["llama"].make("attend-server").config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="layers of linear_attention, must have only"):
        SessionCache(config)


def test_a_freed_session_is_an_error(client):
    ids, mask = batch()
    model = FAMILIES["llama"].make("attend-server")
    with SessionCache(model.config, lease=3600) as cache:
        forward(model, ids, mask, cache)
        client.open_session(cache.sessions[1].id).free()
        with pytest.raises(attend.Error, match="NOT_FOUND"):
            forward(model, ids[:, :1], torch.ones(3, 22), cache)


def test_without_a_connection():
    with attend.connect(None):
        with pytest.raises(attend.Error, match="attend.connect"):
            forward(FAMILIES["llama"].make("attend-server"), *batch())
        with pytest.raises(attend.Error, match="attend.connect"):
            SessionCache(FAMILIES["llama"].make("attend-server").config)
