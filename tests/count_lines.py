#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts lines of code of the product and of the tests, without blanks and comments: C++, CUDA,
Protobuf, Python and scripts.

    tests/count_lines.py [--since REVISION]
"""

import argparse
import io
import pathlib
import subprocess
import sys
import tarfile

from source_tree import SLASHED, Tree, code_lines

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRODUCT = ("server", "client", "kernels", "proto")


def count(files):
    """Lines of code by top folder, from (path, text)."""
    lines = dict.fromkeys((*PRODUCT, "tests"), 0)
    for path, text in files:
        top, suffix = path.partition("/")[0], pathlib.PurePath(path).suffix
        script = suffix == "" and text.startswith("#!")
        if top in lines and (script or suffix in SLASHED | {".py", ".sh"}):
            lines[top] += code_lines(path, text)
    return {**lines, "product": sum(lines[top] for top in PRODUCT)}


def files_now():
    tree = Tree(ROOT)
    return ((path, "\n".join(tree.lines(path))) for path in tree.paths)


def files_at(revision):
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True,
                            capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.isfile():
                yield member.name, archive.extractfile(member).read().decode(errors="replace")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--since", metavar="REVISION", help="also what has changed since then")
    options = parser.parse_args()
    now = count(files_now())
    then = count(files_at(options.since)) if options.since else None
    for name in (*PRODUCT, "product", "tests"):
        print(f"{name:8} {now[name]:7d}" + (f" {now[name] - then[name]:+7d}" if then else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
