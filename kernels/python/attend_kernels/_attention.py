# SPDX-License-Identifier: Apache-2.0
"""attention() and related functions: the choice of device and stream, and the launch."""

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

    q, k, v: float16, bfloat16 or float32, all of one dtype (or float64, for kernel="cpu_reference"
        only): [B, Hq, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv] for layout BHLD, heads and rows
        swapped for BLHD, [rows, H, D] for LHD, where cu_seqlens_q and cu_seqlens_k [B + 1] give the
        starts of sequences. Hq is a multiple of Hkv; D and Dv are 1 to 256. Any strides, except
        that the last dimension's is 1.
    causal, alignment: keys after the diagonal are hidden; the diagonal ends at the last query and
        key ("bottom_right") or begins at the first ones ("top_left").
    window: (left, right) visible keys beside the diagonal, -1 for all; with causal, right is 0.
    key_offset, keys_after: if k and v are a part of the keys, the number of keys before and after
        it; mask, ALiBi and dropout use key positions in the whole. The caller merges the parts'
        answers by their LSE (attend.merge_partial). Only one part may have sinks.
    scale: 1/sqrt(D) if None. softcap: scores become softcap * tanh(score / softcap); 0 is off.
    bias: added to scores; [B|1, Hq|1, Lq|1, Lk], leading dimensions optional, of any of the three
        dtypes. Or a NumPy or torch array of bool: a mask, read as bits, where True keeps the key.
        False removes the key completely: NaN and Inf in its K and V have no effect. A bias of -inf
        gives a key weight 0 and hides its V, but a NaN or +Inf score from its K remains, as IEEE
        requires. A finite bias removes no key.
    tree: bool [B|1, T, T] of NumPy or torch, T up to 1024: the mask of a draft whose tokens are a
        tree (tree_from_parents). The draft is the last T queries and keys of each sequence; True at
        [b, i, j] lets its query i see its key j. All else is as without a tree. It is written out
        as a mask of bits, so not with a bias, nor with lengths on the GPU.
        tree_lengths: [B] tokens of each sequence's draft, if not all have T.
    alibi_slopes: float32 [Hq] or [B, Hq]. sinks: float32 [Hq], logits that join the sum only.
    q_lengths, kv_lengths: [B] true lengths, for BHLD and BLHD. Rows beyond them are not read, and
        their O is 0. These, cu_seqlens, slopes and sinks may be lists; GPU lengths are int64 and
        trusted. With a host list, a call with GPU tensors waits until it has run.
    page_table: int32 [B, n], for BHLD and BLHD: K and V are in pages, [pages, Hkv, rows, D] or
        [pages, rows, Hkv, D], with rows a power of two from 16 to 1024. Key j of sequence b is row
        j % rows of page page_table[b][j // rows]; entries beyond kv_lengths[b] are not read.
        Trusted on the GPU, like lengths. Sequences may share pages.
    max_seqlen_q, max_seqlen_k: the longest sequence, for LHD; required if cu_seqlens are on the
        GPU.
    o_dtype: "float32" for O in float32 with any dtype of q, as merging partial answers needs; else
        q's.
    dropout_p: the probability that a weight is dropped, in [0, 1 - 2^-17), rounded to a multiple of
        2^-16; kept weights are divided by 1 - p. dropout_seed: in [0, 2^64); a seed drops the same
        weights on every device and in the backward pass.
    device: where NumPy arrays are computed, "cpu" or "cuda:N"; None: GPU 0 if there is one, else
        the CPU. All other tensors are computed where they are.
    kernel: the name of a kernel to force. out: the array to write to, which must not overlap itself
        or any memory that the call reads. stream: a CUDA stream (an integer or an object with
        cuda_stream); else PyTorch's current one if PyTorch is loaded, else the default. Tensors
        used on a PyTorch Stream are recorded on it; with an integer or another library's stream,
        keep them until it has run.

    Returns O in the layout of q with Dv, or (O, LSE float32 [B, Hq, Lq], packed [Hq, rows]) if
    return_lse. Results match q: NumPy, q's own class, or a DeviceArray for DLPack. GPU results are
    ready in stream order, CPU results when the call returns. A torch tensor that requires grad is
    refused, except under no_grad; attend.torch has gradients. Error: an argument is invalid, or the
    library failed.
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
    arguments of `attention`, all on one device and stream. Returns the results in order. An output
    must not overlap any other tensor of the batch."""
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
    """The kernel that `attention` would run with these arguments, and why: (kernel, why)."""
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
    """"cpu", "cuda" or "cuda:N", also as a torch.device, as a number."""
    kind, _, index = str(name).partition(":")
    if kind == "cpu" and not index:
        return CPU
    if kind == "cuda" and (index or "0").isdecimal():
        return int(index or 0)
    raise invalid(f"device is {str(name)!r}, must be 'cpu' or 'cuda:N'")


def _device(arguments):
    """The device that computes a call: CPU or a CUDA ordinal."""
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
    """(device, stream) of a call: the stream it names, or the current one."""
    device, stream = _device(arguments), arguments["stream"]
    if stream is not None:
        stream = int(getattr(stream, "cuda_stream", stream))
    elif "torch" in sys.modules and _tensors.device_of(arguments["q"]) is not None:
        stream = current_stream(device)
    return device, stream or 0


def _prepare(arguments, label):
    """The calls and their staging. Error: an argument is invalid, or two calls differ in device or
    stream."""
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


@functools.lru_cache  # ctypes caches the type only while it is referenced
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
    """`key`: the key to keep a single call's plan under."""
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
    p.dropout_seed = dropout_seed(arguments) or 0
    _launch(params, plan.device, plan.stream())
    return tuple(made) if arguments["return_lse"] else made[0]


_plans = Plans(("q", "k", "v"))
_workspaces = Workspaces()


def workspaces():
    """The process's workspaces, also for the backward pass."""
    return _workspaces


def release_workspaces():
    """Waits for the streams that attention was called on, and frees the device memory kept for
    later calls. Error: a stream had failed; the memory is freed all the same.

    Memory is kept by stream handle. Call this before you destroy a stream that attention was called
    on (PyTorch never destroys its own): CUDA may give the handle to a new stream, whose calls would
    then use the memory while launches on the old stream still do."""
    _workspaces.release()
