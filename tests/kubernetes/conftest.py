# SPDX-License-Identifier: Apache-2.0
"""Renders deploy/kubernetes as a user's kubectl would."""

import pathlib
import subprocess
import sys

import pytest
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))

import harness  # noqa: E402

MANIFESTS = harness.ROOT / "deploy/kubernetes"
KUBECTL = pathlib.Path(sys.executable).with_name("kubectl")
# Kustomizations that the tests render.
OWN = {
    "gpu that scales": {"resources": ["base"],
                        "components": ["components/gpu", "components/monitoring",
                                       "components/keda"],
                        "images": [{"name": "attend", "newName": "registry.example/attend",
                                    "newTag": "7"}]},
    "all nodes": {"resources": ["base", "overlays/node-local"],
                  "components": ["components/monitoring"], "namespace": "serving"},
}
RENDERED = ["base", *sorted(f"overlays/{p.name}" for p in (MANIFESTS / "overlays").iterdir()), *OWN]


def render(folder):
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "it warns: " + done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="session")
def rendered(tmp_path_factory):
    """All folders of RENDERED, by name."""
    found = {}
    for name in RENDERED:
        folder = MANIFESTS / name
        if name in OWN:
            folder = tmp_path_factory.mktemp("own").resolve()
            up = "../" * len(folder.parts[1:]) + str(MANIFESTS.resolve()).lstrip("/")
            own = {key: [f"{up}/{each}" for each in value] if key in ("resources", "components")
                   else value for key, value in OWN[name].items()}
            (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
        found[name] = render(folder)
    return found


@pytest.fixture(scope="session")
def secrets(tmp_path_factory):
    """The objects that make-secrets prints, by name."""
    folder = tmp_path_factory.mktemp("secrets") / "made"
    said = subprocess.run([MANIFESTS / "make-secrets", folder, "serving"], check=True,
                          capture_output=True, text=True).stdout
    return {s["metadata"]["name"]: s for s in yaml.safe_load_all(said)}
