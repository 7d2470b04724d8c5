# SPDX-License-Identifier: Apache-2.0
"""A transformers cache whose K and V are sessions on a server."""

import copy

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .. import _connection
from .._session import LayerShape
from ._masks import Mask
from ._placeholder import Placeholder

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class ServedRows(Placeholder):
    """New rows of K or V, [B, Hkv, n, D], that stand for the whole K or V, whose other rows are on
    the server: it has the whole's shape, dtype and device."""

    refusal = "K and V are on the server: use attn_implementation='attend-server'"

    def __init__(self, layer, rows):
        self.layer, self.rows = layer, rows
        self.dtype, self.device = rows.dtype, rows.device
        batch, heads, count, dim = rows.shape
        self.shape = torch.Size((batch, heads, layer.length + count, dim))


class _Layer(CacheLayerMixin):
    """One layer of the cache, which gives transformers the length and takes new rows."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache, number):
        super().__init__()
        self.cache, self.number, self.length = cache, number, 0

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *_, **__):
        return ServedRows(self, key_states), ServedRows(self, value_states)

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_seq_length(self):
        return self.length

    def get_max_length(self):
        return -1


class SessionCache(Cache):
    """For a model with attn_implementation="attend-server": K and V of each sequence stay on the
    server, so generate() sends only the rows of new tokens, however long the context is.

        cache = attend.transformers.SessionCache(model.config)
        model.generate(ids, cache=cache, max_new_tokens=100)

    config: the model's. client: an attend.Client; None: the one connected now. lease: seconds from
        the last use to the end of the sessions, 0: the server's default. pinned: their tokens are
        not evicted for other sessions. device: as in Client.session.

    Batches may be padded on the left only; rows of padding are not sent. crop, reset and the
    operations of beam search are supported; gradients and dropout are not. If a call fails in the
    middle of a pass, the layers differ in length: crop() the tokens of the pass, or reset().
    Sessions end with reset(), with the cache, or with their lease. A context manager that resets.
    copy.deepcopy makes another cache with the same tokens, whose sessions are forks.
    """

    def __init__(self, config, client=None, *, lease=0.0, pinned=False, device=""):
        config = config.get_text_config(decoder=True)
        other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if other:
            raise ValueError(f"the model has layers of {sorted(other)[0]}, must have only "
                             f"{' and '.join(sorted(_LAYER_TYPES))}")
        self.client = _connection.required() if client is None else client
        self._options = dict(lease=lease, pinned=pinned, device=device)
        self.sessions = []  # one per sequence
        self._padding = None  # rows of padding at each sequence's start
        super().__init__(layers=[_Layer(self, number)
                                 for number in range(config.num_hidden_layers)])

    def __repr__(self):
        return (f"<attend.transformers.SessionCache of {self.client}, sequences: "
                f"{len(self.sessions)}, layers: {len(self.layers)}, "
                f"tokens: {self.get_seq_length()}>")

    def __deepcopy__(self, memo):
        """Another cache with the same tokens, whose sessions are forks of this one's."""
        made = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.client)] = self.client
        memo[id(self.sessions)] = []  # own list: if a fork fails, the earlier ones are freed
        vars(made).update(copy.deepcopy(vars(self), memo))
        made.sessions += [session.fork() for session in self.sessions]
        return made

    def __reduce_ex__(self, protocol):
        raise TypeError("a SessionCache is neither pickled nor copied by copy.copy, as its K and V "
                        "are on the server: copy.deepcopy makes one whose sessions are forks")

    def attend(self, layer, query, key, value, mask, options):
        """Appends the rows of K and V, and returns O, [B, Lq, Hq, Dv]. query: [B, Hq, Lq, D]."""
        self._check(layer, (query, key, value), mask, options)
        padding = self._padding_of(mask, len(query))
        if not self.sessions:
            self._open(key, value)
        q, k, v = (x.detach().transpose(1, 2) for x in (query, key, value))
        options = dict(options, layout="BLHD", window=(mask.left, 0), layer=layer.number)
        count, hidden = q.shape[1], [max(0, rows - layer.length) for rows in padding]
        if any(hidden):
            o = self._attend_each(q, k, v, [min(count, rows) for rows in hidden], options)
        else:
            o = self.client.attend_sessions(self.sessions, q, k, v, **options)
        layer.length += count
        self._padding = padding
        return o

    def _attend_each(self, q, k, v, hidden, options):
        """For sequences that begin with `hidden` rows of padding: one call per sequence."""
        calls = [session.submit(*(x[n:n + 1, rows:] for x in (q, k, v)), **options)
                 for n, (session, rows) in enumerate(zip(self.sessions, hidden))]
        answers = [call.result().o for call in calls]
        o = answers[0].new_zeros(*q.shape[:-1], v.shape[-1])
        for n, (answer, rows) in enumerate(zip(answers, hidden)):
            o[n, rows:] = answer[0]
        return o

    def _check(self, layer, tensors, mask, options):
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise ValueError("a SessionCache has no gradients: call the model under "
                             "torch.no_grad(), or without the cache")
        if options["dropout_p"]:
            raise ValueError(f"dropout is {options['dropout_p']}, must be 0 with a SessionCache: "
                             f"call model.eval()")
        if not isinstance(mask, Mask) or mask.is_dense or mask.right != 0 or \
                mask.sequences is not None or mask.offset != layer.length:
            raise ValueError("a SessionCache takes causal masks and windows alone, made by the "
                             "model from a mask of padding")
        if self.sessions and len(tensors[0]) != len(self.sessions):
            raise ValueError(f"the batch has {len(tensors[0])} sequences, the cache has "
                             f"{len(self.sessions)}")

    def _padding_of(self, mask, batch):
        padding = [0] * batch if mask.keys is None else mask.left_padding
        if padding is None:
            raise ValueError("sequences are not padded on the left, as a SessionCache needs them: "
                             "tokenizer.padding_side='left'")
        if self._padding is not None and padding != self._padding:
            raise ValueError(f"the mask has {padding} rows of padding, had {self._padding} before")
        return padding

    def _open(self, key, value):
        shape = LayerShape(str(key.dtype).rpartition(".")[2], key.shape[1], key.shape[3],
                           value.shape[3])
        self.sessions = [self.client.session_of([shape], layers=len(self.layers), **self._options)
                         for _ in range(len(key))]

    def crop(self, tokens_to_remove):
        """Removes the last -tokens_to_remove tokens, as transformers' caches do."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}, must be at most 0")
        length = max(0, self.get_seq_length() + tokens_to_remove)
        if tokens_to_remove == 0 or not self.sessions:
            return
        for session, padding in zip(self.sessions, self._padding):
            session.truncate(max(0, length - padding))
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def reset(self):
        """Frees the sessions; the cache is then empty."""
        sessions, self.sessions, self._padding = self.sessions, [], None
        for layer in self.layers:
            layer.length = 0
        for session in sessions:
            session.free()

    def _select(self, sequences):
        """Keeps these sequences, in this order; repeated ones are forked."""
        if not self.sessions:
            return
        kept = {}
        selected = [self.sessions[n].fork() if n in kept else kept.setdefault(n, self.sessions[n])
                    for n in sequences]
        dropped = [each for n, each in enumerate(self.sessions) if n not in kept]
        self.sessions, self._padding = selected, [self._padding[n] for n in sequences]
        for session in dropped:
            session.free()

    def reorder_cache(self, beam_idx):
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats):
        self._select([n for n in range(len(self.sessions)) for _ in range(repeats)])

    def batch_select_indices(self, indices):
        self._select(torch.arange(len(self.sessions))[indices.cpu()].tolist())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.reset()
