# SPDX-License-Identifier: Apache-2.0
"""Entry points of the wheel's attend-server and attend-client: this process becomes the program, so
that signals and exit codes are its own. Does not import the packages, which would take time."""

import os
import pathlib
import sys


def _become(name):
    program = pathlib.Path(__file__).resolve().with_name("attend.libs") / "bin" / name
    os.execv(program, [str(program), *sys.argv[1:]])


def server():
    _become("attend-server")


def client():
    _become("attend-client")
