# SPDX-License-Identifier: Apache-2.0
"""The required contents of a NOTICES file (deploy/notices)."""

import re

RULE = "=" * 100


def sections(text):
    """{title lines: text}."""
    parts = text.split(f"\n{RULE}\n")
    assert len(parts) > 2 and len(parts) % 2 == 1, "titles and texts take turns"
    return dict(zip(parts[1::2], parts[2::2]))


def assert_complete(text, libraries, with_cuda):
    """Every library is in one title, and every title has a text. The libraries' names are those of
    Debian's."""
    found = sections(text)
    named = [name for title in found for line in title.splitlines()
             for name in line.partition(": ")[2].split() if ".so" in name]
    assert sorted(named) == sorted(libraries)
    for title, body in found.items():
        assert re.search("copyright|licen[sc]e|permission", body, re.I), title
    assert any(title.startswith("libcli11-dev") for title in found)
    for of, words in (("CUDA toolkit", "End User License Agreement|docs.nvidia.com/cuda/eula"),
                      ("NVTX", "Apache License|nvidia.github.io/NVTX/LICENSE.txt")):
        terms = [body for title, body in found.items() if title.startswith(f"NVIDIA {of}")]
        assert bool(terms) == with_cuda, of
        assert all(re.search(words, body) for body in terms), of
    for licence in set(re.findall(r"/usr/share/common-licenses/(Apache-2\.0|GPL-3)\b", text)):
        assert f"/usr/share/common-licenses/{licence}" in found, f"{licence} is named, not there"
