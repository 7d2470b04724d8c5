# SPDX-License-Identifier: Apache-2.0
"""client/example is built as client/README.md says: against an installation, with the sources, and
by pkg-config. Its programs run each time, one of them against a live server."""

import os
import re
import subprocess

import pytest

from conftest import run
from harness import ROOT

EXAMPLE = ROOT / "client/example"


def readme_commands(word):
    text = (ROOT / "client/README.md").read_text()
    found = [block for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
             if word in block]
    assert len(found) == 1, f"{len(found)} blocks have {word}"
    return found[0]


def assert_programs_run(folder, server):
    for program in ("served", "served_c"):
        said = run(folder / program, server.address)
        assert re.match(r"cpu_flash on cpu: off by \S+ at most", said), said
    if (folder / "in_process").exists():
        assert run(folder / "in_process").startswith("cpu_flash: off by")


def test_the_commands_of_the_readme(installed, server, tmp_path):
    """All lines but the first, which installs: `installed` has done that."""
    lines = readme_commands("cmake --install").splitlines()
    assert lines[0] == "cmake --install build/quickstart --prefix /opt/attend"
    commands = "\n".join(lines[1:]).replace("/opt/attend", str(installed))
    run("bash", "-euc", commands.replace("build/example", str(tmp_path / "example"))
        .replace("127.0.0.1:8001", server.address), cwd=ROOT)
    assert_programs_run(tmp_path / "example", server)


def test_a_program_builds_with_pkg_config(installed, server, tmp_path):
    commands = readme_commands("pkg-config").replace("/opt/attend", str(installed))
    (tmp_path / "client").symlink_to(ROOT / "client")
    run("bash", "-euc", commands, cwd=tmp_path)
    env = {**os.environ, "PKG_CONFIG_PATH": f"{installed}/lib/pkgconfig"}
    flags = run("pkg-config", "--cflags", "--libs", "attend-kernels", env=env).split()
    run("g++", "-std=c++20", EXAMPLE / "in_process.cc", "-o", tmp_path / "in_process", *flags,
        f"-Wl,-rpath,{installed}/lib")
    assert_programs_run(tmp_path, server)


@pytest.fixture(scope="module")
def sources(build):
    """The build folder of a project that adds the sources, with its own warnings as errors. It is
    kept, so that it is compiled once."""
    folder = build.parent / "package/subdirectory"
    run("cmake", "-S", EXAMPLE, "-B", folder, "-G", "Ninja", f"-DATTEND_SOURCE={ROOT}",
        "-DATTEND_CUDA=OFF", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Wpedantic -Werror")
    return folder


def test_a_project_builds_the_sources_with_add_subdirectory(sources):
    """None of our programs or tests is built, none of our settings reaches the project's programs,
    and one of these compiles."""
    built = run("ninja", "-C", sources, "-t", "targets", "all")
    assert "attend-server" not in built and "gtest" not in built
    flags = run("ninja", "-C", sources, "-t", "commands", "served").splitlines()
    mine, = [line for line in flags if " -c " in line and "served.cc" in line]
    assert f"-I{ROOT} " not in mine and "-Wno-" not in mine, "settings of ours reach the program"
    run("ninja", "-C", sources, "CMakeFiles/served.dir/served.cc.o")


@pytest.mark.long
def test_programs_from_the_sources_run(sources, server):
    run("cmake", "--build", sources, seconds=600)
    assert_programs_run(sources, server)


@pytest.mark.parametrize("component", ("kernels", "client_c", "client", "nothing"))
def test_components(installed, tmp_path, component):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(x CXX)\n"
        f"find_package(attend 0.1 REQUIRED COMPONENTS {component})\n"
        f"get_target_property(kind attend::{component} TYPE)\n"
        "message(STATUS \"is ${kind}, gRPC ${gRPC_FOUND}.\")\n")
    done = subprocess.run(
        ["cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={installed}"],
        capture_output=True, text=True, timeout=60)
    if component == "nothing":
        assert done.returncode != 0 and "no component nothing" in done.stderr
    elif component in ("kernels", "client_c"):
        assert "is SHARED_LIBRARY, gRPC ." in done.stdout, done.stderr
    else:
        assert "is STATIC_LIBRARY, gRPC 1." in done.stdout, done.stderr


def test_installed_headers_are_self_contained(installed, tmp_path):
    """Every header that they include is installed too, under the name by which it is included."""
    folder = installed / "include"
    headers = sorted(folder.rglob("*.h"))
    assert {"client.h", "session.h", "stream.h", "attend_c.h", "attention.grpc.pb.h"} <= \
        {path.name for path in headers}
    for path in headers:
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            assert (folder / name).is_file(), f"{path} includes {name}"
    names = [path.relative_to(folder) for path in headers]
    everything = tmp_path / "all.cc"
    everything.write_text("".join(f"#include <{name}>\n" for name in names))
    run("g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", f"-I{folder}", everything)
    for name in ("attend_c.h", "attend_client.h"):
        run("gcc", "-std=c99", "-fsyntax-only", "-Wpedantic", "-Werror", "-x", "c",
            folder / "attend" / name)


def test_the_runtime_component_has_no_development_files(build, installed, tmp_path):
    run("cmake", "--install", build, "--prefix", tmp_path, "--component", "runtime")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"bin/attend-server", "bin/attend-client", "lib/libattend_kernels.so",
            "lib/libattend_client.so", "python/attend/py.typed"} <= files
    assert not {name for name in files if name.endswith((".h", ".a", ".pc", ".cmake"))}
    protos = {path.relative_to(ROOT / "proto") for folder in ("attend", "inference")
              for path in (ROOT / "proto" / folder).rglob("*.proto")}
    assert {installed / "share/attend/proto" / path for path in protos} == \
        set((installed / "share/attend/proto").rglob("*.proto"))
