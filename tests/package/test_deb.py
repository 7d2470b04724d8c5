# SPDX-License-Identifier: Apache-2.0
"""The Debian package, unpacked. tests/container/deb installs and purges it."""

import gzip
import os
import re
import subprocess

import pytest

from conftest import run
from harness import ROOT, Server, run_client
from notices import assert_complete


@pytest.fixture(scope="session")
def deb(build, tmp_path_factory):
    out = tmp_path_factory.mktemp("deb")
    said = run(ROOT / "deploy/make-deb", build, out)
    made, = out.iterdir()
    assert str(made) in said
    return made


@pytest.fixture(scope="session")
def unpacked(deb, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked") / "root"
    run("dpkg-deb", "-R", deb, folder)
    return folder


def test_fields_of_the_package(build, deb, unpacked):
    version = re.search(r"^CMAKE_PROJECT_VERSION:\w+=(.*)$",
                        (build / "CMakeCache.txt").read_text(), re.M)[1]
    fields = dict(re.findall(r"^(\S+): (.*)$", run("dpkg-deb", "-f", deb), re.M))
    assert (fields["Package"], fields["Version"]) == ("attend", f"{version}-1")
    needs = {need.split()[0] for need in fields["Depends"].split(", ")}
    for library in ("libc6", "libstdc++6", "libtbb12", "libgrpc++1.51", "libprotobuf32"):
        assert any(need.startswith(library.rstrip("0123456789.")) for need in needs), needs
    assert (unpacked / "DEBIAN/conffiles").read_text() == "/etc/attend/attend-server.toml\n"
    sums = (unpacked / "DEBIAN/md5sums").read_text()
    run("md5sum", "-c", "--quiet", "-", cwd=unpacked, input=sums)
    listed = {line.split("  ")[1] for line in sums.splitlines()}
    assert listed == {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")
                      if path.is_file() and "DEBIAN" not in path.parts}
    owners = set(re.findall(r"^\S+ (\S+)", run("dpkg-deb", "-c", deb), re.M))
    assert owners == {"root/root"}


def test_notices_cover_what_is_compiled_in(build, unpacked):
    """It contains no libraries of others, but notices for code that is compiled in."""
    folder = unpacked / "usr/share/doc/attend"
    assert_complete(gzip.decompress((folder / "NOTICES.gz").read_bytes()).decode(), [],
                    "ATTEND_WITH_CUDA:INTERNAL=ON" in (build / "CMakeCache.txt").read_text())
    assert "Apache-2.0" in (folder / "copyright").read_text()
    libraries = {path.name for path in unpacked.rglob("*.so*")}
    assert libraries == {"libattend_kernels.so", "libattend_client.so"}


@pytest.fixture(autouse=True)
def library_path(unpacked, monkeypatch):
    """The system finds the libraries of an installed package by itself."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(unpacked / "usr/lib"))


def test_scripts_for_operators(unpacked, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTEND_BIN_DIR", str(unpacked / "usr/bin"))
    scripts = unpacked / "usr/share/attend"
    run(scripts / "make-test-ca", tmp_path / "ca")
    assert (tmp_path / "ca/server.pem").exists()
    line = run(scripts / "make-token", "ci", "--out", tmp_path / "token")
    (tmp_path / "tokens").write_text(line)
    (tmp_path / "tokens").chmod(0o600)
    server = Server(tmp_path / "server", "--tls-cert", tmp_path / "ca/server.pem", "--tls-key",
                    tmp_path / "ca/server.key", "--tokens", tmp_path / "tokens")
    try:
        done = run_client("info", "--server", server.address, "--token-file", tmp_path / "token",
                          "--tls-ca", tmp_path / "ca/ca.pem")
        assert "tenants      default" in done.stdout
    finally:
        server.kill()


@pytest.mark.parametrize("program", ("attend-server", "attend-client"))
def test_manual_pages_are_the_help(unpacked, program):
    page = gzip.decompress((unpacked / f"usr/share/man/man1/{program}.1.gz").read_bytes()).decode()
    assert page.startswith(f".TH {program.upper()} 1")
    help_text = run(unpacked / "usr/bin" / program, "--help")
    body = page.partition(".nf\n")[2].removesuffix(".fi\n")
    body = re.sub(r"^\\&", "", body, flags=re.M).replace("\\-", "-").replace("\\e", "\\")
    strip = re.compile(r"/(tmp|run)/\S*attend\S*")  # where the user's own socket is
    assert strip.sub("", body) == strip.sub("", help_text)


def test_programs_of_the_package_serve_with_its_settings(unpacked, tmp_path, monkeypatch):
    """All keys that it sets or offers are known to the server."""
    monkeypatch.setenv("ATTEND_BIN_DIR", str(unpacked / "usr/bin"))
    settings = (unpacked / "etc/attend/attend-server.toml").read_text()
    offered = re.sub(r'^#(\S+ = )', r"\1", settings, flags=re.M)
    assert offered.count("\n") == settings.count("\n") and offered != settings
    # With another --listen address.
    offered, gone = re.subn(r'^listen = ".*\n', "", offered, flags=re.M)
    assert gone == 1
    for folder in ("/run/attend", "/var/lib/attend", "/var/log/attend"):
        assert folder in settings
        offered = offered.replace(folder, str(tmp_path))
    (tmp_path / "settings.toml").write_text(offered)
    server = Server(tmp_path / "server", "--config", tmp_path / "settings.toml")
    try:
        run_client("check", "--quick", "--server", server.address)
        assert (tmp_path / "shared-memory.sock").is_socket()
        assert "serv" in (tmp_path / "server.log").read_text()
        assert server.stop() == 0
    finally:
        server.kill()


def test_systemd_accepts_the_unit(unpacked, tmp_path):
    """systemd accepts it, it exposes little, and its stop timeout is longer than the server's
    drain."""
    unit = (unpacked / "usr/lib/systemd/system/attend.service").read_text()
    copy = tmp_path / "attend.service"
    copy.write_text(unit.replace("/usr/bin/attend-server", f"{unpacked}/usr/bin/attend-server"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True,
                          text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "attend" in line]
    assert done.returncode == 0 and not said, done.stderr
    rating = run("systemd-analyze", "security", "--offline=yes", "--threshold=25", copy)
    assert "Overall exposure level for attend.service" in rating
    assert "Type=notify\n" in unit and "ProtectClock=yes" not in unit
    drain = float(re.search(r"--drain-timeout SECONDS.*?\[(\d+)\]",
                            run(unpacked / "usr/bin/attend-server", "--help"), re.S)[1])
    assert float(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)[1]) >= drain + 10
    assert {"LimitCORE=0", "MemoryMax=90%", "TasksMax=4096"} <= set(unit.splitlines())
    for folder in ("Runtime", "State", "Logs"):
        assert f"\n{folder}Directory=attend\n" in unit


def test_the_same_build_gives_the_same_bytes(build, deb, tmp_path):
    run(ROOT / "deploy/make-deb", build, tmp_path, env={**os.environ, "HOME": "/"})
    again, = tmp_path.iterdir()
    assert again.read_bytes() == deb.read_bytes()
