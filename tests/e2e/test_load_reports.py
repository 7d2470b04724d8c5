# SPDX-License-Identifier: Apache-2.0
"""What attend-client load, compare and bench-local write: files that describe themselves as
client/load/README.md says, pictures, and verdicts."""

import json
import re
import struct
import xml.etree.ElementTree as ElementTree

import pytest

from harness import ROOT, run_client

LATENCY = {"count", "mean", "min", "p50", "p90", "p99", "p99.9", "max"}
SMALL = ("--shape", "B1,H1,L16,D64", "--warmup", "0.1")


def run_load(server, folder, *args, name="load", check=True):
    report = folder / f"{name}.json"
    done = run_client("load", "--server", server.address, *SMALL, "--json", report, *args,
                      check=check)
    return done, json.loads(report.read_text())


@pytest.fixture(scope="module")
def loads(server, tmp_path_factory):
    """Files that together have every field."""
    folder = tmp_path_factory.mktemp("loads")
    return [run_load(server, folder, *args)[1] for args in (
        ("--concurrency", "1:4:x2", "--duration", "0.5"),
        ("--rate", "50", "--duration", "0.3", "--stable", "--stability-percentage", "1000"),
        ("--search-p99", "1000", "--search-precision", "0.5", "--duration", "0.3", "--rate", "100",
         "--max-outstanding", "8"))]


def documented():
    """{field: type} of the README's table."""
    table = (ROOT / "client/load/README.md").read_text().split("## The JSON")[1]
    found = {}
    for names, kind in re.findall(r"^\| (`.*`) \| (\w+) \| .*\|$", table, re.M):
        found.update({name: kind for name in re.findall(r"`([^`]+)`", names)})
    assert len(found) > 70
    return found


def fields(value, path=""):
    """[(path, value)] of everything that is neither an object nor an array, latencies whole."""
    if isinstance(value, dict):
        if "count" in value and value.keys() <= LATENCY:
            return [(path, value)]
        return [one for key, each in value.items()
                for one in fields(each, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list):
        return [one for each in value for one in fields(each, path + "[]")]
    return [(re.sub(r"(?<=\.status\.)[A-Z_]+$", "CODE", path), value)]


def test_the_json_is_as_documented(loads):
    kinds, seen = documented(), set()
    types = {"string": str, "number": (int, float, type(None)), "bool": bool, "latency": dict}
    for path, value in (one for load in loads for one in fields(load)):
        assert path in kinds, f"{path} is not in client/load/README.md"
        assert isinstance(value, types[kinds[path]]), (path, value)
        assert isinstance(value, bool) == (kinds[path] == "bool"), (path, value)
        seen.add(path)
    assert not kinds.keys() - seen, "documented, but in no file"


def test_a_file_says_how_it_was_made(server, loads):
    load = loads[0]
    assert load["schema"] == "attend-load/1" and load["server"] == server.address
    assert f"load --server {server.address} --shape B1,H1,L16,D64" in load["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", load["started"])
    assert load["tool"]["version"] == load["server_info"]["version"]
    assert "cpu_flash" in load["server_info"]["kernels"]
    assert load["server_info"]["devices"][0]["name"] == "cpu"
    shape, = load["shapes"]
    assert (shape["heads_q"], shape["len_k"], shape["dim_v"]) == (1, 16, 64)


def test_a_range_is_a_row_each(loads):
    steps = loads[0]["steps"]
    assert [step["concurrency"] for step in steps] == [1, 2, 4]
    for step in steps:
        assert len(step["windows"]) == 5
        assert sum(step["latency_histogram_ms"]["count"]) == step["status"]["OK"]
        answered = sum(w["requests_per_s"] * w["elapsed_s"] for w in step["windows"])
        assert abs(answered - step["requests_per_s"] * step["elapsed_s"]) < 1e-6 * answered + 0.01


def test_a_stable_load_reports_three_windows(loads):
    step, = loads[1]["steps"]
    assert step["stability"]["stable"] and abs(step["elapsed_s"] - 0.9) < 1e-9
    assert [window["reported"] for window in step["windows"]][-3:] == [True] * 3
    assert loads[1]["options"]["stability_percentage"] == 1000


def test_an_unstable_load_says_so(server, tmp_path):
    """Windows that take turns at being fast cannot be made here; one percent in ten thousand of a
    load's noise can."""
    done, load = run_load(server, tmp_path, "--concurrency", "2", "--duration", "0.05", "--stable",
                          "--stability-percentage", "0.01", "--max-trials", "3", check=False)
    assert done.returncode == 3 and "NOT STABLE after 3 windows, asked for 0.01 %" in done.stdout
    step, = load["steps"]
    assert not step["stability"]["stable"] and len(step["windows"]) == 3


@pytest.mark.parametrize("args,words", [
    (["--concurrency", "8:1"], ["--concurrency 8:1", "ends before it begins"]),
    (["--rate", "1:8:x1"], ["--rate 1:8:x1", "above 1"]),
    (["--max-trials", "5"], ["--max-trials", "--stable"]),
    (["--stable", "--count", "5"], ["--stable", "--count"]),
    (["--plot", "x.pdf"], ["x.pdf", ".svg or .png"]),
    (["--plot", "/nonexistent/x.svg"], ["/nonexistent/x.svg"]),
], ids=str)
def test_bad_use(server, args, words):
    done = run_client("load", "--server", server.address, *args, check=False)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1 and not done.stdout
    assert all(word in done.stderr for word in words), done.stderr


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_pictures(server, tmp_path):
    svg, png = tmp_path / "load.svg", tmp_path / "load.png"
    for path in (svg, png):
        run_load(server, tmp_path, "--concurrency", "1:2:x2", "--duration", "0.2", "--plot", path)
    root = ElementTree.parse(svg).getroot()
    words = {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"requests/s answered", "latency, ms", "p50", "p99.9", "kernel", "copy in", "x2",
            "mean time of a call, ms", "Histogram of latencies"} <= words
    width, height = png_size(png)
    assert (width, height) == (2 * float(root.get("width")), 2 * float(root.get("height")))


def test_compare(server, tmp_path):
    for name in ("a", "b"):
        run_load(server, tmp_path, "--concurrency", "1:2:x2", "--duration", "0.3", name=name)
    a, b, plot = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "both.png"
    done = run_client("compare", a, b, "--plot", plot)
    assert len(re.findall(r"^(closed x\d)? +(requests/s|p50 ms|p99 ms) .*(higher|lower|noise)$",
                          done.stdout, re.M)) == 6, done.stdout
    assert png_size(plot)[0] > 500
    same = run_client("compare", a, a)
    assert same.stdout.count(" 1.000 ") == 6 == same.stdout.count("within noise")
    slower = json.loads(a.read_text())
    for step in slower["steps"]:
        for figures in (step, *step["windows"]):
            figures["requests_per_s"] /= 100
    b.write_text(json.dumps(slower))
    assert run_client("compare", a, b).stdout.count("  lower") == 2
    b.write_text("{}")
    bad = run_client("compare", a, b, check=False)
    assert bad.returncode == 2 and "b.json" in bad.stderr and "schema" in bad.stderr


def test_bench_local(start_server, tmp_path):
    server = start_server("--shared-memory", "--shared-memory-socket", tmp_path / "shm.sock")
    report, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    done = run_client("bench-local", "--device", "cpu", "--against", server.address, "--duration",
                      "0.3", "--warmup", "0.1", "--shape", "B1,H2,L64,D64,causal", "--shape",
                      "B2,H2,Lq1,Lk300,D64,dtype=float16,ragged", "--json", report, "--plot", plot)
    bench = json.loads(report.read_text())
    assert bench["schema"] == "attend-bench-local/1" and bench["device"] == "cpu"
    assert len(bench["shapes"]) == 2
    for shape in bench["shapes"]:
        here, inline, shared = shape["ways"]
        assert (here["way"], inline["way"], shared["way"]) == \
            ("here, cpu", "served, inline", "served, shared memory")
        assert here["client_verification"]["passed"] > 0
        assert here["client_verification"]["failed"] == 0
        for way in shape["ways"]:
            assert way["kernel"] == here["kernel"] and way["latency_ms"]["count"] > 0
            assert way["phase_mean_ms"]["kernel"] <= way["latency_ms"]["mean"]
        assert inline["phase_mean_ms"]["network"] > 0 == here["phase_mean_ms"]["network"]
    assert done.stdout.count("times as long as here") == 4
    assert "served, shared memory" in plot.read_text()


def test_bad_use_of_bench_local():
    for args, words in ((("--device", "tpu"), "auto, cpu or cuda:N"),
                        (("--shape", "B1,H1,L8,D8,backward"), "excludes backward"),
                        (("--device", "cuda:99"), "cuda:99")):
        done = run_client("bench-local", *args, check=False)
        assert done.returncode == 2 and words in done.stderr, done.stderr
    done = run_client("bench-local", "--against", "127.0.0.1:1", "--device", "cpu", check=False)
    assert done.returncode == 1 and "UNAVAILABLE" in done.stderr
