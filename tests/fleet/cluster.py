# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes of several nodes on one machine: Debian's etcd, the programs of build-kubernetes,
and for each node a kubelet and Debian's containerd with a bridge. It runs in separate namespaces
(network, mounts, processes), which `enter` makes: nothing listens outside of them, and everything
ends with its process."""

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import threading
import time

NODES = 3
API, DNS = "10.0.0.1", "10.0.0.1"
# System settings that a kubelet would make and that it checks at its start.
SYSCTLS = {"vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10,
           "kernel/panic_on_oops": 1, "kernel/keys/root_maxkeys": 1000000,
           "kernel/keys/root_maxbytes": 25000000}
PR_SET_PDEATHSIG = 1


def run(*command, **options):
    """Runs a command that must succeed; returns its stdout."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(str(c) for c in command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def wait_for(what, condition, seconds=120):
    """Polls until condition(), which may raise, is true. Returns its value and the time it took."""
    start = time.monotonic()
    error = None
    while time.monotonic() - start < seconds:
        try:
            value = condition()
            if value:
                return value, time.monotonic() - start
        except (RuntimeError, OSError, LookupError, ValueError) as failed:
            error = failed
        time.sleep(0.1)
    raise RuntimeError(f"waited {seconds} s for {what}" + (f": {error}" if error else ""))


def enter(*command):
    """Runs the command in namespaces for a cluster. Returns its exit code."""
    return subprocess.call(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
         "--propagation", "private", *command])


def clean_cgroups():
    """Removes files of containers that ended with their namespace."""
    for group in pathlib.Path("/sys/fs/cgroup").iterdir():
        for folder, _, _ in os.walk(group / "k8s.io", topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


class Cluster:
    def __init__(self, work, programs, images, namespace, service):
        """`images`: an archive that every node imports. DNS resolves `service` in `namespace`."""
        self.work, self.programs, self.images = work, programs, images
        self.namespace, self.service = namespace, service
        self.name = f"{service}.{namespace}.svc.cluster.local"
        self.processes = {}
        # Files that kubelets, containerd and CNI leave in the machine's folders.
        for folder in ("/run", "/var/log", "/var/lib"):
            run("mount", "-t", "tmpfs", "none", folder)
        self._bind_files()
        self._make_network()

    def _bind_files(self):
        files = {f"/proc/sys/{name}": value for name, value in SYSCTLS.items()}
        files["/etc/resolv.conf"] = f"nameserver {DNS}"
        for path, text in files.items():
            file = self.work / path.strip("/").replace("/", "-")
            file.write_text(f"{text}\n")
            run("mount", "--bind", file, os.path.realpath(path))

    def _make_network(self):
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "nodes", "type", "bridge")
        for n in range(NODES + 1):
            run("ip", "addr", "add", f"10.0.0.{n + 1}/24", "dev", "nodes")
        run("ip", "link", "set", "nodes", "up")
        # A kubelet requires a default route.
        run("ip", "route", "add", "default", "via", API, "dev", "nodes")
        pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def start(self, name, *command, **options):
        def end_with_parent():
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        with open(self.work / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(c) for c in command], stdout=log, stderr=log, cwd=self.work,
                preexec_fn=end_with_parent, **options)
        return self.processes[name]

    def kubectl(self, *arguments, **options):
        return run(self.programs / "kubectl", "--kubeconfig", self.work / "config", "-n",
                   self.namespace, *arguments, **options)

    def get(self, *arguments):
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def start_control_plane(self):
        w, etcd = self.work, "http://127.0.0.1:2379"
        self.start("etcd", "etcd", "--data-dir", w / "etcd", "--listen-client-urls", etcd,
                   "--advertise-client-urls", etcd, "--unsafe-no-fsync")
        run("openssl", "genrsa", "-out", w / "accounts.key", "2048")
        (w / "tokens").write_text("test-token,admin,1,system:masters\n")
        (w / "tokens").chmod(0o600)
        self.start(
            "kube-apiserver", self.programs / "kube-apiserver", f"--etcd-servers={etcd}",
            f"--bind-address={API}", f"--advertise-address={API}", "--secure-port=6443",
            f"--cert-dir={w}/certs", f"--token-auth-file={w}/tokens", "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged=true",
            f"--service-account-key-file={w}/accounts.key",
            f"--service-account-signing-key-file={w}/accounts.key",
            "--service-account-issuer=https://test", "--kubelet-preferred-address-types=InternalIP")
        (w / "config").write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"https://{API}:6443",
                                                      "insecure-skip-tls-verify": True}}],
            "users": [{"name": "test", "user": {"token": "test-token"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}]}))
        wait_for("the API server", lambda: self.kubectl("get", "--raw", "/readyz") == "ok")
        self.start("kube-controller-manager", self.programs / "kube-controller-manager",
                   f"--kubeconfig={w}/config", "--leader-elect=false",
                   f"--service-account-private-key-file={w}/accounts.key")
        self.start("kube-scheduler", self.programs / "kube-scheduler",
                   f"--kubeconfig={w}/config", "--leader-elect=false")
        self.kubectl("create", "namespace", self.namespace)
        wait_for("its account", lambda: self.kubectl("get", "serviceaccount", "default"))

    def start_node(self, n):
        w = self.work / f"node{n}"
        (w / "cni").mkdir(parents=True)
        (w / "cni/10-pods.conflist").write_text(json.dumps({
            "cniVersion": "0.4.0", "name": "pods", "plugins": [{
                "type": "bridge", "bridge": f"pods{n}", "isGateway": True, "hairpinMode": True,
                "ipam": {"type": "host-local", "dataDir": f"{w}/addresses",
                         "ranges": [[{"subnet": f"10.244.{n}.0/24"}]],
                         "routes": [{"dst": "0.0.0.0/0"}]}}]}))
        (w / "containerd.toml").write_text(f"""version = 2
root = "{w}/containerd"
state = "{w}/state"
[grpc]
  address = "{w}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:test"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{w}/cni"
""")
        self.start(f"containerd{n}", "containerd", "-c", w / "containerd.toml")
        ctr = ("ctr", "-a", w / "containerd.sock", "-n", "k8s.io")
        wait_for("containerd", lambda: run(*ctr, "version"))
        run(*ctr, "images", "import", self.images)
        (w / "kubelet.json").write_text(json.dumps({
            "kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"}, "failSwapOn": False,
            "cgroupsPerQOS": False, "enforceNodeAllocatable": [], "cgroupDriver": "cgroupfs",
            "address": f"10.0.0.{n + 2}", "readOnlyPort": 0, "healthzPort": 0,
            "clusterDNS": [DNS], "clusterDomain": "cluster.local", "resolvConf": "/dev/null",
            "evictionHard": {"memory.available": "50Mi"}, "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False}))
        self.start(f"kubelet{n}", self.programs / "kubelet", f"--kubeconfig={self.work}/config",
                   f"--config={w}/kubelet.json", f"--root-dir={w}/kubelet",
                   f"--cert-dir={w}/certs", f"--volume-plugin-dir={w}/plugins",
                   f"--hostname-override=node{n}",
                   f"--node-ip=10.0.0.{n + 2}", "--container-runtime=remote",
                   f"--container-runtime-endpoint=unix://{w}/containerd.sock")

    def ready_nodes(self):
        return [x["metadata"]["name"] for x in self.get("nodes")["items"]
                if any(c["type"] == "Ready" and c["status"] == "True"
                       for c in x["status"]["conditions"])]

    def endpoints(self):
        """The addresses of the service's ready pods."""
        slices = self.get("endpointslices", "-l", f"kubernetes.io/service-name={self.service}")
        return sorted(e["addresses"][0] for s in slices["items"] for e in s["endpoints"] or []
                      if e["conditions"].get("ready"))

    def start_dns(self):
        """dnsmasq, which resolves the service as a cluster's DNS would."""
        hosts = self.work / "hosts"
        hosts.touch()
        dnsmasq = self.start(
            "dnsmasq", "dnsmasq", "-k", "-a", DNS, "--bind-interfaces", "--no-resolv",
            "--no-hosts", f"--addn-hosts={hosts}", "--local=/cluster.local/",
            "--conf-file=/dev/null", "--user=root", "--local-ttl=1", "--pid-file")

        def follow():
            last = None
            while True:
                with contextlib.suppress(RuntimeError, LookupError, ValueError):
                    now = self.endpoints()
                    if now != last:
                        hosts.write_text("".join(f"{each} {self.name}\n" for each in now))
                        dnsmasq.send_signal(signal.SIGHUP)  # it reads them again
                        last = now
                time.sleep(0.2)
        threading.Thread(target=follow, daemon=True).start()

    def memory_mib(self):
        """The memory of each program, with shared pages divided among their users."""
        sums = {}
        for name, process in self.processes.items():
            with contextlib.suppress(OSError, StopIteration):
                text = pathlib.Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                kib = next(int(x.split()[1]) for x in text.splitlines() if x.startswith("Pss:"))
                kind = name.rstrip("0123456789")
                sums[kind] = sums.get(kind, 0) + kib / 1024
        return {name: round(mib) for name, mib in sums.items()}

    def log_tails(self):
        for log in sorted(self.work.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-5:]
            yield log.name, [line[:300] for line in lines]
