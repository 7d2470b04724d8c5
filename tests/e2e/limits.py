# SPDX-License-Identifier: Apache-2.0
"""Servers whose tenants "a" and "b" have limits, and how they refuse callers."""

import signal

import grpc
import pytest

import harness
import wire

TENANTS = "--tenant=a=1,b=1"


class Limits:
    """The file of a server's --limits."""

    def __init__(self, folder, text):
        self.path = folder / "limits.toml"
        self.path.write_text(text)

    @property
    def flags(self):
        return TENANTS, f"--limits={self.path}"

    def change(self, server, text, result="ok"):
        """Rewrites it and has the server read it again."""
        self.path.write_text(text)
        before = server.metric("attend_reloads_total", what="limits", result=result)
        server.signal(signal.SIGHUP)
        harness.wait_for("the limits to be read", lambda: server.metric(
            "attend_reloads_total", what="limits", result=result) == before + 1)


def attend(service, request, tenant="a"):
    return service.Attend(request, timeout=wire.SECONDS, metadata=[("x-attend-tenant", tenant)])


def refused(service, request, tenant="a"):
    """The refusal's message and its pushback."""
    with pytest.raises(grpc.RpcError) as failure:
        attend(service, request, tenant)
    assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, failure.value
    pushback_ms = int(dict(failure.value.trailing_metadata())["grpc-retry-pushback-ms"])
    return failure.value.details(), pushback_ms
