# SPDX-License-Identifier: Apache-2.0
"""The scenarios of test_operate.py in which memory for sessions runs out."""

import contextlib

import grpc
import numpy as np

import harness
import sessions


def grow(server, tenant, rows, **fields):
    """A new session of this many tokens, or a refusal."""
    with sessions.client(server.address, tenant) as caller, \
            contextlib.suppress(grpc.RpcError):
        session = caller.create(**fields)
        if rows:
            sequence = sessions.Sequence(np.random.default_rng(), session)
            caller.attend(sessions.step(np.random.default_rng(), [sequence], rows, 0)[0])


@contextlib.contextmanager
def sessions_push_each_other_out(watched, _):
    server = watched("--session-memory", "16MiB")
    with harness.at_once(1, lambda: grow(server, "default", 20000)):
        yield server


@contextlib.contextmanager
def sessions_have_no_room(watched, _):
    server = watched("--session-memory", "8MiB")
    rows = 8 * 2**20 // (64 * 4 * sessions.KV_HEADS * (sessions.DIM + sessions.DIM_V)) * 64
    grow(server, "default", rows, pinned=True)
    with harness.at_once(1, lambda: grow(server, "default", 2)):
        yield server
