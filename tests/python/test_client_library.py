# SPDX-License-Identifier: Apache-2.0
"""attend's structs and functions match attend_client.h; where the library is looked for."""

import ctypes
import ctypes.util
import dataclasses
import pathlib
import re

import attend
import pytest
from attend import _call, _library

HEADER = pathlib.Path(__file__).resolve().parents[2] / "client/c/attend_client.h"
STRUCTS = {"attend_client_options": _library.Options, "attend_client_tensor": _library.TensorStruct,
           "attend_client_numbers": _library.NumbersStruct,
           "attend_client_list": _library.ListStruct, "attend_client_params": _library.Params,
           "attend_client_answer": _library.AnswerStruct,
           "attend_client_layer_shape": _library.LayerShapeStruct,
           "attend_client_session_options": _library.SessionOptions}
C_TYPES = {"uint64_t": ctypes.c_uint64, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
           "float": ctypes.c_float, "double": ctypes.c_double,
           "attend_client_done": ctypes.c_void_p, **STRUCTS}
POINTERS = {"char": ctypes.c_char_p,
            "attend_client_list": ctypes.POINTER(_library.ListStruct),
            "attend_client_layer_shape": ctypes.POINTER(_library.LayerShapeStruct)}


def text_without_comments():
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)


def c_fields(struct):
    """[(name, ctypes type)] of a struct in the header."""
    body = re.search(rf"typedef struct {struct} {{(.*?)}}", text_without_comments(), re.S)[1]
    fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+)\s*(.*)", declaration, re.S).groups()
        for name in names.split(","):
            simple = POINTERS.get(kind, ctypes.c_void_p) if "*" in name else C_TYPES[kind]
            word, _, count = name.strip("* \n").partition("[")
            fields.append((word, simple * int(count.strip("]")) if count else simple))
    return fields


@pytest.mark.parametrize("struct", STRUCTS)
def test_structs_match_the_header(struct):
    assert c_fields(struct) == list(STRUCTS[struct]._fields_)


def test_constants_match_the_header():
    values = {name: int(value) for name, value in
              re.findall(r"ATTEND_CLIENT_(\w+) = (-?\d+)", text_without_comments())}
    for table in (_library.DTYPES, _library.TRANSPORTS):
        for name, value in table.items():
            assert values[name.upper()] == value
    assert values["BIT"] == _library.BIT
    for name in ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNAVAILABLE"):
        assert attend.Error(values[name], "").status == name


def test_every_function_is_declared_with_its_arguments():
    declared = {}
    for kind, name, arguments in re.findall(
            r"ATTEND_CLIENT_API\s+(\w+(?: char\*)?)\s+attend_client_(\w+)\((.*?)\);",
            text_without_comments(), re.S):
        declared[name] = (kind, 0 if arguments.strip() == "void" else arguments.count(",") + 1)
    ours = {**{name: ("int32_t", len(types)) for name, types in _library.ARGUMENTS.items()},
            **{name: ("void", len(types)) for name, types in _library.VOID_ARGUMENTS.items()},
            "last_error": ("const char*", 0), "session_id": ("const char*", 1),
            "session_length": ("int64_t", 2)}
    assert declared == ours


def test_paths_where_the_library_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv(_library.ENVIRONMENT, raising=False)
    module = tmp_path / "root/client/python/attend/_library.py"
    places = [str(p.relative_to(tmp_path)) for p in _library.candidates(module)]
    name = _library.LIBRARY_NAME
    assert places[0] == f"root/client/python/attend/{name}"
    assert f"root/client/lib/{name}" in places  # DIST/lib for DIST/python/attend
    assert f"root/build/release/client/c/{name}" in places and f"root/dist/lib/{name}" in places
    monkeypatch.setenv(_library.ENVIRONMENT, str(tmp_path / "own.so"))
    assert _library.candidates(module) == [tmp_path / "own.so"]


def test_the_error_of_a_missing_library_names_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "_library", None)
    monkeypatch.setenv(_library.ENVIRONMENT, str(tmp_path / "own.so"))
    with pytest.raises(attend.Error) as caught:
        attend.Client()
    assert caught.value.status == "UNAVAILABLE" and str(tmp_path / "own.so") in str(caught.value)


def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(_library, "_library", None)
    with pytest.raises(attend.Error, match="not of this module's version"):
        _library.load(ctypes.util.find_library("c") and "/lib/x86_64-linux-gnu/libc.so.6")


def test_a_failed_check_raises_where_only_arrays_are_returned():
    check = attend.Check(False, 10, 20, 0, 0.5, 0.1, 1e-6, "o[0, 1, 2, 3] is 0.5")
    answer = attend.Answer(
        o="o", lse="lse", gradients={"q": "d_q"}, timings=attend.Timings(*[0] * 7), check=check,
        kernel="", kernel_reason="", device="", transport="", batch_requests=1, request_id="",
        attempts=1, session_lengths=(), sessions_ending=False)
    for give in (lambda: _call.arrays_of(answer, False), lambda: _call.gradients_of(answer, "q")):
        with pytest.raises(attend.Error, match=r"check failed: o\[0, 1, 2, 3\] is 0.5"):
            give()
    undecided = dataclasses.replace(check, undecided=True, rows_unjudged=2)
    undecided = dataclasses.replace(answer, check=undecided)
    with pytest.warns(RuntimeWarning, match="could not judge all"):
        assert _call.gradients_of(undecided, "q") == ("d_q",)
    assert "check undecided" in repr(
        dataclasses.replace(undecided, o=None, lse=None, gradients={}))
    passed = dataclasses.replace(answer, check=dataclasses.replace(check, ok=True))
    assert _call.arrays_of(passed, True) == ("o", "lse")
    assert _call.gradients_of(passed, "q") == ("d_q",)
