# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes on a cluster of three nodes: operations on a fleet under load, with every call
counted. tests/fleet/run starts it; README.md lists the files it writes."""

import argparse
import base64
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import yaml

import cluster
from cluster import run, wait_for

ROOT = pathlib.Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy/kubernetes"
NAMESPACE = "serving"
# Calls: 100 a second, or enough that each server always has some in flight.
STEADY = ("--shape", "B1,H4,L64,D64", "--rate", "100", "--arrivals", "constant")
CALLERS = 6
DEADLINE_SECONDS = 5
BUSY = ("--shape", "B1,H8,L512,D64", "--concurrency", str(CALLERS))
AGE_SECONDS = 60 * 1.1  # of connections, in the base, and what gRPC may add to it
# This machine is less than three nodes; Kubernetes 1.20 has the budget's kind in an older version.
SMALL = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
OLDER = {"policy/v1": "policy/v1beta1"}
started = time.monotonic()


def say(text):
    print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)


class Failed(Exception):
    """A step had an unexpected outcome."""


def check(what, good):
    if not good:
        raise Failed(what)


class Load:
    """attend-client load over DNS, until the block ends."""

    def __init__(self, fleet, *flags):
        self.fleet, self.flags = fleet, flags or STEADY
        self.result = None
        self.json = fleet.work / "load.json"

    def __enter__(self):
        self.json.unlink(missing_ok=True)
        self.process = self.fleet.client(
            "load", *self.flags, "--warmup", 1, "--duration", 3600, "--attempts", 5,
            "--deadline-ms", DEADLINE_SECONDS * 1000, "--quiet", "--json", self.json)
        time.sleep(2)  # the warm-up is over: calls are counted from here on
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            time.sleep(DEADLINE_SECONDS + 1)  # a call that hangs has failed by then
        self.process.send_signal(signal.SIGINT)
        said, _ = self.process.communicate(timeout=60)
        if kind is None:
            check(f"attend-client load: {said[-1000:]}", self.json.exists())
            self.result = json.loads(self.json.read_text())["steps"][0]

    @property
    def calls(self):
        return sum(self.result["status"].values())

    @property
    def failed(self):
        """The unanswered ones were sent just before the interrupt."""
        return self.calls - self.result["status"].get("OK", 0)

    def row(self, what, seconds):
        servers = self.result["servers"]
        slowest = self.result["latency_from_sent_ms"]["max"]
        return (what, f"{seconds:.0f} s", self.calls, self.failed, self.result["retries"],
                len(servers), f"{slowest:.0f} ms")


class Fleet:
    def __init__(self, arguments):
        self.work, self.client_program = arguments.work, arguments.client
        self.kubectl_new = arguments.kubectl
        self.kubernetes = (arguments.programs.parent / "version").read_text().strip()
        self.cluster = cluster.Cluster(self.work, arguments.programs, arguments.images, NAMESPACE,
                                       "attend")
        self.rows = []

    def client(self, *arguments):
        secrets = self.work / "secrets"
        return subprocess.Popen(
            [str(a) for a in (
                self.client_program, *arguments, "--server",
                f"dns:///{self.cluster.name}:8001", "--tls-ca", secrets / "ca.pem",
                "--token-file", secrets / "client.token")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def render(self, overlay):
        """An overlay like a user's own kustomization, in the API versions of Kubernetes 1.20."""
        folder = self.work / "own"
        folder.mkdir(exist_ok=True)
        up = os.path.relpath(MANIFESTS / overlay, folder)
        (folder / "kustomization.yaml").write_text(yaml.safe_dump({
            "namespace": NAMESPACE, "resources": [up],
            "images": [{"name": "attend", "newName": "localhost/attend", "newTag": "test"}]}))
        objects = list(yaml.safe_load_all(run(self.kubectl_new, "kustomize", folder)))
        for x in objects:
            x["apiVersion"] = OLDER.get(x["apiVersion"], x["apiVersion"])
            if x["kind"] in ("Deployment", "DaemonSet"):
                x["spec"]["template"]["spec"]["containers"][0]["resources"] = SMALL
        return objects

    def apply(self, objects, *flags):
        return self.cluster.kubectl("apply", *flags, "-f", "-", input=yaml.safe_dump_all(objects))

    def pods(self, **labels):
        selector = ",".join(f"app.kubernetes.io/{k}={v}" for k, v in labels.items())
        return self.cluster.get("pods", "-l", selector)["items"]

    def settle(self, count):
        """Waits until this many servers are ready and no others exist; returns the time it took."""
        return wait_for(f"{count} servers", lambda: len(self.cluster.endpoints()) == count ==
                        len(self.pods(component="server")))[1]

    def query(self, text):
        """Prometheus's answer as {instance: value}."""
        url = "http://127.0.0.1:9090/api/v1/query?" + urllib.parse.urlencode({"query": text})
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
        return {x["metric"].get("instance"): float(x["value"][1]) for x in found}

    def start(self):
        c = self.cluster
        c.start_control_plane()
        for n in range(cluster.NODES):
            c.start_node(n)
        wait_for("nodes", lambda: len(c.ready_nodes()) == cluster.NODES)
        say(f"{cluster.NODES} nodes are ready")
        c.start_dns()
        made = run(MANIFESTS / "make-secrets", self.work / "secrets", NAMESPACE)
        c.kubectl("apply", "-f", "-", input=made)
        self.apply(self.render("base"))
        took = self.settle(cluster.NODES)
        nodes = {p["spec"]["nodeName"] for p in self.pods(component="server")}
        check(f"servers are on {nodes}", len(nodes) == cluster.NODES)
        say(f"applied: {cluster.NODES} servers on as many nodes after {took:.0f} s")
        say(f"memory in MiB: {c.memory_mib()}")

    def start_prometheus(self):
        """As an operator would set it up: TLS, token, rules. Debian's has no support for
        Kubernetes, and finds the servers by the Service's name."""
        secrets = self.work / "secrets"
        monitor = next(x for x in self.render("overlays/monitoring")
                       if x["kind"] == "ServiceMonitor")["spec"]["endpoints"][0]
        (self.work / "prometheus.yml").write_text(yaml.safe_dump({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "deploy/prometheus/rules.yml")],
            "scrape_configs": [{
                "job_name": "attend", "scheme": monitor["scheme"],
                "tls_config": {"ca_file": str(secrets / "ca.pem"),
                               "server_name": monitor["tlsConfig"]["serverName"]},
                "authorization": {"credentials_file": str(secrets / "scraper.token")},
                "dns_sd_configs": [{"names": [self.cluster.name], "type": "A", "port": 8002,
                                    "refresh_interval": "2s"}]}]}))
        self.cluster.start("prometheus", "prometheus",
                           f"--config.file={self.work}/prometheus.yml",
                           f"--storage.tsdb.path={self.work}/prometheus",
                           "--web.listen-address=127.0.0.1:9090")

    def count(self, what, load, seconds):
        self.rows.append(load.row(what, seconds))
        say(f"{what} in {seconds:.0f} s: {load.result['status']}, {load.result['retries']} "
            f"retries, {[s['ok'] for s in load.result['servers']]} by server")
        check(f"{load.failed} calls failed", load.failed == 0)

    def balance(self):
        with Load(self) as load:
            time.sleep(5)
        self.count("nothing, three servers", load, 5)
        least, *_, most = sorted(s["ok"] for s in load.result["servers"])
        check(f"servers had {least} to {most} calls", len(load.result["servers"]) == 3 and
              most - least <= load.calls * 0.02)

    def update(self):
        with Load(self) as load:
            start = time.monotonic()
            self.cluster.kubectl("rollout", "restart", "deployment/attend")
            self.cluster.kubectl("rollout", "status", "deployment/attend", "--timeout=180s")
            self.settle(3)
            took = time.monotonic() - start
        self.count("rolling update of all three", load, took)

    def scale(self):
        with Load(self) as load:
            self.cluster.kubectl("scale", "deployment/attend", "--replicas=2")
            took = self.settle(2)
        self.count("scaled from 3 to 2", load, took)
        with Load(self) as load:
            self.cluster.kubectl("scale", "deployment/attend", "--replicas=3")
            took = self.settle(3)
            new = max(self.pods(component="server"),
                      key=lambda p: p["metadata"]["creationTimestamp"])["status"]["podIP"]
            used = wait_for("calls on the new server", lambda: self.query(
                f'attend_requests_total{{code="OK",instance="{new}:8002"}}').get(f"{new}:8002"),
                AGE_SECONDS + 30)[1]
        self.count(f"scaled from 2 to 3; it had calls after {used:.0f} s more", load, took)

    def kill(self):
        """Calls in flight there are retried elsewhere."""
        with Load(self, *BUSY) as load:
            pids = [int(p) for p in run("pgrep", "-f", "attend-server --tls-cert").split()]
            check(f"{len(pids)} servers run", len(pids) == 3)
            os.kill(pids[0], signal.SIGKILL)
            start = time.monotonic()
            wait_for("its restart", lambda: sum(p["status"]["containerStatuses"][0]["restartCount"]
                                                for p in self.pods(component="server")) == 1)
            self.settle(3)
            took = time.monotonic() - start
        self.count("one of three servers killed (SIGKILL), all busy", load, took)
        check(f"{load.result['retries']} retries", 1 <= load.result["retries"] <= CALLERS)

    def drain(self):
        node = self.pods(component="server")[0]["spec"]["nodeName"]
        with Load(self) as load:
            start = time.monotonic()
            self.cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data",
                                 "--timeout=120s")
            self.settle(3)
            took = time.monotonic() - start
        self.count("a node drained", load, took)
        self.cluster.kubectl("uncordon", node)

    def see_metrics(self):
        """All servers are in Prometheus, with their own counts and the rules' recordings."""
        addresses = {f"{a}:8002" for a in self.cluster.endpoints()}
        with Load(self):
            up = wait_for("all of them up", lambda: set(x for x, v in self.query(
                'up{job="attend"}').items() if v == 1) == addresses and addresses)[0]
            for expression in ('attend_requests_total{code="OK"} > 0',
                               'attend:requests:rate1m{code="OK"} > 0'):
                wait_for(expression, lambda e=expression: set(self.query(e)) >= addresses)
            for text in manifest_queries(self.render("overlays/keda")):
                answer = self.query(text)
                check(f"{text}: {answer}", len(answer) == 1)
                say(f"KEDA would see {answer[None]:.3f}: {' '.join(text.split())}")
        say(f"Prometheus has {len(up)} servers, each with its own calls")

    def finished(self, pod):
        state = self.cluster.get("pod", pod)["status"]["phase"]
        if state == "Failed":
            raise Failed(f"{pod}: " + self.cluster.kubectl("logs", pod))
        return state == "Succeeded"

    def call_from_a_pod(self):
        """The README's own example, through the cluster's DNS."""
        page = (MANIFESTS / "README.md").read_text()
        pod = next(x for x in map(yaml.safe_load, page.split("```yaml\n")[1:][0].split("```")[:1]))
        container = pod["spec"]["containers"][0]
        container["image"] = "localhost/attend:test"
        container["env"][0]["value"] = f"dns:///{self.cluster.name}:8001"
        self.apply([pod])
        wait_for("the caller", lambda: self.finished("caller"))
        say("a pod called: " + self.cluster.kubectl("logs", "caller").strip().splitlines()[-1])

    def serve_the_node(self):
        """overlays/node-local on one node, as the others share its file system, and a pod there."""
        objects = self.render("overlays/node-local")
        daemons = next(x for x in objects if x["kind"] == "DaemonSet")
        here = {"kubernetes.io/hostname": "node0"}
        daemons["spec"]["template"]["spec"]["nodeSelector"] = here
        self.apply(objects)
        status = ("rollout", "status", "daemonset/attend-node", "--timeout=120s")
        self.cluster.kubectl(*status)
        # A successor finds the folder and its sockets.
        self.cluster.kubectl("rollout", "restart", "daemonset/attend-node")
        self.cluster.kubectl(*status)
        self.apply([{
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "neighbour"},
            "spec": {
                "restartPolicy": "Never", "nodeSelector": here,
                "securityContext": {"runAsUser": 20000, "runAsGroup": 20000,
                                    "supplementalGroups": [10001]},
                "volumes": [{"name": "sockets", "hostPath": {"path": "/run/attend"}}],
                "containers": [{
                    "name": "neighbour", "image": "localhost/attend:test",
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["attend-client", "check", "--quick", "--transport", "shm"],
                    "env": [{"name": "ATTEND_SERVER", "value": "unix:/run/attend/grpc.sock"}],
                    "volumeMounts": [{"name": "sockets", "mountPath": "/run/attend"}]}]}}])
        wait_for("the neighbour", lambda: self.finished("neighbour"))
        said = self.cluster.kubectl("logs", "neighbour").strip().splitlines()[-1]
        say(f"node-local: a pod of another user called over shared memory: {said}")

    def admit(self):
        """Validation errors that the API server reports for the other manifests."""
        for overlay in ("gpu", "trial"):
            self.apply(self.render(f"overlays/{overlay}"), "--dry-run=server")
        say("the API server takes the overlays gpu and trial (dry run)")

    def report(self):
        print(f"\n{time.strftime('%d %b %Y')}, Kubernetes {self.kubernetes}, {os.cpu_count()} "
              f"cores, Linux {platform.release()}\n")
        print("| What happened | Took | Calls | Failed | Retries | Servers that answered | "
              "Slowest |")
        print("|---|---|---|---|---|---|---|")
        for row in self.rows:
            print("| " + " | ".join(str(cell) for cell in row) + " |")


def manifest_queries(objects):
    return [t["metadata"]["query"] for x in objects if x["kind"] == "ScaledObject"
            for t in x["spec"]["triggers"]]


def main():
    parser = argparse.ArgumentParser()
    for name in ("work", "programs", "images", "client", "kubectl"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--inside", action="store_true")
    arguments = parser.parse_args()
    if not arguments.inside:
        code = cluster.enter(sys.executable, *sys.argv, "--inside")
        cluster.clean_cgroups()
        return code
    fleet = Fleet(arguments)
    try:
        fleet.start()
        fleet.start_prometheus()
        for step in (fleet.admit, fleet.call_from_a_pod, fleet.balance, fleet.update, fleet.scale,
                     fleet.kill, fleet.drain, fleet.see_metrics, fleet.serve_the_node):
            step()
    except (Failed, RuntimeError) as error:
        say(f"FAILED: {error}")
        for name, lines in fleet.cluster.log_tails():
            print(f"--- {name}", *lines, sep="\n")
        return 1
    fleet.report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
