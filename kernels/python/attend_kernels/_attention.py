# SPDX-License-Identifier: Apache-2.0
"""attention() and its relatives: where a call runs, and the launch."""

import ctypes
import functools
import inspect
import sys

from . import _tensors
from ._call import Call, dropout_seed
from ._library import CPU, Error, Params, check, device_count, invalid, library
from ._plans import Plan, Plans, address
from ._staging import NoStaging, staging_for
from ._torch import allocating_on, current_stream
from ._workspaces import Workspaces


def attention(q, k, v, *, causal=False, alignment="bottom_right", window=None, key_offset=0,
              keys_after=0, scale=None, softcap=0.0, bias=None, tree=None, tree_lengths=None,
              alibi_slopes=None, sinks=None, q_lengths=None, kv_lengths=None, page_table=None,
              cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
              layout="BHLD", return_lse=False, o_dtype=None, dropout_p=0.0, dropout_seed=None,
              kernel="auto", out=None, stream=None, device=None):
    """softmax(scale * q k^T, capped, plus bias, minus ALiBi, under the mask) v, exactly.

    q, k, v: float16, bfloat16 or float32, all alike (or float64, which kernel="cpu_reference" alone
        takes); [B, Hq, Lq, D], [B, Hkv, Lk, D] and
        [B, Hkv, Lk, Dv] for layout BHLD, heads and rows swapped for BLHD, [rows, H, D] for LHD,
        where cu_seqlens_q and cu_seqlens_k [B + 1] say where sequences begin. Hq is a multiple of
        Hkv; D and Dv are 1 to 256. Any strides but the last dimension's, which is 1.
    causal, alignment: keys after the diagonal are hidden; the diagonal ends at the last query and
        key ("bottom_right") or begins at the first ones ("top_left").
    window: (left, right) visible keys beside the diagonal, -1 for all; with causal, right is 0.
    key_offset, keys_after: k and v are a part of the keys, with so many before and after it, as the
        mask, ALiBi and dropout count them; the caller merges the parts' answers by their LSE
        (attend.merge_partial). Sinks are in one part only.
    scale: 1/sqrt(D) if None. softcap: scores become softcap * tanh(score / softcap); 0 is off.
    bias: any of the three dtypes, [B|1, Hq|1, Lq|1, Lk], leading ones optional; added to scores.
        Or bool, of NumPy or torch: a mask, True keeps the key. It is read as bits. False removes
        the key wholly: NaN and Inf of its K and V reach nothing. -inf gives a key weight 0 and
        hides its V; only NaN or +Inf of its score, from K, stays, as IEEE says. A finite bias
        removes no key.
    tree: bool [B|1, T, T], of NumPy or torch, T up to 1024: the mask of a draft whose tokens are a
        tree (tree_from_parents). The draft are the last T queries and keys of each sequence, and
        True at [b, i, j] lets its query i see its key j; all else is as without a tree. It is
        written out as a mask of bits: not with a bias, and not with lengths on the GPU.
        tree_lengths: [B] tokens of each sequence's draft, if not all have T.
    alibi_slopes: float32 [Hq] or [B, Hq]. sinks: float32 [Hq], a logit that joins the sum only.
    q_lengths, kv_lengths: [B] true lengths, for BHLD and BLHD. Rows beyond are not read; O there
        is 0. These, cu_seqlens, slopes and sinks may be lists; on the GPU lengths are int64 and
        trusted. A host list makes a call with GPU tensors wait for its end.
    page_table: int32 [B, n], for BHLD and BLHD: K and V are in pages, [pages, Hkv, rows, D] or
        [pages, rows, Hkv, D], rows a power of two, 16 to 1024. Key j of sequence b is row j % rows
        of page page_table[b][j // rows]; numbers beyond kv_lengths[b] are not read. On the GPU
        trusted, as lengths. Sequences may share pages.
    max_seqlen_q, max_seqlen_k: the longest sequence for LHD; needed if cu_seqlens are on the GPU.
    o_dtype: "float32" for O in float32 whatever q's dtype is, as partial answers that are merged by
        their LSE need it; else q's.
    dropout_p: the probability that a weight is dropped, in [0, 1 - 2^-17), rounded to a multiple of
        2^-16; the kept ones are divided by 1 - p. dropout_seed: which ones are, in [0, 2^64); the
        same seed drops the same weights on every device and in the backward pass.
    device: where NumPy arrays are computed, "cpu" or "cuda:N"; GPU 0 if None and there is one, else
        the CPU. All other tensors are computed where they are.
    kernel: a name to force one. out: where to write, memory that neither overlaps itself nor
        anything that the call reads. stream: a CUDA stream (an integer or an
        object with cuda_stream); else PyTorch's current one if it is loaded, else the default.
        Of a PyTorch Stream, PyTorch is told that it uses these tensors; with another's, or an
        integer, keep them until it has run.

    Returns O in the layout of q with Dv, or (O, LSE float32 [B, Hq, Lq], packed [Hq, rows]) if
    return_lse. What it is matches q: NumPy, the same class as q, or a DeviceArray for DLPack.
    GPU results are ready in the stream's order, the CPU's when the call returns. A torch tensor
    that requires grad is refused, except under no_grad: attend.torch has the gradients. Error says
    what is wrong.
    """
    arguments = dict(locals())
    key = _plans.key(arguments)
    plan = _plans.find(key)
    if plan is not None:
        return _repeat(plan, arguments)
    results = _run([arguments], label="", key=key)
    return results[0]


def attention_batch(calls):
    """Several attentions of any shapes in as few launches as possible. calls: dicts with the
    arguments of `attention`, all on one device and stream. Returns its results in order. Outputs
    must not overlap anything else of the batch."""
    arguments = []
    for n, call in enumerate(calls):
        unknown = set(call) - set(_DEFAULTS)
        missing = {"q", "k", "v"} - set(call)
        if unknown or missing:
            raise invalid(f"calls[{n}] " + (f"has no argument {sorted(unknown)[0]}" if unknown
                                            else f"lacks {sorted(missing)[0]}"))
        arguments.append({**_DEFAULTS, **call})
    return _run(arguments, label="calls[{}]: ")


def select(q, k, v, **options):
    """Which kernel `attention` would run with these arguments, and why: (kernel, why)."""
    unknown = set(options) - set(_DEFAULTS)
    if unknown:
        raise invalid(f"select has no argument {sorted(unknown)[0]}")
    arguments = {**_DEFAULTS, "q": q, "k": k, "v": v, **options}
    device, stream = place(arguments)
    call = Call(arguments, NoStaging(device, stream))
    kernel, why = ctypes.c_char_p(), ctypes.c_char_p()
    check(library().attend_select(ctypes.byref(call.params), ctypes.byref(kernel),
                                  ctypes.byref(why)))
    return kernel.value.decode(), why.value.decode()


_DEFAULTS = {name: None if parameter.default is inspect.Parameter.empty else parameter.default
             for name, parameter in inspect.signature(attention).parameters.items()}


def _asked_device(name):
    """"cpu", "cuda" or "cuda:N", also as torch.device, as a number."""
    kind, _, index = str(name).partition(":")
    if kind == "cpu" and not index:
        return CPU
    if kind == "cuda" and (index or "0").isdecimal():
        return int(index or 0)
    raise invalid(f"device is {str(name)!r}, must be 'cpu' or 'cuda:N'")


def _device(arguments):
    """Where a call is computed: CPU or a CUDA ordinal."""
    q, device = arguments["q"], arguments["device"]
    asked = None if device is None else _asked_device(device)
    where = CPU if _tensors.stays_on_host(q) else _tensors.device_of(q)
    if where is None:
        if asked is None:
            return 0 if device_count() > 0 else CPU
        return asked
    if asked not in (None, where):
        raise invalid(f"device is {str(device)!r}, but q is on "
                      + ("the CPU" if where == CPU else f"cuda:{where}"))
    return where


def place(arguments):
    """(device, stream) of a call, the stream asked for or else the current one."""
    device, stream = _device(arguments), arguments["stream"]
    if stream is not None:
        stream = int(getattr(stream, "cuda_stream", stream))
    elif "torch" in sys.modules and _tensors.device_of(arguments["q"]) is not None:
        stream = current_stream(device)
    return device, stream or 0


def _prepare(arguments, label):
    """The calls and their staging. Error: an argument that cannot be, or two places in a batch."""
    device, stream = place(arguments[0])
    staging, calls = staging_for(device, stream), []
    for n, one in enumerate(arguments):
        where = label.format(n)
        if n > 0 and place(one) != (device, stream):
            raise invalid(f"{where}device and stream are {place(one)}, must be calls[0]'s, "
                          f"{(device, stream)}")
        try:
            with allocating_on(one["stream"], stream, device, one.values()) as made:
                calls.append(Call(one, staging))
                made += calls[-1].made
        except Error as failure:
            raise Error(failure.code, where + str(failure).partition(": ")[2]) from None
    return calls, staging


@functools.lru_cache  # ctypes makes the type anew if nobody has kept it, which takes longer
def _params_array(count):
    return Params * count


def _launch(params, device, stream):
    if device == CPU:  # which needs no workspace
        check(library().attend_run_batch(params, len(params), None, 0, stream or None))
        return
    needed = ctypes.c_int64()
    check(library().attend_batch_workspace_bytes(params, len(params), ctypes.byref(needed)))
    with _workspaces.use(device, stream, needed.value) as workspace:
        check(library().attend_run_batch(params, len(params), workspace, needed.value,
                                         stream or None))


def _run(arguments, label, key=None):
    """`key`: under which a single call's plan is kept."""
    if not arguments:
        return []
    calls, staging = _prepare(arguments, label)
    params = _params_array(len(calls))(*(call.params for call in calls))
    _launch(params, staging.device, staging.stream)
    if key is not None:
        _plans.keep(key, Plan(params, calls[0].made, staging.device), staging)
    staging.finish()
    return [call.result for call in calls]


def _repeat(plan, arguments):
    params, q = plan.struct(), arguments["q"]
    p, made = params[0], plan.results(q)
    p.q.data, p.k.data = address(q), address(arguments["k"])
    p.v.data, p.o.data = address(arguments["v"]), address(made[0])
    if arguments["return_lse"]:
        p.lse = address(made[1])
    if arguments["dropout_seed"] is not None:
        p.dropout_seed = dropout_seed(arguments["dropout_seed"])
    _launch(params, plan.device, plan.stream())
    return tuple(made) if arguments["return_lse"] else made[0]


_plans = Plans(("q", "k", "v"))
_workspaces = Workspaces()


def workspaces():
    """The process's, also for the backward pass."""
    return _workspaces


def release_workspaces():
    """Waits for the streams that attention was called on, and frees the device memory kept for the
    next calls. An Error says that a stream had failed; the memory is free even so.

    Memory is kept for every stream by its handle. Call this before you destroy a stream that
    attention was called on (PyTorch never destroys its own): CUDA may give the handle to a new
    stream, whose calls would then use the memory while launches on the old one still do."""
    _workspaces.release()
