# SPDX-License-Identifier: Apache-2.0
"""Exact attention for deep learning frameworks: `attend.torch`, over attend_kernels."""

import pkgutil

# gRPC's stubs, made from proto/attend/v1, are attend.v1: both can be imported.
__path__ = pkgutil.extend_path(__path__, __name__)
