# SPDX-License-Identifier: Apache-2.0
"""Tokens and a certificate of a server on trial, and what its callers need of them."""

import json
import pathlib
import subprocess

import grpc

import harness
import strangers

SCOPES = "scopes=compute,sessions,info"
TENANTS = ("a", "b")


class Locks:
    """Made once by the runner, with flags(); read by each process of callers."""

    def __init__(self, tokens, ca):
        self.tokens, self.ca = tokens, ca
        self.channel = ca and grpc.ssl_channel_credentials(pathlib.Path(ca).read_bytes())

    @staticmethod
    def make(folder):
        """In FOLDER/locks.json; with TLS where the server has it."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tokens = {tenant: strangers.token() for tenant in TENANTS}
        (folder / "tokens").write_text("".join(
            strangers.line(tenant, token, f"tenant={tenant}", SCOPES)
            for tenant, token in tokens.items()))
        ca = None
        if "--tls-cert" in subprocess.run([harness.binary("attend-server"), "--help"], text=True,
                                          capture_output=True, check=True).stdout:
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                 "ec_paramgen_curve:P-256", "-nodes", "-days", "30", "-subj", "/CN=localhost",
                 "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", folder / "key",
                 "-out", folder / "certificate"], check=True, capture_output=True)
            ca = str(folder / "certificate")
        (folder / "locks.json").write_text(json.dumps({"tokens": tokens, "ca": ca}))
        return Locks(tokens, ca)

    @staticmethod
    def read(path):
        return Locks(**json.loads(pathlib.Path(path).read_text()))

    def flags(self, folder):
        folder = pathlib.Path(folder)
        return ["--tokens", folder / "tokens", *(
            ["--tls-cert", folder / "certificate", "--tls-key", folder / "key"] if self.ca else [])]

    def metadata(self, tenant):
        return strangers.bearer(self.tokens[tenant])
