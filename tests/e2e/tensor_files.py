# SPDX-License-Identifier: Apache-2.0
"""The formats that attend-client reads and writes, besides NumPy's own."""

import json

from reference import from_bytes, to_bytes


def write_safetensors(path, dtype, tensors):
    names = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
    header, data = {}, b""
    for name, array in tensors.items():
        part = to_bytes(dtype, array)
        header[name] = {"dtype": names[dtype], "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_safetensors(path):
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    names = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
    found = {}
    for name, entry in json.loads(blob[8:8 + size]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        part = blob[8 + size + first:8 + size + last]
        found[name] = from_bytes(names[entry["dtype"]], part, entry["shape"])
    return found
