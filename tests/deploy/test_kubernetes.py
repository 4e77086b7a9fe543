"""The manifests and the container file, against the client's own model of the API and against each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from kubernetes import client
from starsd_edge.cli.main import cli

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
FOLDER = MANIFESTS / "base"
KINDS = {
    "Namespace": "V1Namespace",
    "Service": "V1Service",
    "StatefulSet": "V1StatefulSet",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
    "NetworkPolicy": "V1NetworkPolicy",
    "ConfigMap": "V1ConfigMap",
}


def objects() -> Iterator[dict[str, Any]]:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(f.name for f in FOLDER.glob("*.yaml") if f.name != "kustomization.yaml")
    for file in listed:
        yield from yaml.safe_load_all((FOLDER / file).read_text())


OBJECTS = list(objects())


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in OBJECTS if each["kind"] == kind]


def complaints(value: Any, type_name: str, where: str) -> list[str]:
    """What `value` has that the API's type lacks, or the other way round."""
    if value is None:
        return [f"{where} is empty"]
    if match := re.fullmatch(r"[Ll]ist\[(.+)\]", type_name):
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [c for i, each in enumerate(value) for c in complaints(each, match[1], f"{where}[{i}]")]
    if match := re.fullmatch(r"[Dd]ict[\[(]\w+, (.+)[\])]", type_name):
        return [c for key, each in value.items() for c in complaints(each, match[1], f"{where}.{key}")]
    model = getattr(client, type_name, None)
    if model is None:
        expected = {"str": str, "int": int, "bool": bool, "object": (str, int)}[type_name]
        return [] if isinstance(value, expected) else [f"{where} is no {type_name}: {value!r}"]
    names = {json_name: python for python, json_name in model.attribute_map.items()}
    found = [f"{where}.{key} is unknown to {type_name}" for key in value if key not in names]
    for key, each in value.items():
        if key in names:
            found += complaints(each, model.openapi_types[names[key]], f"{where}.{key}")
    try:  # the model refuses a required field that is missing
        model(**{names[key]: each for key, each in value.items() if key in names})
    except ValueError as error:
        found.append(f"{where}: {error}")
    return found


@pytest.mark.parametrize("described", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_every_object_is_one_that_the_api_knows(described: dict[str, Any]) -> None:
    assert complaints(described, KINDS[described["kind"]], described["kind"]) == []


def test_a_misspelt_or_missing_field_is_found() -> None:
    (workload,) = of_kind("StatefulSet")
    misspelt = {**workload, "spec": {**workload["spec"], "replica": 2}}
    assert "it.spec.replica is unknown to V1StatefulSetSpec" in complaints(misspelt, "V1StatefulSet", "it")
    headless = {key: value for key, value in workload["spec"].items() if key != "selector"}
    assert "selector" in "".join(complaints({**workload, "spec": headless}, "V1StatefulSet", "it"))


def test_names_labels_and_ports_fit_together() -> None:
    (workload,) = of_kind("StatefulSet")
    pod = workload["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    services = {service["metadata"]["name"]: service for service in of_kind("Service")}
    headless = services[workload["spec"]["serviceName"]]["spec"]
    assert ("None", labels) == (headless["clusterIP"], headless["selector"])
    for number in range(workload["spec"]["replicas"]):
        name = f"{workload['metadata']['name']}-{number}"
        assert services[name]["spec"]["selector"] == {"statefulset.kubernetes.io/pod-name": name}
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        (other,) = of_kind(kind)
        selector = other["spec"].get("selector") or other["spec"]["podSelector"]
        assert selector["matchLabels"] == labels
    draft = pod["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in draft["ports"]}
    asked = f"--monitor={draft['startupProbe']['exec']['command'][2]}"
    assert asked in draft["args"]
    assert draft["readinessProbe"]["exec"] == draft["livenessProbe"]["exec"] == draft["startupProbe"]["exec"]
    assert all(port["targetPort"] in ports for each in services.values() for port in each["spec"]["ports"])
    (policy,) = of_kind("NetworkPolicy")
    assert [ports["draft"]] == [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]


def test_every_mounted_volume_is_there_and_every_container_is_locked_down() -> None:
    (workload,) = of_kind("StatefulSet")
    pod = workload["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        locked = container["securityContext"]
        assert (False, True) == (locked["allowPrivilegeEscalation"], locked["readOnlyRootFilesystem"])
        assert {"ALL"} == set(locked["capabilities"]["drop"])
        assert "memory" in container["resources"]["limits"]
    configured = {each["metadata"]["name"] for each in of_kind("ConfigMap")}
    wanted = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
    assert wanted - configured == {"starsd-trusted"}  # made from the devices' public keys: docs/scale.md
    scraped = yaml.safe_load(of_kind("ConfigMap")[0]["data"]["prometheus.yaml"])
    target = scraped["scrape_configs"][0]["static_configs"][0]["targets"][0]
    assert f"--listen={target}" in pod["containers"][1]["args"]


def command_lines() -> list[list[str]]:
    (workload,) = of_kind("StatefulSet")
    draft, figures, _collector = workload["spec"]["template"]["spec"]["containers"]
    return [draft["args"], figures["args"], draft["startupProbe"]["exec"]["command"][1:]]


@pytest.mark.parametrize("arguments", command_lines(), ids=["serve", "figures", "probe"])
def test_the_command_lines_are_ones_that_starsd_takes(arguments: list[str]) -> None:
    """Parsed by the real command line, down to the sub-command; tests/e2e/test_pod.py runs them."""
    arguments = list(arguments)
    command: click.Command = cli
    parent = None
    while isinstance(command, click.Group):
        parent = command.make_context(command.name, arguments, parent=parent)
        _name, command, arguments = command.resolve_command(parent, [*parent._protected_args, *parent.args])
    command.make_context(command.name, arguments, parent=parent)


def test_the_gpu_variant_patches_what_is_there() -> None:
    patch = yaml.safe_load((MANIFESTS / "gpu" / "kustomization.yaml").read_text())["patches"][0]
    (workload,) = of_kind("StatefulSet")
    assert (workload["kind"], workload["metadata"]["name"]) == (
        patch["target"]["kind"],
        patch["target"]["name"],
    )
    for change in yaml.safe_load(patch["patch"]):
        place: Any = workload
        *way, _last = change["path"].strip("/").split("/")
        for step in way:
            place = place[int(step)] if isinstance(place, list) else place[step]
        assert isinstance(place, list | dict)


@pytest.mark.parametrize("variant", ["base", "gpu"])
def test_a_variant_is_built_from_folders_that_do_not_hold_it(variant: str) -> None:
    """kustomize refuses a base that contains its overlay (a cycle) and resources outside a base's folder."""
    root = MANIFESTS / variant
    for listed in yaml.safe_load((root / "kustomization.yaml").read_text())["resources"]:
        resource = (root / listed).resolve()
        assert resource.exists()
        assert resource not in (root, *root.parents)
        assert resource.parent == root or (resource / "kustomization.yaml").exists()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_renders_both_variants() -> None:
    for variant, device in (("base", False), ("gpu", True)):
        command = ["kubectl", "kustomize", str(MANIFESTS / variant)]
        rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = [each for each in yaml.safe_load_all(rendered) if each["kind"] == "StatefulSet"]
        draft = found[0]["spec"]["template"]["spec"]["containers"][0]
        assert ("--device=cuda" in draft["args"]) is device
        assert complaints(found[0], "V1StatefulSet", variant) == []


def test_the_container_file_takes_what_the_project_has() -> None:
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, _target = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
    project = (ROOT / "pyproject.toml").read_text()
    packages, *_ = re.findall(r"^packages = (\[\"starsd_edge\".+\])$", project, re.MULTILINE)
    for package in json.loads(packages):
        assert re.search(rf"^COPY ({package}|{package.split('/')[0]}) ", text, re.MULTILINE), package
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    assert not re.search(r"^USER (root|0)", text, re.MULTILINE)


def test_figures_of_several_pods_are_told_apart() -> None:
    """Each exporter watches 127.0.0.1, so that its own labels are the same everywhere."""
    (described,) = of_kind("ConfigMap")
    config = yaml.safe_load(described["data"]["prometheus.yaml"])
    assert config["global"]["external_labels"] == {"pod": "${POD_NAME}"}
    (written,) = config["remote_write"]
    assert {"source_labels": ["pod"], "target_label": "service"} in written["write_relabel_configs"]
    (workload,) = of_kind("StatefulSet")
    collector = workload["spec"]["template"]["spec"]["containers"][2]
    assert [each["name"] for each in collector["env"]] == ["POD_NAME"]
