# SPDX-License-Identifier: Apache-2.0
"""deploy/prometheus/rules.yml in a real Prometheus, with durations shortened for tests, and the
pages to which its alerts lead."""

import collections
import http.client
import http.server
import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request

import harness

RULES = harness.ROOT / "deploy/prometheus/rules.yml"
PAGE = harness.ROOT / "deploy/operate.md"
# A minute of the rules takes this many milliseconds here: [5m] is 3 s, `for: 10m` is 6 s.
MINUTE_MS = 600
UNITS = {"s": 1 / 60, "m": 1, "h": 60}


def shortened(rules):
    """The rules with every duration shortened in this proportion, and nothing else changed."""
    def cut(match):
        milliseconds = int(match[2]) * UNITS[match[3]] * MINUTE_MS
        return f"{match[1]}{round(milliseconds)}ms{match[4]}"

    return re.sub(r"(?m)(\[|^ +for: )(\d+)([smh])(\]|$)", cut, rules)


def runbooks():
    """{alert: anchor}, for all alerts."""
    found = re.findall(r"- alert: (\w+)\n.*?runbook: deploy/operate\.md#(\S+)", RULES.read_text(),
                       re.S)
    assert len(found) == RULES.read_text().count("- alert:")
    return dict(found)


def sections():
    """{anchor: text} of the page's sections on failures."""
    page = PAGE.read_text()
    parts = re.split(r"(?m)^## (.+)\n", page)[1:]
    found = {}
    for title, text in zip(parts[::2], parts[1::2]):
        if "**Alert" in text:
            found[re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")] = text
    return found


def log_lines(section):
    """The events that a section says are in the log."""
    said = re.search(r"(?s)\*\*Log\.\*\*(.*?)(?:\n\n|\n- \*\*|\Z)", section)
    return re.findall(r"`([^`]+)`", said[1]) if said else []


class Relay:
    """Scrape targets for Prometheus: each instance is a path of one port, and leads to the server
    currently assigned to it, if any. Prometheus itself takes five seconds to pick up new
    targets."""

    def __init__(self):
        relay = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                relay.answer(self)

            def log_message(self, *_):
                pass

        self.addresses, self.scrapes = {}, collections.Counter()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # Prometheus has given up on a scrape
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def answer(self, request):
        instance = request.path[1:]
        address = self.addresses.get(instance)
        try:
            if address is None:
                raise OSError(f"{instance} has no server")
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            request.send_error(503, explain=str(error))
            return
        request.send_response(200)
        request.send_header("Content-Type", "text/plain; version=0.0.4")
        request.end_headers()
        request.wfile.write(text)
        self.scrapes[address] += 1

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Prometheus:
    """Debian's Prometheus with the shortened rules and these instances."""

    def __init__(self, folder, instances):
        self.folder = folder
        self.port = harness.free_port()
        self.relay = Relay()
        target = "127.0.0.1:%d" % self.relay.server.server_port
        (folder / "rules.yml").write_text(shortened(RULES.read_text()))
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 500ms, evaluation_interval: 250ms}\n"
            f"rule_files: [{folder}/rules.yml]\n"
            "scrape_configs:\n- job_name: attend\n  static_configs:\n" + "".join(
                f"  - targets: ['{target}']\n"
                f"    labels: {{instance: {each}, __metrics_path__: /{each}}}\n"
                for each in instances))
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml",
                 f"--storage.tsdb.path={folder}/data", "--query.lookback-delta=3s",
                 f"--web.listen-address=127.0.0.1:{self.port}"], stdout=log, stderr=log)

    def watch(self, instance, server):
        """Makes the instance lead to this server from now on. Returns after two scrapes, as
        Prometheus may have given up on the first one."""
        address = server.metrics_address
        before = self.relay.scrapes[address]
        self.relay.addresses[instance] = address
        harness.wait_for("a scrape", lambda: self.relay.scrapes[address] > before + 1, 60)

    def firing(self, instance):
        """{alert: its annotations} of those that fire."""
        try:
            url = f"http://127.0.0.1:{self.port}/api/v1/alerts"
            with urllib.request.urlopen(url, timeout=30) as answer:
                found = json.load(answer)["data"]["alerts"]
        except OSError:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            return {}
        return {each["labels"]["alertname"]: each["annotations"] for each in found
                if each["state"] == "firing" and each["labels"].get("instance") == instance}

    def value(self, name, instance):
        """The newest sample of its only series; None if there is none."""
        asked = urllib.parse.urlencode({"query": f'{name}{{instance="{instance}"}}'})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{asked}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    def stop(self):
        self.process.terminate()
        try:
            assert self.process.wait(30) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.relay.stop()
