# SPDX-License-Identifier: Apache-2.0
"""Tokens and certificates of a server under trial, and the credentials of its callers."""

import json
import pathlib

import grpc

import certificates
import strangers

SCOPES = "scopes=compute,sessions,info"
TENANTS = ("a", "b")
NAMES = "DNS:localhost,IP:127.0.0.1,IP:10.9.0.1"  # the last is used by network_trials


class Locks:
    """The runner makes it with make() and passes flags() to the server; each process of callers
    reads it with read()."""

    def __init__(self, tokens, operator, ca):
        self.tokens, self.operator, self.ca = tokens, operator, ca
        self.channel = grpc.ssl_channel_credentials(pathlib.Path(ca).read_bytes())
        self._authority = self._folder = None  # only in the runner

    @staticmethod
    def make(folder):
        """Creates tokens and certificates; callers find theirs in FOLDER/locks.json."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        authority = certificates.Authority(folder / "ca")
        locks = Locks({tenant: strangers.token() for tenant in TENANTS}, strangers.token(),
                      str(authority.ca))
        locks._authority, locks._folder = authority, folder
        locks.change_tokens()
        locks.change_certificate()
        (folder / "locks.json").write_text(json.dumps(
            {"tokens": locks.tokens, "operator": locks.operator, "ca": locks.ca}))
        return locks

    @staticmethod
    def read(path):
        return Locks(**json.loads(pathlib.Path(path).read_text()))

    def change_tokens(self):
        """Rewrites the token file: the same callers, and another whose token is new each time."""
        new = self._folder / "tokens.new"
        new.write_text("".join(
            strangers.line(tenant, token, f"tenant={tenant}", SCOPES)
            for tenant, token in self.tokens.items()) +
            strangers.line("operator", self.operator, "tenant=default", "scopes=admin") +
            strangers.line("passing", strangers.token(), "tenant=a", SCOPES))
        new.replace(self._folder / "tokens")

    def change_certificate(self):
        """Replaces the certificate and its key, one file after the other."""
        made = self._authority.issue("next", usage="serverAuth", names=NAMES)
        for name, path in zip(("certificate", "key"), made):
            path.replace(self._folder / name)

    def flags(self):
        return ["--tokens", self._folder / "tokens", "--tls-cert", self._folder / "certificate",
                "--tls-key", self._folder / "key"]

    def metadata(self, tenant):
        return strangers.bearer(self.tokens[tenant])
