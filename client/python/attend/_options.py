# SPDX-License-Identifier: Apache-2.0
"""The types of a call's options, for type checkers, and their names and defaults, for `help` and
`inspect.signature`."""

from __future__ import annotations

import inspect
import os
from typing import (TYPE_CHECKING, Any, Callable, Coroutine, Generic, Literal, Sequence, TypedDict,
                    TypeVar, overload)

if TYPE_CHECKING:
    from typing_extensions import Concatenate, ParamSpec, Unpack

    Given = ParamSpec("Given")
    Result = TypeVar("Result")
    Awaited = Coroutine[Any, Any, Result]

Array = Any  # a NumPy array, a torch tensor, or an object with DLPack or data_ptr()
Numbers = Any  # a list, NumPy array or tensor of numbers
Function = TypeVar("Function", bound=Callable[..., Any])
Returned = TypeVar("Returned")
O = TypeVar("O", covariant=True)  # noqa: E741: the result without LSE
Both = TypeVar("Both", covariant=True)


class OptionsButLse(TypedDict, total=False):
    """The options that `Client.attention` documents, without return_lse."""
    causal: bool
    alignment: Literal["bottom_right", "top_left"]
    window: tuple[int, int] | None
    key_offset: int
    keys_after: int
    scale: float | None
    softcap: float
    bias: Array
    tree: Array
    tree_lengths: Numbers
    alibi_slopes: Numbers
    sinks: Numbers
    q_lengths: Numbers
    kv_lengths: Numbers
    cu_seqlens_q: Numbers
    cu_seqlens_k: Numbers
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    layout: Literal["BHLD", "BLHD", "LHD"]
    o_dtype: str | None
    dropout_p: float
    dropout_seed: int | None
    kernel: str
    check: bool
    priority: int
    request_id: str
    timeout: float | None
    tenant: str | None
    traceparent: str | None
    transport: Literal["auto", "inline", "chunked", "shared"]


class CallOptions(OptionsButLse, total=False):
    return_lse: bool


DEFAULTS: dict[str, Any] = dict(
    causal=False, alignment="bottom_right", window=None, key_offset=0, keys_after=0, scale=None,
    softcap=0.0, bias=None, tree=None, tree_lengths=None, alibi_slopes=None, sinks=None,
    q_lengths=None, kv_lengths=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None, layout="BHLD", return_lse=False, o_dtype=None, dropout_p=0.0,
    dropout_seed=None, kernel="auto", check=False, priority=0, request_id="", timeout=None,
    tenant=None, traceparent=None, transport="auto")

class ClientOptions(TypedDict, total=False):
    """The options that `Client` documents."""
    connections: int
    tenant: str | None
    timeout: float | None
    attempts: int
    shared_memory: bool | str
    token: str | None
    token_file: str | os.PathLike[str] | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_server_name: str | None
    traceparent: str | None


Wanted = Sequence[Literal["q", "k", "v", "bias", "sinks"]]


def named(function: Function, **other: Any) -> Function:
    """Gives the function a signature with each option in place of **options. other: defaults that
    differ from DEFAULTS."""
    types = {**OptionsButLse.__annotations__, **CallOptions.__annotations__}
    signature = inspect.signature(function)
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                 annotation=getattr(types[name], "__forward_arg__", types[name]))
               for name, default in {**DEFAULTS, **other}.items()]
    others = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=others + options)  # type: ignore
    return function


def as_in(method: Callable[Concatenate[Any, Given], Any]) -> Callable[
        [Callable[..., Returned]], Callable[Concatenate[Any, Given], Returned]]:
    """Gives the decorated method the signature of another one."""
    def dress(function: Callable[..., Returned]) -> Any:
        function.__signature__ = inspect.signature(method)  # type: ignore
        return function
    return dress


class Attention(Generic[O, Both]):
    """The type of a method that returns O, or O and LSE if return_lse."""

    @overload
    def __call__(self, q: Array, k: Array, v: Array, *, return_lse: Literal[True],
                 **options: Unpack[OptionsButLse]) -> Both: ...

    @overload
    def __call__(self, q: Array, k: Array, v: Array, **options: Unpack[CallOptions]) -> O: ...

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Any: ...

    @staticmethod
    def of(function: Any) -> Attention[Any, tuple[Any, Any]]:
        return named(function)

    @staticmethod
    def awaited(function: Any) -> Attention[Awaited[Any], Awaited[tuple[Any, Any]]]:
        return named(function)


class SessionAttention(Generic[O, Both]):
    """As Attention, for a session's method."""

    @overload
    def __call__(self, q: Array, k: Array = None, v: Array = None, *, layer: int = 0,
                 return_lse: Literal[True], **options: Unpack[OptionsButLse]) -> Both: ...

    @overload
    def __call__(self, q: Array, k: Array = None, v: Array = None, *, layer: int = 0,
                 **options: Unpack[CallOptions]) -> O: ...

    def __call__(self, q: Array, k: Array = None, v: Array = None, *, layer: int = 0,
                 **options: Any) -> Any: ...

    @staticmethod
    def of(function: Any) -> SessionAttention[Any, tuple[Any, Any]]:
        return named(function)

    @staticmethod
    def awaited(function: Any) -> SessionAttention[Awaited[Any], Awaited[tuple[Any, Any]]]:
        return named(function)
