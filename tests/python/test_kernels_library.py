# SPDX-License-Identifier: Apache-2.0
"""Where the library is looked for; the structs and functions match attend_c.h."""

import ctypes
import pathlib
import re

import attend_kernels
import pytest
from attend_kernels import _library

HEADER = pathlib.Path(__file__).resolve().parents[2] / "kernels/c/attend_c.h"
C_TYPES = {"uint64_t": ctypes.c_uint64, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
           "float": ctypes.c_float, "double": ctypes.c_double,
           "attend_tensor": _library.TensorStruct,
           "attend_params": _library.Params}


def c_fields(struct):
    """[(name, ctypes type)] of a struct in the header."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    body = re.search(rf"typedef struct {struct} {{(.*?)}}", text, re.S)[1]
    fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+)\s*(.*)", declaration, re.S).groups()
        for name in names.split(","):
            pointer = "*" in name
            simple = {"char": ctypes.c_char_p}.get(kind, ctypes.c_void_p) if pointer else \
                C_TYPES[kind]
            fields.append((name.strip("* \n"), simple))
    return fields


@pytest.mark.parametrize("struct,ours", [("attend_tensor", _library.TensorStruct),
                                         ("attend_params", _library.Params),
                                         ("attend_backward_params", _library.BackwardParams)])
def test_structs_match_the_header(struct, ours):
    assert c_fields(struct) == list(ours._fields_)


def test_constants_match_the_header():
    text = HEADER.read_text()
    values = {name: int(value) for name, value in re.findall(r"ATTEND_(\w+) = (-?\d+)", text)}
    assert values["CPU"] == _library.CPU
    for name, value in _library.DTYPES.items():
        assert values[name.upper()] == value
    for name, value in _library.ALIGNMENTS.items():
        assert values[name.upper()] == value
    assert values["HOST_TO_DEVICE"] == _library.HOST_TO_DEVICE
    assert values["DEVICE_TO_HOST"] == _library.DEVICE_TO_HOST
    for code, name in _library.CODES.items():
        assert values.get(name, code) == code


def test_every_function_is_declared():
    declared = set(re.findall(r"ATTEND_API (?:int32_t|const char\*) (\w+)\(", HEADER.read_text()))
    assert declared == {*_library._ARGUMENTS, "attend_config_name", "attend_last_error"}


def test_paths_where_the_library_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv(_library.ENVIRONMENT, raising=False)
    module = tmp_path / "root/kernels/python/attend_kernels/_library.py"
    places = [str(p.relative_to(tmp_path)) for p in _library.candidates(module)]
    name = _library.LIBRARY_NAME
    assert places[0] == f"root/kernels/python/attend_kernels/{name}"
    assert f"root/kernels/lib/{name}" in places  # DIST/lib for DIST/python/attend_kernels
    assert f"root/build/cuda/kernels/c/{name}" in places and f"root/dist/lib/{name}" in places
    monkeypatch.setenv(_library.ENVIRONMENT, str(tmp_path / "own.so"))
    assert _library.candidates(module) == [tmp_path / "own.so"]


def test_the_error_of_a_missing_library_names_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "_library", None)
    monkeypatch.setenv(_library.ENVIRONMENT, str(tmp_path / "own.so"))
    with pytest.raises(attend_kernels.Error) as caught:
        attend_kernels.device_count()
    assert caught.value.status == "UNAVAILABLE" and str(tmp_path / "own.so") in str(caught.value)
