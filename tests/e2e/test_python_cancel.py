# SPDX-License-Identifier: Apache-2.0
"""asyncio calls whose timeout races with their answers. tests/client/c/cancel_test.cc has the other
ways to cancel calls. ATTEND_CANCELS is the number of calls, 10,000 by default."""

import os
import subprocess
import sys

import pytest

import harness

pytestmark = pytest.mark.usefixtures("libraries")

CANCELS = int(os.environ.get("ATTEND_CANCELS", "10000"))
SECONDS_MAX = 60 + CANCELS // 100
CALLERS = 2  # a busier loop cancels late

# Run in a separate process: a loop that hangs can only be killed.
SCRIPT = """
import asyncio, faulthandler, random, sys, time
faulthandler.enable()
address, cancels = sys.argv[1], int(sys.argv[2])
sys.path[:0] = sys.argv[4:]
import numpy as np
from attend import aio

CALLERS = int(sys.argv[3])

async def main():
    late, answered = 0, 0
    async with aio.Client(address, attempts=1) as client:
        q = np.random.default_rng(1).standard_normal((1, 4, 64, 32)).astype(np.float32)
        right = await client.attention(q, q, q)
        begin = time.perf_counter()
        for _ in range(20):
            await asyncio.gather(*(client.attention(q, q, q) for _ in range(CALLERS)))
        typical = (time.perf_counter() - begin) / 20

        async def one(seconds):
            nonlocal late, answered
            try:
                answer = await asyncio.wait_for(client.attention(q, q, q), seconds)
            except asyncio.TimeoutError:
                late += 1
            else:
                assert np.array_equal(answer, right)
                answered += 1

        async def caller(count):
            for _ in range(count):
                await one(random.uniform(0, 2 * typical))

        await asyncio.gather(*(caller(cancels // CALLERS) for _ in range(CALLERS)))
        await one(60)
        assert np.array_equal(await client.attention(q, q, q), right)
    print(late, answered)

asyncio.run(main())
"""


def test_timeouts_that_race_with_answers(tmp_path):
    server = harness.Server(tmp_path)
    done = subprocess.run([sys.executable, "-c", SCRIPT, server.address, str(CANCELS), str(CALLERS),
                           *sys.path],
                          capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    late, answered = map(int, done.stdout.split())
    assert late > 0 and answered > 0 and late + answered == CANCELS // CALLERS * CALLERS + 1
    assert done.stderr == "", done.stderr
    harness.wait_for("nothing in flight", lambda: server.metric("attend_inflight_requests") == 0)
    assert server.stop() == 0, server.log()
