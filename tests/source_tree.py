# SPDX-License-Identifier: Apache-2.0
"""The project's files, and which of their lines are comments."""

import pathlib
import re
import subprocess

SLASHED = {".c", ".cc", ".cu", ".cuh", ".h", ".proto"}
# A literal, in which // begins no comment, or a comment with those on the next lines.
SLASH_TOKENS = re.compile(
    r'R"(?P<raw>\w*)\(.*?\)(?P=raw)"' r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<=[\da-fA-F])'(?=[\da-fA-F])" r"|'(?:\\.|[^'\\\n])*'"
    r"|(?P<comment>//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)", re.S)
# A docstring is a comment too.
HASH_TOKENS = re.compile(
    r'(?P<comment>^[ \t]*"""(?:(?!""").)*"""'
    r"|(?:^[ \t]*|(?<=  ))#[^\n]*(?:\n[ \t]*#[^\n]*)*)", re.S | re.M)


class Tree:
    """The project's files: what git tracks or would track, else all outside build folders."""

    def __init__(self, root):
        self.root = pathlib.Path(root).resolve()
        self.paths = sorted(p for p in self._list() if (self.root / p).is_file())
        self._lines = {}

    def _list(self):
        if (self.root / ".git").exists():
            out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=self.root,
                                 check=True, capture_output=True, text=True).stdout
            return set(out.split("\n")) - {""}
        found = (p.relative_to(self.root) for p in self.root.rglob("*") if p.is_file())
        return {str(p) for p in found if not re.match(r"build|dist$", p.parts[0])}

    def lines(self, path):
        if path not in self._lines:
            text = (self.root / path).read_bytes()
            self._lines[path] = [] if b"\0" in text else text.decode(errors="replace").split("\n")
        return self._lines[path]

    def select(self, suffixes, under=""):
        return [p for p in self.paths if pathlib.Path(p).suffix in suffixes and p.startswith(under)]


def is_script(tree, path):
    return pathlib.Path(path).suffix == "" and tree.lines(path)[:1] and \
        tree.lines(path)[0].startswith("#!")


def tokens(path):
    return SLASH_TOKENS if pathlib.PurePath(path).suffix in SLASHED else HASH_TOKENS


def comments(path, text):
    """The comments of a source file, each as (its first line's number, its text without marks)."""
    for match in tokens(path).finditer(text):
        if match["comment"]:
            marks = r'^[ \t]*(//+|#+!?|/?\*+/?|""")?[ \t]*'
            yield (text.count("\n", 0, match.start()) + 1,
                   re.sub(marks, "", match["comment"], flags=re.M))


def code_lines(path, text):
    """How many lines are neither blank nor only comments."""
    code = tokens(path).sub(lambda m: "" if m["comment"] else m[0], text)
    return sum(bool(line.strip()) for line in code.split("\n"))
