# SPDX-License-Identifier: Apache-2.0
"""Puts attend's Python packages on the path."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels/python"), str(ROOT / "kernels/python/examples")]
