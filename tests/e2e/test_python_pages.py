# SPDX-License-Identifier: Apache-2.0
"""The Python of client/python's pages and of the front page, verbatim, against a server: the blocks
of a page form one program."""

import os
import re
import subprocess
import sys

import pytest

from harness import PACKAGES, ROOT
from test_readme import DEFAULT_ADDRESS, blocks

pytestmark = pytest.mark.usefixtures("libraries")

FOLDER = "client/python"
# Code appended to a page's program to check what the page promises.
CHECKS = {
    "first_call.md": """
assert o.shape == lse.shape + (64,) and answer.check.ok and answer.transport in ("inline", "shm")
assert error_seen == "INVALID_ARGUMENT" and len(outputs) == 4
""",
    "padded_or_packed.md": "assert packed.shape == (158, 8, 64)",
    # Fresh shared memory is zero; otherwise the arrays are the earlier ones.
    "which_way.md": "assert o.shape == q.shape and np.isfinite(o).all() and o.any() != shares",
    "speculative.md": "assert [session.length(n) for n in range(layers)] == [103] * layers",
    "decoding.md": "assert o.shape == (3, heads, 1, dim) and len(client.sessions()) == 3",
}


def program(page, address):
    text = "\n".join(blocks("python", page))
    assert DEFAULT_ADDRESS in text
    return text.replace(DEFAULT_ADDRESS, address)


def run_program(text, folder):
    path = os.pathsep.join(PACKAGES)
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, timeout=120,
                          env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("page", CHECKS)
def test_the_code_of_a_page_runs(start_server, tmp_path, page, shares):
    flags = ["--shared-memory", "--shared-memory-socket", tmp_path / "s.sock"] if shares else []
    server = start_server(*flags)
    text = program(f"{FOLDER}/{page}", server.address)
    text = text.replace("    print(error)  ", "    print(error); error_seen = error.status  ")
    out = run_program(f"shares = {shares}\n{text}\n{CHECKS[page]}", tmp_path)
    if page == "first_call.md":
        assert "k.shape[3] (D) is 32, must equal q's 64" in out
    if page == "which_way.md":
        assert shares or "the server shares no memory" in out


def test_every_page_with_python_has_a_test():
    pages = {path.name for path in (ROOT / FOLDER).glob("*.md") if path.name != "README.md"}
    elsewhere = {"hugging_face.md", "masks.md", "training.md"}  # tested in tests/ecosystem
    assert pages == {*CHECKS, *elsewhere}


def test_the_three_lines_of_the_front_page_run(server, tmp_path):
    found = [block for block in blocks("python", "README.md") if "attend.Client" in block]
    assert len(found) == 1
    out = run_program(found[0].replace(DEFAULT_ADDRESS, server.address) + "print(o.shape)",
                      tmp_path)
    assert out == "(1, 8, 1024, 64)\n"
    start, = [each for each in blocks("python", f"{FOLDER}/README.md") if "attend.Client(" in each]
    assert all(line in found[0] for line in start.splitlines())


def test_links_of_the_pages_are_not_broken():
    for path in (ROOT / FOLDER).glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
