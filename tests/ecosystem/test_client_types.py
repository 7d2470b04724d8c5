# SPDX-License-Identifier: Apache-2.0
"""attend's types under mypy: the package itself, and programs that use it."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

RIGHT = '''
import asyncio
from typing import Any

import attend


def run(q: Any, k: Any, v: Any) -> str:
    with attend.Client("host:8001", connections=2, timeout=1.5) as client:
        q = client.empty((1, 8, 64, 64), "float16", device="cuda:0")
        both: tuple[Any, Any] = client.attention(q, k, v, return_lse=True)
        with client.stream(timeout=3) as stream:
            both = stream.attention(q, k, v, return_lse=True, softcap=2.0)
        o = client.attention(q, k, v, causal=True, window=(5, 0), layout="BLHD")
        call: attend.Call = client.submit(q, k, v, check=True, priority=3)
        answer: attend.Answer = call.result(timeout=2)
        if answer.check is not None:
            print(answer.check.max_abs_error + answer.timings.total_ns)
        d_q, d_k = client.backward(o, q, k, v, wanted=("q", "k"))
        with client.session(8, 64, dtype="float16") as session:
            session.decode(q, k, v, layer=1, softcap=3.0)
            length: int = session.length()
        return answer.kernel + session.id[:length]


async def waits(q: Any) -> Any:
    async with attend.aio.Client() as client, await client.session(1, 8) as session:
        both: tuple[Any, Any] = await session.attend(q, layer=1, return_lse=True)
        both = await client.attention(q, q, q, return_lse=True)
        assert await client.health(timeout=3) == "SERVING"
        return both, await session.attend(q), await client.attention(q, q, q, scale=0.5)


with attend.connect("host", token_file="token", all_threads=True) as connected:
    assert attend.connected() is connected and attend.__version__
    attend.attention(1, 2, 3, causal=True)
asyncio.run(waits(1))
'''
WRONG = {
    'client.attention(q, k, v, causl=True)': "causl",
    'client.attention(q, k, v, causal="yes")': "causal",
    'client.attention(q, k, v, layout="HBLD")': "layout",
    'client.submit(q, k, v).o': '"Call" has no attribute "o"',
    'client.session("8", 64)': "Argument 1",
    'client.backward(q, q, k, v, wanted=["z"])': "List item",
    'attend.attention(q, k, v, timeout="1")': "timeout",
    'attend.Client(port=8001)': "port",
    'client.attention(q, k, v, return_lse=True).shape': '"tuple[Any, Any]" has no attribute',
    'attend.attention(q, k, v, causl=True, return_lse=True)': "causl",
    'attend.aio.Client(port=8001)': "port",
    'attend.aio.Client().session(1, 8, layer=2)': "layer",
    'attend.connect("host", port=8001)': "port",
    'attend.connect(client, all_threads=2.5)': "all_threads",
}


def mypy(*arguments, tmp_path):
    pytest.importorskip("mypy")
    env = {**os.environ, "MYPYPATH": f"{ROOT / 'client/python'}:{ROOT / 'kernels/python'}"}
    done = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"),
                           *arguments], env=env, cwd=tmp_path, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_package_has_no_faults(tmp_path):
    code, out = mypy("-p", "attend", "--ignore-missing-imports", tmp_path=tmp_path)
    assert code == 0, out


def test_a_correct_program_passes_strict_mypy(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RIGHT)
    code, out = mypy("--strict", "--follow-imports=silent", str(program), tmp_path=tmp_path)
    assert code == 0, out


def test_wrong_calls_are_reported(tmp_path):
    program = tmp_path / "program.py"
    lines = ["from typing import Any", "import attend", "def f(client: attend.Client, q: Any, "
             "k: Any, v: Any) -> None:", *(f"    {line}" for line in WRONG)]
    program.write_text("\n".join(lines) + "\n")
    code, out = mypy("--follow-imports=silent", str(program), tmp_path=tmp_path)
    assert code == 1
    for number, (line, word) in enumerate(WRONG.items(), 4):
        said = [each for each in out.splitlines() if f"program.py:{number}:" in each]
        assert said and any(word in each for each in said), f"{line}: {said}\n{out}"
