#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps the project's borders and budgets. One line per fault, file:line: [rule] what; a count.

    tests/style.py [--root FOLDER] [--list] [--only RULE]
"""

import argparse
import ast
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import style_tics
from source_tree import Tree, is_script

COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
HOST_FILE_LINES_MAX = 400
KERNEL_FILE_LINES_MAX = 500

PRODUCT = ("server", "client", "kernels", "proto")
CPP = {".cc", ".h", ".cu", ".cuh"}
SOURCES = {".cc", ".cu"}
# Files whose first line, or second after a #! line, names the licence.
LICENSED = CPP | {".proto", ".py", ".cmake", ".yaml", ".yml", ".supp", ".sh"}
LICENSED_NAMES = {"CMakeLists.txt", "Dockerfile"}
LICENCE = "SPDX-License-Identifier: Apache-2.0"

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
GRPC_OR_GENERATED = re.compile(r"^(grpc|grpcpp|google/protobuf)/|\.pb\.h$")
LIBRARIES_OUTSIDE_KERNELS = re.compile(r"^(grpc|grpcpp|google|spdlog|fmt|prometheus|CLI|nlohmann)/")

# Which rooms a room includes, besides itself. server/ and client/ may also use the rooms of
# KERNELS_FOR_ALL, and a room that is not named here may use what its top folder's row lists.
ROOMS = {
    "server": "app log memory net util proto/process",
    "server/util": "", "server/auth": "util", "server/http": "util",
    "server/limits": "util", "server/log": "util", "server/trace": "log util",
    "server/memory": "util proto/process", "server/regions": "auth limits log memory util",
    "server/sessions": "limits memory util",
    "server/request": "auth limits memory regions sessions util",
    "server/schedule": "request util", "server/metrics": "request schedule util",
    "server/net": "log memory metrics transport util",
    "server/tls": "log metrics net transport util",
    "server/transport": "limits util proto/process",
    "server/wire": "auth memory regions request sessions util",
    "server/upload": "memory request schedule util",
    "server/device": "memory metrics request schedule util",
    "server/engine": "device memory metrics request schedule upload util",
    "server/rpc": "auth engine limits log memory metrics regions request schedule sessions trace "
                  "transport upload util wire",
    "server/oip": "auth engine limits memory metrics regions request rpc util wire",
    "server/app": "auth engine http limits log memory metrics net oip regions request rpc schedule "
                  "sessions tls trace transport upload util wire proto/process",
    "client": "call memory rpc wire",
    "client/c": "client call memory wire",
    "client/call": "memory",
    "client/wire": "call",
    "client/rpc": "call wire",
    "client/tool": "call",
    "client/load": "client call plot tool wire",
    "client/local": "call load plot tool kernels/c",
    "client/cli": "client call load local memory plot rpc tool wire proto/process",
    "client/example": "", "client/memory": "", "client/plot": "",
    "kernels": "contract cpu cuda",
    "kernels/util": "",
    "kernels/contract": "util",
    "kernels/reference": "contract",
    "kernels/cpu": "contract reference util",
    "kernels/cuda/runtime": "contract util",
    "kernels/cuda/ptx": "contract",
    "kernels/cuda/ragged": "contract util cuda/ptx cuda/runtime",
    "kernels/cuda/naive": "contract cuda/ptx cuda/ragged",
    "kernels/cuda/fp32": "contract cuda/ptx cuda/ragged",
    "kernels/cuda/sm80": "contract cuda/ptx cuda/ragged",
    "kernels/cuda/sm90": "contract cuda/ptx cuda/ragged",
    "kernels/cuda/decode": "contract util cuda/ptx cuda/ragged cuda/runtime",
    "kernels/cuda/backward": "contract util cuda/ptx cuda/ragged cuda/runtime cuda/sm80",
    "kernels/cuda/launch": "contract cuda/backward cuda/decode cuda/fp32 cuda/naive cuda/ragged "
                           "cuda/runtime cuda/sm80 cuda/sm90",
    "kernels/cuda/lane": "contract util cuda/backward cuda/launch cuda/ragged cuda/runtime",
    "kernels/cuda": "contract cuda/lane cuda/launch cuda/runtime",
    "kernels/c": "contract cpu reference util cuda/backward cuda/launch cuda/runtime",
    "proto/process": "",
}
KERNELS_FOR_ALL = {"kernels/contract", "kernels/reference", "kernels/util"}
# Where gRPC and generated headers may be included.
WIRE = re.compile(r"(server/(app|oip|rpc|wire)|client/(c|rpc|wire))/|"
                  r"(server/main|client/memory/(cuda|shared)_memory)\.cc$|"
                  r"(server/regions/region_socket|client/(client|session|cli/admin_calls))\.|"
                  r"client/call/attention_call\.h$")

BANNED = [
    (re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b"), "unfinished work belongs in an issue"),
    (re.compile(r"(?<![\w.$}])/(work|farm|home/\w+|root|Users/\w+)/"), "a path of one machine"),
    (re.compile(r"\bnot (yet )?" r"implemented\b", re.I), "a part that is not there"),
]


@dataclasses.dataclass(frozen=True)
class Fault:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: [{self.rule}] {self.text}"


def includes(tree, path):
    for number, line in enumerate(tree.lines(path), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1)


def check_licence(tree):
    """Every source file opens with its licence line."""
    for path in tree.paths:
        pure = pathlib.Path(path)
        if not (pure.suffix in LICENSED or pure.name in LICENSED_NAMES or is_script(tree, path)):
            continue
        head = tree.lines(path)[:2]
        first = 1 if head and head[0].startswith("#!") else 0
        if len(head) <= first or LICENCE not in head[first]:
            yield Fault(path, first + 1, "licence", f"the line '{LICENCE}' must stand here")


def check_opening(tree):
    """C++ and CUDA files say after the licence what they are, except a test, which its name tells,
    and a .cc whose header does; headers are included once. A page begins with its heading."""
    for path in tree.select((".md",)):
        if not (tree.lines(path) + [""])[0].startswith("# "):
            yield Fault(path, 1, "opening", "a heading of the first level must stand here")
    for path in tree.select(CPP):
        lines = tree.lines(path) + ["", "", ""]
        header = str(pathlib.Path(path).with_suffix(".h"))
        if header != path and header in tree.paths:
            continue
        said = re.match(r"(//|\s*\*)\n(//|\s*\*) \S", "\n".join(lines[1:3]))
        if not said and not pathlib.Path(path).stem.endswith("_test"):
            yield Fault(path, 2, "opening", "an empty comment line, then what this file is")
        # Highway includes an -inl.h once for every instruction set.
        once = path.endswith((".h", ".cuh")) and not path.endswith("-inl.h")
        guarded = "#pragma once" in lines or any(line.startswith("#ifndef") for line in lines)
        if once and not guarded:
            yield Fault(path, 1, "opening", "#pragma once is missing")


def check_columns(tree):
    """No line is longer than 100 columns, ends in spaces or holds a tab."""
    for path in tree.paths:
        pure = pathlib.Path(path)
        if not (pure.suffix in LICENSED or pure.name in LICENSED_NAMES or is_script(tree, path)):
            continue
        for number, line in enumerate(tree.lines(path), 1):
            if len(line) > COLUMNS_MAX:
                yield Fault(path, number, "columns", f"{len(line)} columns, at most {COLUMNS_MAX}")
            if line != line.rstrip():
                yield Fault(path, number, "columns", "spaces at the end")
            if "\t" in line:
                yield Fault(path, number, "columns", "a tab")


def check_file_length(tree):
    """Host files have at most 400 lines, files under kernels/ 500."""
    for path in tree.select(CPP | {".py"}):
        bound = KERNEL_FILE_LINES_MAX if path.startswith("kernels/") else HOST_FILE_LINES_MAX
        count = len(tree.lines(path)) - 1
        if count > bound:
            yield Fault(path, bound + 1, "file-length", f"{count} lines, at most {bound}")


def cpp_functions(tree):
    paths = tree.select(CPP)
    if not paths:
        return
    out = subprocess.run(
        ["ctags", "-f", "-", "--fields=+ne", "--langmap=C++:+.cu.cuh.h", "--kinds-C++=f", "-L-"],
        cwd=tree.root, input="\n".join(paths), check=True, capture_output=True, text=True).stdout
    for tag in out.splitlines():
        fields = tag.split("\t")
        numbers = dict(f.split(":", 1) for f in fields[3:] if re.match(r"(line|end):\d+$", f))
        if len(numbers) == 2:
            yield fields[1], fields[0], int(numbers["line"]), int(numbers["end"])


def python_functions(tree):
    for path in tree.paths:
        script = is_script(tree, path) and "python" in tree.lines(path)[0]
        if not (path.endswith(".py") or script):
            continue
        for node in ast.walk(ast.parse("\n".join(tree.lines(path)), path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node.name, node.lineno, node.end_lineno


def check_function_length(tree):
    """No function is longer than 70 lines."""
    for path, name, first, last in [*cpp_functions(tree), *python_functions(tree)]:
        if last - first + 1 > FUNCTION_LINES_MAX:
            yield Fault(path, first, "function-length",
                        f"{name} has {last - first + 1} lines, at most {FUNCTION_LINES_MAX}")


def room_of(path):
    """The room that a file of the product or a header is in, None for a library's header."""
    top, _, rest = path.partition("/")
    return path.rpartition("/")[0] if rest and top in PRODUCT else None


def may_include(room):
    top = room.split("/")[0]
    names = ROOMS.get(room, "").split()
    rooms = {name if name.split("/")[0] in PRODUCT else f"{top}/{name}" for name in names}
    return rooms | {room} | (KERNELS_FOR_ALL if top in ("server", "client") else set())


def check_borders(tree):
    """A room includes what ROOMS allows it; gRPC and generated headers stay where the wire is;
    kernels/ needs no library of the service, and the product none of its tests."""
    for path in tree.select(CPP):
        room, top = room_of(path), path.split("/")[0]
        if room is None:
            continue
        if room not in ROOMS:
            yield Fault(path, 1, "borders", f"{room} is not in ROOMS (tests/style.py)")
        for number, name in includes(tree, path):
            why = None
            if name.startswith("tests/"):
                why = "the product does not need its tests"
            elif top == "kernels" and LIBRARIES_OUTSIDE_KERNELS.match(name):
                why = "kernels/ stands alone"
            elif GRPC_OR_GENERATED.search(name) and not WIRE.match(path):
                why = "gRPC and generated headers stay where the wire is"
            elif room_of(name) not in {None, *may_include(room)} and not name.endswith(".pb.h"):
                why = f"ROOMS has no {room_of(name)} for {room}"
            if why:
                yield Fault(path, number, "borders", f"includes {name}: {why}")


def check_words(tree):
    """No marks of unfinished work, no path of somebody's machine."""
    for path in tree.paths:
        if path == "LICENSE":
            continue
        for number, line in enumerate(tree.lines(path), 1):
            for pattern, why in BANNED:
                match = pattern.search(line)
                if match:
                    yield Fault(path, number, "words", f"'{match.group(0)}': {why}")


def check_own_header(tree):
    """A source file includes its own header first, which proves that the header compiles alone."""
    for path in tree.select(SOURCES):
        number, first = next(includes(tree, path), (1, None))
        own = [str(pathlib.Path(path).with_suffix(suffix)) for suffix in (".h", ".cuh")]
        missed = [header for header in own if header in tree.paths]
        if missed and first not in missed:
            yield Fault(path, number, "own-header", f"{missed[0]} must be the first #include")


def names_source(cmake, name):
    """Whether CMake's text names the file, a test by its stem, or one as ${x}.cc from a list."""
    stem = name.rpartition(".")[0]
    named = f"{re.escape(stem)}(?:{re.escape(name[len(stem):])})?" if stem.endswith("_test") \
        else re.escape(name)
    if re.search(rf"(?<![\w.-]){named}(?![\w.])", cmake):
        return True
    for ending in set(re.findall(r"\$\{\w+\}([\w.-]*\.(?:cc|cu))\b", cmake)):
        if name.endswith(ending):
            rest = name.removesuffix(ending)
            if re.search(rf"\bforeach\s*\([^)]*\b{re.escape(rest)}\b", cmake):
                return True
    return False


def check_built(tree):
    """Every source file is named in CMake's files: its folder's, or one's above or below."""
    cmake = {p: "\n".join(tree.lines(p)) for p in tree.paths
             if p.endswith(("CMakeLists.txt", ".cmake"))}
    for path in tree.select(SOURCES):
        pure = pathlib.Path(path)
        near = (text for p, text in cmake.items()
                if pathlib.Path(p).parent in pure.parents or pure.parent in pathlib.Path(p).parents)
        if not any(names_source(text, pure.name) for text in near) and not any(
                os.path.relpath(path, os.path.dirname(p)) in text for p, text in cmake.items()):
            yield Fault(path, 1, "built", "no CMake file names it")


def check_attacks(tree):
    """tests/e2e/README.md names the tests of test_{hostile,strangers}*, and none that is not."""
    page = "tests/e2e/README.md"
    said = {}
    if page in tree.paths:
        for number, line in enumerate(tree.lines(page), 1):
            said.update({name: number for name in re.findall(r"`(test_\w+)`", line)})
    tests = set()
    for path in tree.select({".py"}, "tests/e2e/"):
        for number, line in enumerate(tree.lines(path), 1):
            name = "".join(re.findall(r"^def (test_\w+)", line))
            tests.add(name)
            if name and name not in said and re.search(r"/test_(hostile_|strangers)", path):
                yield Fault(path, number, "attacks", f"{name} is not in {page}")
    for name, number in said.items():
        if name not in tests:
            yield Fault(page, number, "attacks", f"there is no {name}")


def check_tics(tree):
    """No file has more of the words that tests/style_tics.py counts than tests/style_tics.txt says,
    or fewer: its numbers only fall."""
    for fault in style_tics.faults(tree):
        yield Fault(*fault[:2], "tics", fault[2])


def check_format(tree):
    """C++ and CUDA files are as clang-format leaves them."""
    paths = tree.select(CPP)
    if not paths:
        return
    if not shutil.which("clang-format"):
        yield Fault(".clang-format", 1, "format", "clang-format is not installed")
        return
    out = subprocess.run(["clang-format", "--dry-run", *paths], cwd=tree.root,
                         capture_output=True, text=True).stderr
    seen = set()
    for line in out.splitlines():
        match = re.match(r"(?:\./)?([^:\s]+):(\d+):\d+: (?:warning|error): ", line)
        if match and match.groups() not in seen:
            seen.add(match.groups())
            yield Fault(match[1], int(match[2]), "format", "clang-format would change it")


RULES = {
    "licence": check_licence,
    "opening": check_opening,
    "columns": check_columns,
    "file-length": check_file_length,
    "function-length": check_function_length,
    "borders": check_borders,
    "own-header": check_own_header,
    "words": check_words,
    "built": check_built,
    "attacks": check_attacks,
    "tics": check_tics,
    "format": check_format,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--list", action="store_true", help="print the rules and stop")
    parser.add_argument("--only", choices=RULES, help="one rule")
    options = parser.parse_args()
    if options.list:
        for name, rule in RULES.items():
            print(f"{name:16} {' '.join(rule.__doc__.split())}")
        return 0
    tree = Tree(options.root)
    faults = []
    for name, rule in RULES.items():
        if options.only in (None, name):
            faults += rule(tree)
    for fault in sorted(faults, key=lambda f: (f.path, f.line)):
        print(fault)
    print(f"style: {len(tree.paths)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
