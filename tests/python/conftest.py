# SPDX-License-Identifier: Apache-2.0
"""Puts attend and attend_kernels on the path; provides a fake library that needs no GPU."""

import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "kernels/python"),
                str(HERE.parent.parent / "client/python")]

import attend_kernels  # noqa: E402
import fake_library  # noqa: E402
from attend_kernels import _attention, _gradients, _library  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU and the library, or is skipped")
    config.addinivalue_line("markers", "cpu: needs the library, or is skipped")


@pytest.fixture
def fake(monkeypatch):
    """attend_kernels over a fake library whose device memory is the host's."""
    library = fake_library.FakeLibrary()
    monkeypatch.setattr(_library, "_library", library)
    monkeypatch.setattr(_attention, "_workspaces", _attention.Workspaces())
    for module in (_attention, _gradients):  # the cached plans belong to another library
        monkeypatch.setattr(module, "_plans", type(module._plans)(module._plans._tensors))
    yield library
    _attention._workspaces.release()


def _missing(gpu):
    """Why a test that needs the library (`gpu`: and a GPU) cannot run; "" if it can."""
    try:
        return "" if attend_kernels.device_count() > 0 or not gpu else "no GPU is visible"
    except attend_kernels.Error as failure:
        return str(failure)


def pytest_collection_modifyitems(items):
    for marker in ("cpu", "gpu"):
        marked = [item for item in items if item.get_closest_marker(marker)]
        why = _missing(marker == "gpu") if marked else ""
        for item in marked:
            if why:
                item.add_marker(pytest.mark.skip(reason=why))
