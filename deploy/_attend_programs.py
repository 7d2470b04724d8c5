# SPDX-License-Identifier: Apache-2.0
"""What the wheel's attend-server and attend-client start: this process becomes the program, so
that signals and exit codes are its own. Imports none of the packages, which take time."""

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
