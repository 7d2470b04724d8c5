# SPDX-License-Identifier: Apache-2.0
"""Reports of attend-client load, compare and bench-local: files with the fields of
client/load/README.md, plots, and verdicts."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from harness import ROOT, run_client

LATENCY = {"count", "mean", "min", "p50", "p90", "p99", "p99.9", "max"}
SMALL = ("--shape", "B1,H1,L16,D64", "--warmup", "0.1")


def run_load(server, folder, *more, args=SMALL, name="load", check=True):
    report = folder / f"{name}.json"
    done = run_client("load", "--server", server.address, *args, "--json", report, *more,
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


def expand(name):
    """a.{b,c}.d stands for a.b.d and a.c.d."""
    parts = re.fullmatch(r"([^{]*){([^}]*)}(.*)", name)
    return [parts[1] + each + parts[3] for each in parts[2].split(",")] if parts else [name]


def table(page, language):
    """{field: type} of the page's block of that language. A line has names, their type and their
    meaning; a line with only a prefix applies to the indented lines below it."""
    text = (ROOT / page).read_text().split(f"\n```{language}\n")[1].split("\n```")[0]
    found, prefix = {}, ""
    for line in text.splitlines():
        if " " not in line:
            prefix = line
            continue
        names, kind = re.match(r" *(.*?) +(string|number|bool|latency)\b", line).groups()
        for name in names.split(", "):
            found.update({(prefix if line[0] == " " else "") + each: kind
                          for each in expand(name)})
    return found


LOAD = table("client/load/README.md", "load-fields")
FACTS = {name: kind for name, kind in LOAD.items() if name.split(".")[0] in
         ("schema", "tool", "command", "started", "host", "server_info")}


def fields(value, path=""):
    """[(path, value)] of everything that is neither an object nor an array; latencies are not
    split."""
    if isinstance(value, dict):
        if "count" in value and value.keys() <= LATENCY:
            return [(path, value)]
        return [one for key, each in value.items()
                for one in fields(each, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list):
        return [one for each in value for one in fields(each, path + "[]")]
    return [(re.sub(r"\.(status|failures)\.[A-Z_]+$", r".\1.CODE", path), value)]


def check_fields(files, kinds):
    """Every field is in `kinds` with its type, and each of those occurs in a file."""
    seen = set()
    types = {"string": str, "number": (int, float, type(None)), "bool": bool, "latency": dict}
    for path, value in (one for file in files for one in fields(file)):
        assert path in kinds, f"{path} is not documented"
        assert isinstance(value, types[kinds[path]]), (path, value)
        assert isinstance(value, bool) == (kinds[path] == "bool"), (path, value)
        seen.add(path)
    assert not kinds.keys() - seen, "documented, but in no file"


def test_the_json_is_as_documented(loads):
    assert len(LOAD) > 70 > len(FACTS) > 12
    check_fields(loads, LOAD)


def test_the_json_of_sessions_is_as_documented(server, start_server, tmp_path):
    _, good = run_load(server, tmp_path, "--shape", "H2,Hkv1,D16", "--sessions", "1:2", "--context",
                       "20", "--decode", "4", "--fork-share", "0.5", "--verify", "1", args=())
    assert good["schema"] == "attend-load-sessions/1"
    small = start_server("--session-memory", "8MiB")  # the prompt takes 13 MiB
    done, refused = run_load(small, tmp_path, "--shape", "H8,Hkv8,D256", "--sessions", "1",
                             "--context", "100", "--layers", "8", args=(), check=False)
    assert done.returncode == 1, done.stderr
    check_fields([good, refused],
                 FACTS | table("client/load/README.md", "session-fields"))


def test_a_result_file_names_its_settings(server, loads):
    load = loads[0]
    assert load["schema"] == "attend-load/1" and load["server"] == server.address
    assert f"load --server {server.address} --shape B1,H1,L16,D64" in load["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", load["started"])
    assert load["tool"]["version"] == load["server_info"]["version"]
    assert "cpu_flash" in load["server_info"]["kernels"]
    assert load["server_info"]["devices"][0]["name"] == "cpu"
    shape, = load["shapes"]
    assert (shape["heads_q"], shape["len_k"], shape["dim_v"]) == (1, 16, 64)


def test_each_value_of_a_range_is_a_row(loads):
    steps = loads[0]["steps"]
    assert [step["concurrency"] for step in steps] == [1, 2, 4]
    for step in steps:
        assert len(step["windows"]) == 5
        assert sum(step["latency_histogram_ms"]["count"]) == step["status"]["OK"]
        answered = sum(w["requests_per_s"] * w["elapsed_s"] for w in step["windows"])
        assert abs(answered - step["requests_per_s"] * step["elapsed_s"]) < 1e-6 * answered + 0.01


def words_of(picture):
    root = ElementTree.parse(picture).getroot()
    return {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}


def test_a_plot_is_drawn_from_result_files(server, tmp_path):
    svg = tmp_path / "load.svg"
    run_load(server, tmp_path, "--concurrency", "1:2:x2", "--duration", "0.2", "--plot", svg)
    assert {"requests/s answered", "latency, ms", "p50", "p90", "kernel", "x2",
            "mean time of a call, ms", "Histogram of latencies"} <= words_of(svg)


def scaled(path, to, factor):
    """The load of `path` with its rates multiplied, as if from another run."""
    load = json.loads(path.read_text())
    for step in load["steps"]:
        for figures in (step, *step["windows"]):
            figures["requests_per_s"] *= factor
    to.write_text(json.dumps(load))
    return to


def verdicts(out, figure):
    return re.findall(rf"^(?:closed x\d)? +{figure} .*\d  (\D.*)$", out, re.M)


def test_compare_shows_the_difference_of_two_results(server, tmp_path):
    a = tmp_path / "a0.json"
    run_load(server, tmp_path, "--concurrency", "1:2:x2", "--duration", "0.3", name="a0")
    before = [a] + [scaled(a, tmp_path / f"a{n}.json", 1 + n / 100) for n in (1, 2)]
    after = [scaled(a, tmp_path / f"b{n}.json", 0.8 + n / 100) for n in range(3)]
    plot = tmp_path / "all.svg"
    done = run_client("compare", "--before", *before, "--after", *after, "--plot", plot)
    assert verdicts(done.stdout, "requests/s") == ["lower"] * 2, done.stdout
    assert verdicts(done.stdout, "p50 ms") == ["the runs' ranges overlap"] * 2
    assert "not the same" not in done.stdout and {"a0.json p50", "b2.json p50"} <= words_of(plot)
    two = run_client("compare", "--before", *before[:2], "--after", *after)
    assert verdicts(two.stdout, "requests/s") == ["fewer than 3 runs a side"] * 2


def test_one_file_a_side_shows_no_difference(server, tmp_path):
    """Even a factor of a hundred might be due to the machine."""
    run_load(server, tmp_path, "--concurrency", "1:2:x2", "--duration", "0.3", name="a")
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    same = run_client("compare", a, a).stdout
    assert same.count(" 1.000 ") == 6
    assert verdicts(same, "p50 ms") == ["within the windows' range"] * 2
    slower = run_client("compare", a, scaled(a, b, 0.01)).stdout
    assert verdicts(slower, "requests/s") == \
        ["beyond the windows' range; run-to-run noise unknown"] * 2
    assert not re.search("higher|lower| in 126", same + slower)


def test_compare_names_the_settings_that_differ(server, tmp_path):
    load = ("--concurrency", "1", "--duration", "0.2")
    run_load(server, tmp_path, *load, name="a")
    run_load(server, tmp_path, *load, "--check", "1", "--discard-output", "--pool", "1", name="b")
    out = run_client("compare", tmp_path / "a.json", tmp_path / "b.json").stdout
    assert re.findall("not the same: (.*)", out) == \
        ["options.check_share: 0.0 | 1.0", "options.discard_output: false | true",
         "options.pool: 4 | 1"], out


def test_compare_has_no_verdict_on_unstable_measurements(server, tmp_path):
    run_load(server, tmp_path, "--duration", "0.05", "--stable", "--stability-percentage", "0.01",
             "--max-trials", "3", check=False)
    file = tmp_path / "load.json"
    out = run_client("compare", file, file).stdout
    assert verdicts(out, "requests/s") == ["NOT STABLE"]


def test_bad_use_of_compare_is_reported(tmp_path):
    bad = tmp_path / "b.json"
    bad.write_text("{}")
    for args, words in (((bad, bad), "b.json"), (("--before", bad), "--after"), ((), "--before"),
                        (("--before", bad, bad, "--after", bad), "twice"), ((bad,), "FILES"),
                        ((bad, bad, "--after", bad), "excludes")):
        done = run_client("compare", *args, check=False)
        assert done.returncode == 2 and words in done.stderr, (args, done.stderr)


def test_bench_local(start_server, tmp_path):
    server = start_server("--shared-memory", "--shared-memory-socket", tmp_path / "shm.sock")
    report, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    done = run_client("bench-local", "--device", "cpu", "--against", server.address, "--duration",
                      "0.3", "--warmup", "0.02", "--rounds", "3", "--pool", "2", "--shape",
                      "B1,H2,L64,D64,causal", "--shape",
                      "B2,H2,Lq1,Lk300,D64,dtype=float16,ragged", "--shape",
                      "B4,H8,Lq1,Lk600,D64", "--json", report, "--plot", plot, timeout=120)
    bench = json.loads(report.read_text())
    check_fields([bench], FACTS | table("client/local/README.md", "bench-local-fields"))
    assert bench["schema"] == "attend-bench-local/1" and bench["device"] == "cpu"
    assert len(bench["shapes"]) == 3
    for shape in bench["shapes"]:
        here, inline, shared, in_place = shape["ways"]
        assert [way["way"] for way in shape["ways"]] == \
            ["here, cpu", "served, inline", "served, shared memory",
             "served, made in shared memory"]
        for way in shape["ways"]:
            assert way["client_verification"]["passed"] > 0
            assert way["client_verification"]["failed"] == 0
            assert way["kernel"] == here["kernel"] and way["latency_ms"]["count"] >= 3
            assert len(way["round_mean_ms"]) == 3
            parts = way["phase_mean_ms"]
            assert parts["kernel"] <= parts["total"] <= way["latency_ms"]["mean"]
            # Nothing is left out: the parts add up to the call.
            together = parts["client"] + parts["total"] + parts["network"]
            assert abs(together - way["latency_ms"]["mean"]) < 1e-3 * together
        assert here["phase_mean_ms"]["network"] == 0 == here["phase_mean_ms"]["client"]
        assert min(way["phase_mean_ms"]["client"] for way in (inline, shared)) > 0
    # 9 MiB of K and V, copied unless they were made in shared memory.
    for way in (inline, in_place):
        assert shared["phase_mean_ms"]["client"] > way["phase_mean_ms"]["client"]
    assert done.stdout.count("times as long as here") == 9
    assert "served, shared memory" in plot.read_text() and ">client<" in plot.read_text()


def test_bad_use_of_bench_local_is_reported():
    for args, words in ((("--device", "tpu"), "auto, cpu or cuda:N"),
                        (("--shape", "B1,H1,L8,D8,backward"), "excludes backward"),
                        (("--device", "cuda:99"), "cuda:99")):
        done = run_client("bench-local", *args, check=False)
        assert done.returncode == 2 and words in done.stderr, done.stderr
    done = run_client("bench-local", "--against", "127.0.0.1:1", "--device", "cpu", check=False)
    assert done.returncode == 1 and "UNAVAILABLE" in done.stderr
