# SPDX-License-Identifier: Apache-2.0
"""attention_backward(): converts Python arguments to attend_backward_params, and launches."""

import ctypes
import inspect

from . import _attention, _checks
from ._call import Call, dropout_seed
from ._library import DTYPES, BackwardParams, check, invalid, library
from ._plans import Plan, Plans, address
from ._staging import NoStaging, staging_for
from ._torch import allocating_on

GRADIENTS = ("q", "k", "v", "bias", "sinks")


def attention_backward(d_o, q, k, v, o, lse, *, d_lse=None, wanted=("q", "k", "v"), causal=False,
                       alignment="bottom_right", window=None, key_offset=0, keys_after=0,
                       scale=None, softcap=0.0, bias=None, alibi_slopes=None, sinks=None,
                       q_lengths=None, kv_lengths=None, page_table=None, cu_seqlens_q=None,
                       cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, layout="BHLD",
                       dropout_p=0.0, dropout_seed=None, kernel="auto", stream=None, device=None):
    """Gradients of a loss with respect to the inputs of `attention`, from those with respect to O
    and LSE.

    d_o: the loss's gradient with respect to o, in its shape and dtype. d_lse: with respect to lse,
        in its shape; None: 0.
    o, lse: the results of attention(q, k, v, ..., return_lse=True); for a part of the keys, the
        merged ones. All other arguments as in that call. For a part, key_offset or keys_after must
        be given even if nothing is masked: otherwise the keys count as the whole, and rows whose O
        or LSE is imprecise are computed again from these keys alone.
    wanted: the inputs to differentiate by: "q", "k", "v", "bias", "sinks"; not a bool bias.

    Returns a tuple in the order of `wanted`: q's, k's and v's in their dtype, C-contiguous; bias's
    and sinks' in float32, summed over the dimensions that bias broadcasts. Rows and keys without
    effect on the answer have gradient 0. Results match q, as in `attention`. Paged keys have no
    gradients. Error: an argument is invalid, or the library failed.
    """
    arguments = dict(locals())
    key = _plans.key(arguments)
    plan = _plans.find(key)
    return _run(arguments, key) if plan is None else _repeat(plan, arguments)


def select_backward(d_o, q, k, v, o, lse, **options):
    """The kernel that `attention_backward` would run, and why: (kernel, why)."""
    unknown = set(options) - set(inspect.signature(attention_backward).parameters)
    if unknown:
        raise invalid(f"select_backward has no argument {sorted(unknown)[0]}")
    given = inspect.signature(attention_backward).bind(d_o, q, k, v, o, lse, **options)
    given.apply_defaults()
    arguments = {**_DEFAULTS, **given.arguments}
    call = _BackwardCall(arguments, NoStaging(*_attention.place(arguments)))
    kernel, why = ctypes.c_char_p(), ctypes.c_char_p()
    check(library().attend_select_backward(ctypes.byref(call.backward), ctypes.byref(kernel),
                                           ctypes.byref(why)))
    return kernel.value.decode(), why.value.decode()


_DEFAULTS = {name: None for name in inspect.signature(_attention.attention).parameters}


class _BackwardCall(Call):
    """One backward pass; `backward` is its attend_backward_params."""

    def _make_outputs(self):
        self.backward = BackwardParams(struct_bytes=ctypes.sizeof(BackwardParams))
        wanted = _checks.names("wanted", self.a["wanted"])
        for name in wanted:
            if name not in GRADIENTS:
                raise invalid(f"wanted has {name!r}, must be some of {', '.join(GRADIENTS)}")
            if self.a[name] is None:
                raise invalid(f"wanted has {name!r}, which the call does not have")
            if name == "bias" and self.masks:
                raise invalid("wanted has 'bias', but it is of bool, which has no gradient")
        self._read_answer()
        self.result = tuple(self._gradient(name) for name in wanted)
        self.backward.attention = self.params

    @staticmethod
    def _check_shape(tensor, shape):
        if tuple(tensor.shape) != shape:
            raise invalid(f"{tensor.name} has shape {tuple(tensor.shape)}, must be {shape}")

    def _read_answer(self):
        p, shape = self.params, (*self.q.shape[:-1], self.params.dim_v)
        o = self.staging.read("o", self.a["o"])
        if o.dtype not in (self.q.dtype, "float32"):
            raise invalid(f"o has dtype {o.dtype}, must be q's, {self.q.dtype}, or float32")
        p.o_dtype = DTYPES[o.dtype]
        d_o = self.staging.read("d_o", self.a["d_o"])
        if d_o.dtype != o.dtype:
            raise invalid(f"d_o has dtype {d_o.dtype}, must be o's, {o.dtype}")
        for target, name, tensor in ((p, "o", o), (self.backward, "d_o", d_o)):
            self._check_form(tensor)
            self._check_place(tensor)
            self._check_shape(tensor, shape)
            setattr(target, name, self._struct(self.staging.place(tensor)))
        lse = self._row_numbers("lse")
        self._set_lse(lse)
        if self.a["d_lse"] is None:
            return
        d_lse = self._row_numbers("d_lse")
        if 0 not in lse.shape and any(
                size > 1 and one != other
                for size, one, other in zip(lse.shape, lse.strides, d_lse.strides)):
            raise invalid(f"d_lse has strides {d_lse.strides}, must be lse's, {lse.strides}")
        self.backward.d_lse = d_lse.address or None

    def _row_numbers(self, name):
        """LSE or its gradient, placed."""
        tensor = self.staging.read(name, self.a[name], ("float32",))
        self._check_place(tensor)
        self._check_last(tensor)
        self._check_shape(tensor, self._lse_shape())
        return self.staging.place(tensor)

    def _gradient(self, name):
        b = self.backward
        if name == "sinks":
            made, placed = self._make((self.params.heads_q,), "float32")
            b.d_sinks = placed.address or None
        elif name == "bias":
            made, placed = self._make(self.bias_shape, "float32")
            strides = [0 if size == 1 else stride
                       for size, stride in zip(placed.shape, placed.strides)]
            strides = [0] * (4 - len(strides)) + strides
            b.d_bias = placed.address or None
            b.d_bias_stride_b, b.d_bias_stride_h, b.d_bias_stride_q = strides[:3]
        else:
            made, placed = self._make(getattr(self, name).shape, self.q.dtype)
            setattr(b, "d_" + name, self._struct(placed))
        return made


def _launch(backward, device, stream):
    needed = ctypes.c_int64()
    check(library().attend_backward_workspace_bytes(ctypes.byref(backward), ctypes.byref(needed)))
    with _attention.workspaces().use(device, stream, needed.value) as workspace:
        backward.attention.workspace = workspace
        backward.attention.workspace_bytes = needed.value
        check(library().attend_run_backward(ctypes.byref(backward), stream or None))


def _run(arguments, key):
    """`key`: the key to keep the call's plan under."""
    arguments = {**_DEFAULTS, **arguments}
    device, stream = _attention.place(arguments)
    staging = staging_for(device, stream)
    with allocating_on(arguments["stream"], stream, device, arguments.values()) as made:
        call = _BackwardCall(arguments, staging)
        made += call.made
    _launch(call.backward, device, stream)
    _plans.keep(key, Plan(call.backward, call.made, device), staging)
    staging.finish()
    return call.result


def _repeat(plan, arguments):
    backward = plan.struct()
    p, made = backward.attention, plan.results(arguments["q"])
    for name in ("q", "k", "v", "o"):
        getattr(p, name).data = address(arguments[name])
    p.lse, backward.d_o.data = address(arguments["lse"]), address(arguments["d_o"])
    if arguments["d_lse"] is not None:
        backward.d_lse = address(arguments["d_lse"])
    for name, gradient in zip(arguments["wanted"], made):
        getattr(backward, "d_" + name).data = address(gradient)
    p.dropout_seed = dropout_seed(arguments) or 0
    _launch(backward, plan.device, plan.stream())
    return tuple(made)


_plans = Plans(("d_o", "q", "k", "v", "o", "lse", "d_lse"))
