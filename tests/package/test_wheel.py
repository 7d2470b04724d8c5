# SPDX-License-Identifier: Apache-2.0
"""The wheel in fresh environments: a bare one, and one over Debian's NumPy, grpcio and protobuf."""

import base64
import csv
import email
import hashlib
import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile

import pytest

from conftest import run
from harness import ROOT, Server, run_client
from notices import assert_complete

LIBC = re.compile(r"(ld-linux|lib(c|m|pthread|dl|rt|resolv)\.so)")


def install(folder, wheel, *options):
    """A new environment with the wheel; returns its bin folder."""
    run(sys.executable, "-m", "venv", *options, folder)
    run(folder / "bin/pip", "install", "--no-index", "--no-deps", wheel)
    return folder / "bin"


@pytest.fixture(scope="session")
def bare(wheel, tmp_path_factory):
    return install(tmp_path_factory.mktemp("bare") / "venv", wheel)


@pytest.fixture(scope="session")
def over_debian(wheel, tmp_path_factory):
    return install(tmp_path_factory.mktemp("debian") / "venv", wheel, "--system-site-packages")


@pytest.fixture
def of_wheel(bare, monkeypatch):
    """harness.py uses the programs of the wheel."""
    monkeypatch.setenv("ATTEND_BIN_DIR", str(bare))
    return bare


def test_name_and_contents_of_the_wheel(build, wheel):
    cache = (build / "CMakeCache.txt").read_text()
    version = re.search(r"^CMAKE_PROJECT_VERSION:\w+=(.*)$", cache, re.M)[1]
    project = tomllib.loads((ROOT / "client/python/pyproject.toml").read_text())["project"]
    assert project["version"] == version
    glibc = os.confstr("CS_GNU_LIBC_VERSION").split()[1].replace(".", "_")
    assert wheel.name == \
        f"attend_server-{version}-py3-none-manylinux_{glibc}_{os.uname().machine}.whl"
    info = f"attend_server-{version}.dist-info"
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        metadata = email.message_from_bytes(file.read(f"{info}/METADATA"))
        record = list(csv.reader(file.read(f"{info}/RECORD").decode().splitlines()))
        assert [row[0] for row in record] == names
        for name, digest, size in record[:-1]:
            data = file.read(name)
            right = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={right}", len(data)), name
        notices = file.read(f"{info}/licenses/NOTICES").decode()
        assert "Apache License" in file.read(f"{info}/licenses/LICENSE").decode()
    assert (metadata["Metadata-Version"], metadata["Name"], metadata["Version"]) == \
        ("2.4", "attend-server", version)
    assert metadata.get_all("Classifier") == project["classifiers"] and "Keywords" in metadata
    assert metadata.get_all("Provides-Extra") == ["numpy", "torch", "transformers"]
    assert not [need for need in metadata.get_all("Requires-Dist") if "<" in need], \
        "an extra that lets go of newer versions"
    assert metadata["Project-URL"] is None, "it was not published"
    assert {f"{info}/licenses/{name}" for name in metadata.get_all("License-File")} == \
        {name for name in names if name.startswith(f"{info}/licenses/")}
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert not [link for link in links if not re.match("https?://|#", link)]
    libraries = [os.path.basename(name) for name in names if name.startswith("attend.libs/")
                 and ".so" in name]
    assert not [name for name in libraries if LIBC.match(name)]
    assert_complete(notices, [name.replace("-attend.so", ".so") for name in libraries],
                    with_cuda="ATTEND_WITH_CUDA:INTERNAL=ON" in cache)
    # Both the server and the library have kernels for every GPU.
    assert wheel.stat().st_size < 64 << 20


def test_the_metadata_has_the_name_of_the_wheel(bare):
    run(bare / "python", "-c", """
import importlib.metadata as metadata
import attend
assert metadata.version("attend-server") == attend.__version__
assert set(metadata.packages_distributions()["attend"]) == {"attend-server"}
""", cwd="/")


def test_a_published_wheel_names_an_address(build, tmp_path):
    run(ROOT / "deploy/make-wheel", build, tmp_path,
        env={**os.environ, "ATTEND_PROJECT_URL": "https://example.org/attend"})
    wheel, = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as file:
        info, = [name for name in file.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(file.read(info))
    assert metadata["Project-URL"] == "Source, https://example.org/attend"


def test_the_same_build_gives_the_same_bytes(build, wheel, tmp_path):
    run(ROOT / "deploy/make-wheel", build, tmp_path)
    again, = tmp_path.iterdir()
    assert again.read_bytes() == wheel.read_bytes()


def test_every_symbol_resolves_and_fits_the_wheels_glibc(wheel, bare):
    glibc = tuple(map(int, re.search(r"manylinux_(\d+)_(\d+)", wheel.name).groups()))
    packages, = bare.parent.glob("lib/python*/site-packages")
    files = [*(packages / "attend.libs/bin").iterdir(), *(packages / "attend.libs/lib").iterdir(),
             *packages.glob("attend*/libattend_*.so")]
    assert len(files) > 20
    for path in files:
        wanted = re.findall(r"GLIBC_(\d+)\.(\d+)", run("readelf", "-V", path))
        assert all((int(a), int(b)) <= glibc for a, b in wanted), path
    # With every library that it needs, what each thing that is started or loaded refers to.
    for path in (p for p in files if "attend.libs/lib/" not in str(p)):
        done = subprocess.run(["ldd", "-r", path], capture_output=True, text=True, timeout=60)
        assert not re.search("undefined|not found", done.stdout + done.stderr), done.stdout
        outside = {line.split()[0] for line in done.stdout.splitlines()
                   if "=> /" in line and str(packages) not in line}
        assert not [name for name in outside
                    if not LIBC.match(name) and not name.startswith(("libstdc++", "libgcc_s"))]


def test_the_server_replaces_the_python_process(of_wheel, tmp_path):
    """In an empty environment, with nothing of Python left in the process or its signals."""
    server = Server(tmp_path)
    try:
        exe = os.readlink(f"/proc/{server.process.pid}/exe")
        assert exe.endswith("attend.libs/bin/attend-server")
        direct = subprocess.Popen([exe, "--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0",
                                   "--device=cpu", f"--ready-file={tmp_path}/direct"],
                                  stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            while not (tmp_path / "direct").exists():
                assert direct.poll() is None
            ignored = [re.search(r"SigIgn:\s(\w+)", open(f"/proc/{pid}/status").read())[1]
                       for pid in (server.process.pid, direct.pid)]
            assert ignored[0] == ignored[1]
        finally:
            direct.kill()
            direct.wait()
        run_client("check", "--quick", "--server", server.address)
        server.signal(signal.SIGINT)
        assert server.wait() == 0
    finally:
        server.kill()


@pytest.mark.parametrize("program", ("attend-server", "attend-client"))
def test_exit_codes_and_output_are_the_programs(bare, program):
    assert re.fullmatch(rf"{program} \d\S* ?.*\n", run(bare / program, "--version"))
    done = subprocess.run([bare / program, "--no-such-flag"], capture_output=True, text=True)
    assert done.returncode == 2 and "--no-such-flag" in done.stderr


def test_the_kernels_need_nothing_but_python(bare):
    run(bare / "python", "-c", """
import attend_kernels
try:
    import numpy
    raise SystemExit("NumPy is in the bare environment")
except ImportError:
    pass
from attend_kernels import _library
assert _library.library()._name.endswith("attend_kernels/libattend_kernels.so")
assert attend_kernels.device_count() >= 0
""", cwd="/")


def test_the_python_tests_pass_with_the_installed_wheel(over_debian):
    """The pages' programs, the client, asyncio, sessions and the kernels, against its server."""
    e2e = [ROOT / f"tests/e2e/test_python_{part}.py"
           for part in ("pages", "client", "both_ways", "sessions", "lifetimes", "copies")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("ATTEND_")}
    said = run(over_debian / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *e2e,
               cwd="/", seconds=900,
               env={**env, "ATTEND_INSTALLED": "1", "ATTEND_BIN_DIR": str(over_debian)})
    assert re.search(r"^\d+ passed( in|,)", said, re.M) and "skipped" not in said, said


def test_runs_beside_numpy_grpcio_and_protobuf(over_debian, server, tmp_path):
    """In one process: the kernels on NumPy arrays, the client, Debian's gRPC for Python, and its
    protobuf with the same messages, which the C++ client has too."""
    stubs = [ROOT / "proto/attend/v1/attention.proto"]
    run("protoc", f"-I{ROOT}/proto", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}",
        "--plugin=protoc-gen-grpc_python=/usr/bin/grpc_python_plugin", *stubs)
    run(over_debian / "python", "-c", """
import sys
import attend
import attend_kernels
import grpc
import numpy as np
from attend.v1 import attention_pb2 as pb, attention_pb2_grpc as rpc

q, k, v = (np.random.default_rng(1).standard_normal((1, 2, 33, 16), np.float32) for _ in range(3))
s = np.einsum("bhid,bhjd->bhij", q, k, dtype=np.float64) / 4
p = np.exp(s - s.max(-1, keepdims=True))
right = np.einsum("bhij,bhjd->bhid", p / p.sum(-1, keepdims=True), v)
allowed = 33 * 2.0**-23 * np.abs(v).max()
o = attend_kernels.attention(q, k, v, device="cpu")
assert np.abs(o - right).max() < allowed

served = attend.Client(sys.argv[1]).attention(q, k, v)
assert np.abs(served - right).max() < allowed
request = pb.AttendRequest()
for name, array in (("q", q), ("k", k), ("v", v)):
    getattr(request, name).CopyFrom(pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=array.shape))
    request.raw.append(array.tobytes())
with grpc.insecure_channel(sys.argv[1]) as channel:
    answer = rpc.AttentionServiceStub(channel).Attend(request, timeout=30)
stub_o = np.frombuffer(answer.raw[0], np.float32).reshape(answer.o.shape)
assert np.abs(stub_o - right).max() < allowed
maps = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
assert any("cygrpc" in path for path in maps)
assert any("libtbb-attend" in path for path in maps)
assert len({path for path in maps if "libstdc++" in path}) == 1, maps
""", server.address, cwd="/", env={**os.environ, "PYTHONPATH": str(tmp_path)})
