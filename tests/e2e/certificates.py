# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests of TLS, made by deploy/make-test-ca and openssl, and how a Python client
sees a server."""

import contextlib
import os
import pathlib
import shutil
import socket
import ssl
import subprocess

import grpc

from harness import ROOT, clean_env, free_port, wait_for

# The beginning of an HTTP/2 connection, with empty settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


class Authority:
    """A folder made by deploy/make-test-ca: its files, and further certificates."""

    def __init__(self, folder, clients="client other"):
        self.folder = pathlib.Path(folder)
        self.issued = 0
        subprocess.run([ROOT / "deploy/make-test-ca", self.folder], check=True,
                       env=clean_env(ATTEND_TEST_CLIENTS=clients))

    def __getattr__(self, name):
        """ca, server, crl and so on: the path of that .pem; server_key and so on: the path of its
        key."""
        if name.startswith("_"):
            raise AttributeError(name)
        path = self.folder / (f"{name.removesuffix('_key')}.key" if name.endswith("_key")
                              else f"{name}.pem")
        if not path.exists():
            raise AttributeError(f"there is no {path}")
        return path

    def _openssl(self, *command):
        subprocess.run(["openssl", *map(str, command)], check=True, cwd=self.folder,
                       capture_output=True)

    def issue(self, name, days=30, usage="clientAuth", names="DNS:localhost,IP:127.0.0.1",
              key=("EC", "ec_paramgen_curve:P-256")):
        """A certificate with its own key; one with -1 days has expired. `names`: the alternative
        names, and `key`: the key's algorithm, both in openssl's syntax."""
        algorithm, option = key
        self.issued += 1
        extensions = self.folder / f"{name}.ext"
        extensions.write_text("basicConstraints=critical,CA:FALSE\n"
                              f"extendedKeyUsage={usage}\n"
                              f"subjectAltName={names}\n")
        self._openssl("genpkey", "-algorithm", algorithm, "-pkeyopt", option, "-out",
                      f"{name}.key")
        self._openssl("req", "-new", "-key", f"{name}.key", "-subj", f"/CN={name}",
                      "-out", f"{name}.csr")
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                      "-set_serial", self.issued, "-days", days, "-extfile", extensions.name,
                      "-out", f"{name}.pem")
        return getattr(self, name), getattr(self, f"{name}_key")

    def revoke(self, name, path):
        """Writes a revocation list with this certificate alone to `path`."""
        (self.folder / "ca.conf").write_text(
            "[ca]\ndefault_ca=list\n[list]\ndatabase=index.txt\ncrlnumber=crlnumber\n"
            "default_md=sha256\ndefault_crl_days=30\n")
        (self.folder / "index.txt").write_text("")
        (self.folder / "crlnumber").write_text("02\n")
        signed = ("ca", "-config", "ca.conf", "-keyfile", "ca.key", "-cert", "ca.pem")
        self._openssl(*signed, "-revoke", f"{name}.pem")
        self._openssl(*signed, "-gencrl", "-out", "new.pem")
        replace(path, self.folder / "new.pem")

    def serve(self, *more):
        """The flags of a server with this authority's certificate."""
        return ("--tls-cert", self.server, "--tls-key", self.server_key, *more)

    def serve_mtls(self, *more):
        return self.serve("--tls-client-ca", self.ca, *more)

    def channel(self, address, client=None, **options):
        """A gRPC channel that trusts the authority; `client`: the name of its certificate."""
        shown = {}
        if client is not None:
            shown = {"certificate_chain": getattr(self, client).read_bytes(),
                     "private_key": getattr(self, f"{client}_key").read_bytes()}
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes(), **shown)
        return grpc.secure_channel(address, credentials, **options)

    def context(self, client=None, shown_by=None):
        """A context for Python's sockets; `client`: the name of its certificate, issued by
        `shown_by` if that is another authority."""
        context = ssl.create_default_context(cafile=self.ca)
        context.set_alpn_protocols(["h2"])
        if client is not None:
            authority = shown_by or self
            context.load_cert_chain(getattr(authority, client), getattr(authority, f"{client}_key"))
        return context


def open_tls(address, context, seconds=10):
    host, port = address.rsplit(":", 1)
    return context.wrap_socket(socket.create_connection((host, int(port)), timeout=seconds),
                               server_hostname=host)


def greet(address, context):
    """None if the server speaks HTTP/2; otherwise the error of the server or of this side."""
    try:
        with open_tls(address, context) as connection:
            connection.sendall(PREFACE)
            head = connection.recv(9)
            return None if len(head) == 9 and head[3] == 4 else f"closed after {head}"
    except ssl.SSLError as error:
        return error.reason or str(error)
    except ConnectionError as error:
        return type(error).__name__


@contextlib.contextmanager
def s_server(cert, key):
    """A server run by openssl with a certificate that attend-server would refuse to start with.
    Yields its address."""
    port = free_port()
    command = ["openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-cert", cert, "-key", key,
               "-alpn", "h2", "-quiet"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)

    def listens():
        with contextlib.suppress(ConnectionError), \
                socket.create_connection(("127.0.0.1", port), timeout=10):
            return True

    with process:
        try:
            wait_for("s_server to listen", listens)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def replace(path, source):
    """Puts a copy of `source` at `path`, whole."""
    new = pathlib.Path(f"{path}.new")
    shutil.copy(source, new)
    os.replace(new, path)
