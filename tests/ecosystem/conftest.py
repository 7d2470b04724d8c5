# SPDX-License-Identifier: Apache-2.0
"""Puts attend's Python packages on the path, and reference.py."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in
                ("kernels/python", "kernels/python/examples", "tests/python")]
