# SPDX-License-Identifier: Apache-2.0
"""Exact attention for deep learning frameworks, over attend_kernels: `attend.torch`."""
