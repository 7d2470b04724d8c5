# SPDX-License-Identifier: Apache-2.0
"""Makes foreign text safe for logs and terminals: on one line, without characters that move the
cursor, control the terminal, or change how other text is shown."""

import re

# The characters of kernels/util/printable.cc, and lone surrogates, which C++ sees as bytes.
HIDDEN = ((0x0, 0x1f), (0x7f, 0x9f), (0xad, 0xad), (0x61c, 0x61c), (0x200b, 0x200f),
          (0x2028, 0x202e), (0x2060, 0x206f), (0xd800, 0xdfff), (0xfe00, 0xfe0f),
          (0xfeff, 0xfeff), (0xfff0, 0xfffb), (0xfffe, 0xffff), (0xe0000, 0xe0fff))
_HIDDEN = re.compile("[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in HIDDEN) + "]")


def _escaped(match):
    code = ord(match[0])
    if code == 10:
        return "\\n"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def printable(text):
    """The text with hidden characters as \\u009b, and newlines as \\n."""
    return _HIDDEN.sub(_escaped, str(text))
