# SPDX-License-Identifier: Apache-2.0
"""Checks of manifests beyond their schemas: names refer to existing objects, and times and counts
fit together. Each check yields its faults as text."""

import re

POD_KINDS = ("Deployment", "DaemonSet")
# The time that the server takes after --drain-timeout to stop what is left (server/app/README.md).
STOP_SECONDS = 3
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def of_kind(objects, *kinds):
    return [x for x in objects if x["kind"] in kinds]


def named(x):
    return f"{x['kind']} {x['metadata']['name']}"


def template(workload):
    return workload["spec"]["template"]


def containers(workload):
    spec = template(workload)["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def server_of(workload):
    return next(c for c in template(workload)["spec"]["containers"] if c["name"] == "attend")


def flags(container):
    """The server's arguments as {flag: value}; a switch has the value ""."""
    return dict((a.split("=", 1) + [""])[:2] for a in container.get("args", []))


def matches(labels, selector):
    assert set(selector) <= {"matchLabels"}, f"{selector}: only matchLabels is looked at"
    wanted = selector.get("matchLabels", {})
    return all(labels.get(k) == v for k, v in wanted.items())


def selected(objects, selector):
    return [w for w in of_kind(objects, *POD_KINDS)
            if matches(template(w)["metadata"]["labels"], selector)]


def check_selectors(objects):
    """Every selector selects exactly one workload's pods."""
    for w in of_kind(objects, *POD_KINDS):
        if [w] != selected(objects, w["spec"]["selector"]):
            yield f"{named(w)}: its selector does not select its pods alone"
        for spread in template(w)["spec"].get("topologySpreadConstraints", []):
            if [w] != selected(objects, spread["labelSelector"]):
                yield f"{named(w)}: topologySpreadConstraints selects other pods"
    for x in of_kind(objects, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        selector = x["spec"].get("podSelector") or x["spec"]["selector"]
        if x["kind"] == "Service":
            selector = {"matchLabels": selector}
        if len(selected(objects, selector)) != 1:
            yield f"{named(x)}: it does not select one workload's pods"
    for x in of_kind(objects, "ScaledObject"):
        target = x["spec"]["scaleTargetRef"]["name"]
        if target not in [w["metadata"]["name"] for w in of_kind(objects, "Deployment")]:
            yield f"{named(x)}: there is no Deployment {target}"
    for x in of_kind(objects, "ServiceMonitor"):
        services = [s for s in of_kind(objects, "Service")
                    if matches(s["metadata"]["labels"], x["spec"]["selector"])]
        ports = [{p["name"] for p in s["spec"]["ports"]} for s in services]
        for endpoint in x["spec"]["endpoints"]:
            if not ports or any(endpoint["port"] not in names for names in ports):
                yield f"{named(x)}: a Service that it selects has no port {endpoint['port']}"


def check_ports(objects):
    """Ports are referred to by name everywhere, and the names exist."""
    def names(workload):
        return {p["name"]: p["containerPort"] for c in containers(workload)
                for p in c.get("ports", [])}

    for w in of_kind(objects, *POD_KINDS):
        for probe in PROBES:
            port = server_of(w)[probe]["httpGet"]["port"]
            if port not in names(w):
                yield f"{named(w)}: {probe} asks at {port}, which is no port of the pod"
    for s in of_kind(objects, "Service"):
        for w in selected(objects, {"matchLabels": s["spec"]["selector"]}):
            for port in s["spec"]["ports"]:
                if names(w).get(port["targetPort"]) != port["port"]:
                    yield f"{named(s)}: {port['name']} is not what {named(w)} has"
    for n in of_kind(objects, "NetworkPolicy"):
        for w in selected(objects, n["spec"]["podSelector"]):
            for port in (p for rule in n["spec"]["ingress"] for p in rule["ports"]):
                if port["port"] not in names(w):
                    yield f"{named(n)}: {named(w)} has no port {port['port']}"


def check_end(objects):
    """Drains are never cut short."""
    for w in of_kind(objects, *POD_KINDS):
        server = server_of(w)
        hook = server.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if hook and (len(hook) != 2 or hook[0] != "sleep"):
            yield f"{named(w)}: preStop is no sleep: {hook}"
            continue
        pause = int(hook[1]) if hook else 0
        needed = pause + int(flags(server).get("--drain-timeout", 30)) + STOP_SECONDS
        grace = template(w)["spec"]["terminationGracePeriodSeconds"]
        if grace <= needed:
            yield f"{named(w)}: {grace} s of grace, and its end may take {needed} s"


def check_probes(objects):
    """Readiness and liveness have separate probes, over TLS if the metrics use it."""
    paths = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    for w in of_kind(objects, *POD_KINDS):
        server = server_of(w)
        tls = {"--tls-cert", "--metrics-tls-cert"} & set(flags(server))
        for probe, path in paths.items():
            asked = server[probe]["httpGet"]
            if asked["path"] != path:
                yield f"{named(w)}: {probe} asks {asked['path']}"
            if (asked.get("scheme", "HTTP") == "HTTPS") != bool(tls):
                yield f"{named(w)}: {probe} asks by {asked.get('scheme', 'HTTP')}"


def check_disruption(objects):
    """A budget allows a node to be drained, but not all servers to be taken."""
    for b in of_kind(objects, "PodDisruptionBudget"):
        bounds = [k for k in ("minAvailable", "maxUnavailable") if k in b["spec"]]
        if len(bounds) != 1:
            yield f"{named(b)}: it has {bounds or 'no bound'}, and must have one"
            continue
        scaled = [s["spec"]["minReplicaCount"] for s in of_kind(objects, "ScaledObject")]
        for w in selected(objects, b["spec"]["selector"]):
            count = w["spec"].get("replicas", min(scaled, default=1))
            bound = b["spec"][bounds[0]]
            free = bound if bounds[0] == "maxUnavailable" else count - bound
            if not 1 <= free < count:
                yield f"{named(b)}: of {count} servers {free} may go"


def check_replicas(objects):
    """Only an autoscaler sets the number of the replicas that it scales."""
    for s in of_kind(objects, "ScaledObject"):
        for w in of_kind(objects, "Deployment"):
            if w["metadata"]["name"] == s["spec"]["scaleTargetRef"]["name"] and \
                    "replicas" in w["spec"]:
                yield f"{named(w)}: its replicas and {named(s)} contradict each other"


def check_rights(objects):
    """No root, no capabilities, nothing writable, no token of the cluster's."""
    accounts = {a["metadata"]["name"]: a for a in of_kind(objects, "ServiceAccount")}
    for w in of_kind(objects, *POD_KINDS):
        spec = template(w)["spec"]
        account = accounts.get(spec["serviceAccountName"], {})
        if spec["automountServiceAccountToken"] or \
                account.get("automountServiceAccountToken", True):
            yield f"{named(w)}: it gets a token of its ServiceAccount, or has none"
        if not spec["securityContext"]["runAsNonRoot"]:
            yield f"{named(w)}: its pods may run as root"
        for c in containers(w):
            rights = c["securityContext"]
            added = rights["capabilities"].get("add", [])
            few = added == [] and "runAsUser" not in rights if c["name"] == "attend" else \
                added in ([], ["CHOWN"])
            if not few or rights["capabilities"]["drop"] != ["ALL"] or \
                    rights["allowPrivilegeEscalation"] or not rights["readOnlyRootFilesystem"]:
                yield f"{named(w)}: {c['name']} has more rights than it needs"
    for x in of_kind(objects, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"):
        yield f"{named(x)}: servers need no rights"


def check_secrets(objects, secrets):
    """Every key read from a Secret is mounted, and is in one of make-secrets, {name: keys}."""
    for w in of_kind(objects, *POD_KINDS):
        volumes = {v["name"]: v for v in template(w)["spec"].get("volumes", [])}
        mounts = server_of(w).get("volumeMounts", [])
        for mount in mounts:
            if mount["name"] not in volumes:
                yield f"{named(w)}: there is no volume {mount['name']}"
        unused = set(volumes) - {m["name"] for m in mounts}
        if unused:
            yield f"{named(w)}: not mounted: {sorted(unused)}"
        folders = {m["mountPath"]: volumes.get(m["name"], {}).get("secret", {}).get("secretName")
                   for m in mounts}
        for flag, value in flags(server_of(w)).items():
            folder, _, key = value.rpartition("/")
            if value.startswith("/etc/") and key not in secrets.get(folders.get(folder), ()):
                yield f"{named(w)}: {flag}={value} is in no Secret"
    for x in of_kind(objects, "ServiceMonitor"):
        for endpoint in x["spec"]["endpoints"]:
            for asked in (endpoint["tlsConfig"]["ca"]["secret"],
                          endpoint["authorization"]["credentials"]):
                if asked["key"] not in secrets.get(asked["name"], ()):
                    yield f"{named(x)}: no Secret {asked['name']} has {asked['key']}"


def check_flags(objects, known):
    """The server knows all its flags. Beyond loopback it has TLS or --insecure."""
    for w in of_kind(objects, *POD_KINDS):
        given = flags(server_of(w))
        for flag in sorted(set(given) - set(known)):
            yield f"{named(w)}: the server has no {flag}"
        declared = {e["name"] for e in server_of(w).get("env", [])}
        for name in re.findall(r"\$\((\w+)\)", " ".join(given.values())):
            if name not in declared:
                yield f"{named(w)}: nothing says what {name} is"
        loopback = given.get("--listen", "").startswith("unix:")
        if not loopback and not {"--tls-cert", "--insecure"} & set(given):
            yield f"{named(w)}: it listens beyond loopback without TLS"


def queries(objects):
    """The PromQL of autoscalers, and the metrics in it."""
    found = [t["metadata"]["query"] for s in of_kind(objects, "ScaledObject")
             for t in s["spec"]["triggers"]]
    return found, set(re.findall(r"\battend_\w+", " ".join(found)))


def check_all(objects, secrets, known_flags):
    for check in (check_selectors, check_ports, check_end, check_probes, check_disruption,
                  check_replicas, check_rights):
        yield from check(objects)
    yield from check_secrets(objects, secrets)
    yield from check_flags(objects, known_flags)
