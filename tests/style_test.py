# SPDX-License-Identifier: Apache-2.0
"""Plants one fault of each kind in a small tree; the style test must find it and nothing else."""

import pathlib
import subprocess
import sys

import pytest

STYLE = pathlib.Path(__file__).resolve().parent / "style.py"
HEAD = "// SPDX-License-Identifier: Apache-2.0\n//\n// A file.\n\n"
CMAKE = "# SPDX-License-Identifier: Apache-2.0\nadd_library(x a.cc)\n"
GOOD = {
    ".clang-format": "BasedOnStyle: Google\nColumnLimit: 100\n",
    "kernels/CMakeLists.txt": CMAKE,
    "kernels/a.h": HEAD + "#pragma once\n\nint F();\n",
    "kernels/a.cc": HEAD + '#include "kernels/a.h"\n\nint F() { return 1; }\n',
    "server/wire/request_codec.cc": HEAD + "#include <grpcpp/grpcpp.h>\n",
    "server/CMakeLists.txt": CMAKE.replace("x a.cc", "y wire/request_codec.cc"),
    "tests/run": "#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\ntrue\n",
}

PLANTED = {
    "licence": ("kernels/a.h", "#pragma once\n"),
    "opening": ("kernels/a.h", "// SPDX-License-Identifier: Apache-2.0\n#pragma once\n"),
    "columns": ("kernels/CMakeLists.txt", CMAKE + "#" * 101 + "\n"),
    "file-length": ("kernels/a.h", HEAD + "#pragma once\n" + "// x\n" * 500),
    "function-length": ("kernels/a.cc", HEAD + "int F() {\n" + "  F();\n" * 70 + "}\n"),
    "own-header": ("kernels/a.cc", HEAD + "#include <cmath>\n\n#include \"kernels/a.h\"\n\n"
                   "int F() { return 1; }\n"),
    "words": ("tests/run", GOOD["tests/run"] + "# TO" "DO later\n"),
    "built": ("kernels/b.cc", HEAD + "int G() { return 1; }\n"),
    "attacks": ("tests/e2e/test_hostile_a.py",
                "# SPDX-License-Identifier: Apache-2.0\ndef test_a():\n    pass\n"),
    "tics": ("kernels/a.h", GOOD["kernels/a.h"].replace("A file.", "What a file is.")),
    "format": ("kernels/a.cc", HEAD + "int F( ) { return 1; }\n"),
}

BORDERS = [
    ("kernels/a.h", HEAD + "#pragma once\n\n#include <grpcpp/grpcpp.h>\n"),
    ("kernels/a.h", HEAD + "#pragma once\n\n#include <spdlog/spdlog.h>\n"),
    ("kernels/a.h", HEAD + "#pragma once\n\n#include <prometheus/counter.h>\n"),
    ("kernels/a.h", HEAD + '#pragma once\n\n#include "server/wire/request_codec.h"\n'),
    ("kernels/a.h", HEAD + '#pragma once\n\n#include "attend/v1/attention.pb.h"\n'),
    ("server/schedule/batcher.h", HEAD + "#pragma once\n\n#include <grpcpp/grpcpp.h>\n"),
    ("server/schedule/batcher.h", HEAD + '#pragma once\n\n#include "attend/v1/attention.pb.h"\n'),
    ("server/schedule/batcher.h", HEAD + '#pragma once\n\n#include "client/client.h"\n'),
    ("client/client.h", HEAD + '#pragma once\n\n#include "server/request/request.h"\n'),
    ("client/load/workload.h", HEAD + "#pragma once\n\n#include <grpcpp/channel.h>\n"),
    ("client/tool/verify.h", HEAD + '#pragma once\n\n#include "attend/v1/attention.pb.h"\n'),
    ("proto/process/block_stack.h", HEAD + "#pragma once\n\n#include <grpc/grpc.h>\n"),
    ("kernels/a.h", HEAD + '#pragma once\n\n#include "tests/check.h"\n'),
    ("server/schedule/batcher.h", HEAD + '#pragma once\n\n#include "server/engine/engine.h"\n'),
    ("kernels/cuda/ptx/mma.cuh", HEAD + '#pragma once\n\n#include "kernels/cpu/flash.h"\n'),
]


def run_style(root, changes):
    for path, text in {**GOOD, **changes}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    done = subprocess.run([sys.executable, str(STYLE), "--root", str(root)],
                          capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_a_clean_tree_has_no_faults(tmp_path):
    code, lines = run_style(tmp_path, {})
    assert code == 0, lines
    assert lines[-1].endswith(" 0 faults")


@pytest.mark.parametrize("rule", PLANTED)
def test_every_rule_finds_its_fault(tmp_path, rule):
    path, text = PLANTED[rule]
    code, lines = run_style(tmp_path, {path: text})
    assert code == 1
    found = [line for line in lines[:-1] if f"[{rule}]" in line]
    assert found and all(line.startswith(path + ":") for line in found), lines


@pytest.mark.parametrize("path,text", BORDERS)
def test_forbidden_includes_are_found(tmp_path, path, text):
    code, lines = run_style(tmp_path, {path: text})
    assert code == 1
    assert [line for line in lines[:-1] if line.startswith(f"{path}:7: [borders]")], lines


def test_a_page_begins_with_its_heading(tmp_path):
    assert run_style(tmp_path, {"kernels/README.md": "# kernels\n"})[0] == 0
    code, lines = run_style(tmp_path, {"kernels/README.md": "#kernels : formatted as C++\n"})
    assert code == 1 and lines[0].startswith("kernels/README.md:1: [opening]")


@pytest.mark.parametrize("name", ("test_strangers.py", "test_strangers_a.py"))
def test_missing_attacks_are_found(tmp_path, name):
    path = f"tests/e2e/{name}"
    test = {path: "# SPDX-License-Identifier: Apache-2.0\ndef test_a():\n    pass\n"}
    assert run_style(tmp_path, test)[0] == 1
    assert run_style(tmp_path, {**test, "tests/e2e/README.md": "# Attacks\n\n`test_a`\n"})[0] == 0


def test_numbers_of_tics_only_fall(tmp_path):
    listed = "tests/style_tics.txt"
    two = {"server/README.md": "# server\n\nNo" "body waits.\nIt is made an" "ew.\n"}
    code, lines = run_style(tmp_path, two)
    assert code == 1 and lines[0].startswith("server/README.md:3: [tics] 2 tics, at most 0: ")
    assert run_style(tmp_path, {**two, listed: "server/README.md 2\n"})[0] == 0
    for number in (1, 3):
        assert run_style(tmp_path, {**two, listed: f"server/README.md {number}\n"})[0] == 1
    code, lines = run_style(tmp_path, {**two, listed: "server/README.md 2\nserver/gone.md 1\n"})
    assert code == 1 and lines[0].startswith(f"{listed}:1: [tics]")


@pytest.mark.parametrize("comment", ("// One line.\n//\n// Of many.\n", "int a;  // Who\n",
                                     "/* What */\n"))
def test_comments_that_begin_with_a_tic_are_found(tmp_path, comment):
    text = GOOD["kernels/a.cc"]
    assert [line for line in run_style(tmp_path, {"kernels/a.cc": text + comment})[1]
            if "[tics] 1 tics" in line]
    said = 'const char* b = "// What";  // It says what.\n'
    assert not [line for line in run_style(tmp_path, {"kernels/a.cc": text + said})[1]
                if "[tics]" in line]


def test_a_source_named_by_foreach_is_known(tmp_path):
    cmake = CMAKE + "foreach(name b c)\n  add_executable(${name} ${name}_test.cc)\nendforeach()\n"
    test = {"kernels/CMakeLists.txt": cmake, "kernels/b_test.cc": HEAD + "int G() { return 1; }\n"}
    assert run_style(tmp_path, test)[0] == 0
    code, lines = run_style(tmp_path, {**test, "kernels/d_test.cc": test["kernels/b_test.cc"]})
    assert code == 1 and lines[0].startswith("kernels/d_test.cc:1: [built]")


def test_every_rule_has_a_planted_fault():
    out = subprocess.run([sys.executable, str(STYLE), "--list"], capture_output=True, text=True)
    assert out.returncode == 0
    assert {line.split()[0] for line in out.stdout.splitlines()} == {*PLANTED, "borders"}
