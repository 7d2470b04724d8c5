# SPDX-License-Identifier: Apache-2.0
"""attend.Error: base classes by code, pickling, subclasses, printing; the packages' signatures,
versions and reprs."""

import asyncio
import copy
import inspect
import pathlib
import pickle
import re
import traceback

import attend
import attend_kernels
import pytest
from attend import _options
from attend_kernels import _library, _printable

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = {"INVALID_ARGUMENT": ValueError, "OUT_OF_RANGE": ValueError,
         "DEADLINE_EXCEEDED": TimeoutError, "UNAVAILABLE": ConnectionError}


@pytest.mark.parametrize("code", [*_library.CODES, 99])
def test_the_base_class_of_an_error_follows_from_its_code(code):
    failure = attend.Error(code, "x is 3, must be 4")
    kinds = [kind for kind in (ValueError, TimeoutError, ConnectionError)
             if isinstance(failure, kind)]
    assert kinds == [KINDS[failure.status]] if failure.status in KINDS else kinds == []
    assert isinstance(failure, attend.Error) and isinstance(failure, RuntimeError)
    assert str(failure) == f"{_library.CODES.get(code, code)}: x is 3, must be 4"
    assert repr(failure) == f"Error({str(failure)!r})" and failure.args == (str(failure),)


@pytest.mark.parametrize("code", [*_library.CODES, 99])
def test_pickled_and_copied_errors_keep_all_fields(code):
    failure = attend.Error(code, "x is 3")
    failure.attempts, failure.session_lengths = 4, (1, 2)
    again = [pickle.loads(pickle.dumps(failure, protocol))
             for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in (*again, copy.copy(failure), copy.deepcopy(failure)):
        assert other is not failure and type(other) is type(failure)
        assert (str(other), vars(other)) == (str(failure), vars(failure))
        assert (other.code, other.message, other.attempts) == (code, "x is 3", 4)


class Own(attend.Error):
    """A subclass of a program's."""


def test_a_pickled_subclass_keeps_its_type():
    own = pickle.loads(pickle.dumps(Own(4, "late")))
    assert type(own) is Own and own.code == 4 and not isinstance(own, TimeoutError)


class Named(attend.Error):
    """A subclass whose constructor does not call that of attend.Error."""

    def __init__(self, model, *, layer):
        self.model, self.layer = model, layer


class Refused(Named, ValueError):
    """A subclass whose constructor does call it."""

    def __init__(self, model, *, layer=0):
        super().__init__(model, layer=layer)
        attend.Error.__init__(self, 3, f"{model} has no layer {layer}\x1b[2J")


def test_a_subclass_may_have_its_own_constructor():
    for kind, status, said in ((Named, None, None),
                               (Refused, "INVALID_ARGUMENT",
                                r"INVALID_ARGUMENT: bert has no layer 7\u001b[2J")):
        made = kind("bert", layer=7)
        for other in (made, pickle.loads(pickle.dumps(made)), copy.copy(made)):
            assert type(other) is kind and (other.model, other.layer) == ("bert", 7)
            assert vars(other) == vars(made) and str(other) == str(made)
            assert getattr(other, "status", None) == status and said in (None, str(other))


HIDDEN = ["\x1b]0;title\a", "\x9b2J", "\u202eright to left", "\u2066", "\u200b", "\ufeff", "\ud800",
          "\U000e0041", "a\nforged line", "\r", "\xad", "\ufe0f"]


@pytest.mark.parametrize("text", HIDDEN, ids=ascii)
@pytest.mark.parametrize("code", [3, 5, 14])
def test_control_characters_in_an_error_are_escaped(code, text):
    failure = attend.Error(code, text)
    for one in (failure, pickle.loads(pickle.dumps(failure))):
        assert one.message == text
        for shown in (str(one), *one.args, *traceback.format_exception_only(one)):
            line = shown.rstrip("\n")
            assert all(c.isprintable() for c in line) and "\ufe0f" not in line and "\\" in line


def test_the_same_characters_are_escaped_as_by_the_server():
    source = (ROOT / "kernels/util/printable.cc").read_text()
    ranges = {(int(first, 16), int(last, 16))
              for first, last in re.findall(r"\{0x(\w+), 0x(\w+)\}", source)}
    assert len(ranges) > 10 and ranges | {(0xd800, 0xdfff)} == set(_printable.HIDDEN)
    plain = "Grüße, 日本, \\ and 🙂"
    assert _printable.printable(plain) == plain
    assert _printable.printable("\n\x9b\U000e0041\ud800") == r"\n\u009b\U000e0041\ud800"


def test_a_library_of_another_version_is_not_reported_as_missing(monkeypatch, tmp_path):
    """An attend.Error that is also an OSError is not mistaken for one of the loader."""
    for module in (_library, attend._library):
        monkeypatch.setattr(module._loading, "load", lambda *_: object())
        with pytest.raises(attend.Error, match="^UNAVAILABLE: this library is not"):
            module.load(tmp_path / "some.so")


def test_versions_match_the_build():
    version = re.search(r"project\(attend VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    said = re.search(r'^version = "(.*)"', (ROOT / "client/python/pyproject.toml").read_text(),
                     re.M)[1]
    assert attend.__version__ == attend_kernels.__version__ == version == said


CALLS = [attend.attention, attend.backward, *(
    getattr(kind, name) for kind, names in {
        attend.Client: "attention submit backward submit_backward attend_sessions",
        attend.Session: "attend decode append submit", attend.Stream: "attention submit",
        attend.aio.Client: "attention answer backward attend_sessions",
        attend.aio.Session: "attend decode append answer",
        attend.aio.Stream: "attention answer"}.items() for name in names.split())]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_signatures_name_every_option(call):
    parameters = inspect.signature(call).parameters
    assert not [one for one in parameters.values() if one.kind == one.VAR_KEYWORD]
    defaults = {**_options.DEFAULTS, **({"causal": True} if call.__name__ == "decode" else {})}
    for name, default in defaults.items():
        assert parameters[name].default == default and parameters[name].annotation


def test_methods_of_asyncio_have_the_same_signatures():
    for ours, theirs in ((attend.aio.Client, attend.Client), (attend.aio.Stream, attend.Stream),
                         (attend.aio.Session, attend.Session)):
        for name, method in vars(ours).items():
            if inspect.isfunction(method) and hasattr(theirs, name) and name[0] != "_":
                assert list(inspect.signature(method).parameters) == \
                    list(inspect.signature(getattr(theirs, name)).parameters), name
                assert asyncio.iscoroutinefunction(method) or name in ("stream", "length",
                                                                       "release")
    assert str(inspect.signature(attend.aio.Client)) == str(inspect.signature(attend.Client))


def test_typed_dicts_match_the_options():
    assert set(_options.DEFAULTS) == set(_options.CallOptions.__annotations__) | set(
        _options.OptionsButLse.__annotations__)
    parameters = inspect.signature(attend.Client).parameters
    assert set(parameters) - {"server"} == set(_options.ClientOptions.__annotations__)
    assert parameters["timeout"].default is None
    session = inspect.signature(attend.Client.session).parameters
    assert session["dtype"].default == "float32"


def test_the_repr_of_an_answer_is_one_escaped_line():
    answer = attend.Answer(
        o=memoryview(b""), lse=None, gradients={}, timings=attend.Timings(*[0] * 6, 1_230_000),
        check=None, kernel="cpu_flash", kernel_reason="", device="cpu", transport="shm",
        batch_requests=1, request_id="", attempts=1, session_lengths=(), sessions_ending=False)

    class Array:
        def __init__(self, *shape):
            self.shape, self.dtype = shape, "float32"

    for o, lse, gradients, words in (
            (Array(1, 8, 3, 64), Array(1, 8, 3), {}, "o float32 (1, 8, 3, 64), lse float32 "
             "(1, 8, 3)"), (None, None, {"q": Array(2, 1)}, "gradients['q'] float32 (2, 1)")):
        made = attend.Answer(**{**vars(answer), "o": o, "lse": lse, "gradients": gradients})
        assert repr(made) == f"<attend.Answer {words}, cpu_flash on cpu, shm, 1.23 ms>"
    evil = attend.Answer(**{**vars(answer), "o": None, "kernel": "\x1b[2J", "device": "\u202e",
                            "transport": "\n"})
    assert repr(evil) == r"<attend.Answer \u001b[2J on \u202e, \n, 1.23 ms>"


class Memory:
    address, device = 4096, -1


def test_device_arrays_are_neither_copied_nor_pickled():
    array = attend_kernels.DeviceArray(Memory(), (2, 3), "float16", 0)
    assert repr(array) == "<attend_kernels.DeviceArray float16 (2, 3) on cpu>"
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="DeviceArray is neither copied.*from_dlpack"):
            use(array)


def test_handles_of_the_library_are_neither_copied_nor_pickled():
    for kind in (attend._library.ClientHandle, attend._library.CallHandle,
                 attend._library.StreamHandle, attend._library.SessionHandle,
                 attend._library.MemoryHandle):
        handle = kind(0)
        assert not hasattr(handle, "__dict__"), "the cycle collector would track it"
        for use in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"{kind.__name__} is neither copied nor pickled"):
                use(handle)


def test_memory_of_the_kernels_is_neither_copied_nor_pickled(fake):
    memory = _library.Memory(0, 64)
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="attend_kernels.Memory is neither copied nor pickled"):
            use(memory)
    assert len(fake.blocks) == 1
