#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts words that an engineer would not write. tests/style_tics.txt has how many each file may
have. Numbers there may only fall: without arguments, this lowers them to what there is now."""

import pathlib
import re
import sys

from source_tree import SLASHED, Tree, comments, is_script

LIST = "tests/style_tics.txt"
WORDS = re.compile(r"\b(no" r"body|an" r"ew|le" r"st|who" r"ever)\b", re.I)
# A comment's first word, or that of a paragraph of it.
OPENING = re.compile(r"(?:\A|\n\n)\s*(What|Who|Whoever|Of)\b")


def find(tree, path):
    """Each tic of a file, as (line, word)."""
    text = "\n".join(tree.lines(path))
    found = [(text.count("\n", 0, m.start()) + 1, m[0]) for m in WORDS.finditer(text)]
    if pathlib.Path(path).suffix in SLASHED | {".py", ".sh", ".cmake"} or is_script(tree, path):
        for line, comment in comments(path, text):
            found += [(line + comment.count("\n", 0, m.start(1)), f"a comment begins with {m[1]}")
                      for m in OPENING.finditer(comment)]
    return sorted(found)


def allowed(tree):
    lines = tree.lines(LIST) if LIST in tree.paths else []
    return {path: int(number) for path, number in (line.split() for line in lines if line)}


def faults(tree):
    """(path, line, what is wrong) of each file that has more tics than its number, or fewer."""
    numbers = allowed(tree)
    for path in tree.paths:
        found, most = find(tree, path) if path != "LICENSE" else [], numbers.pop(path, 0)
        if len(found) > most:
            listed = ", ".join(f"'{word}' in line {line}" for line, word in found)
            yield path, found[0][0], f"{len(found)} tics, at most {most}: {listed}"
        elif len(found) < most:
            yield path, 1, f"{len(found)} tics, {most} in {LIST}: tests/style_tics.py lowers it"
    for path in numbers:
        yield LIST, 1, f"there is no {path}: tests/style_tics.py takes it out"


def main():
    tree = Tree(pathlib.Path(__file__).resolve().parent.parent)
    now = {path: min(most, len(find(tree, path)))
           for path, most in allowed(tree).items() if path in tree.paths}
    (tree.root / LIST).write_text("".join(f"{p} {n}\n" for p, n in sorted(now.items()) if n))
    return 0


if __name__ == "__main__":
    sys.exit(main())
