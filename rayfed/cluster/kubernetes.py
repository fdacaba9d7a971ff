"""Manifests for the KubeRay operator: structure against a small schema, then versions, placement, storage, access."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rayfed.cluster.findings import Document, Finding, warning
from rayfed.cluster.placement import NodeType, placement_findings
from rayfed.cluster.versions import image_findings, pinned

KINDS = ("RayCluster", "RayJob", "PersistentVolumeClaim")
"""What is checked; other manifests of a file are Kubernetes' business."""
SCHEMA = Path(__file__).with_name("kuberay.schema.json")
"""RayCluster and RayJob of KubeRay 1.6 (ray.io/v1), their own fields whole, pod templates as far as they are read."""


def manifest_findings(documents: Sequence[Document], words: Sequence[str]) -> Iterator[Finding]:
    """Everything wrong with the manifests of one file. Raises OptionError if the run options ``words`` are wrong."""
    sound: list[Document] = []
    for document in documents:
        broken = list(_schema_findings(document))
        yield from broken
        if not broken:
            sound.append(document)
    claims, clusters = _names(sound, "PersistentVolumeClaim"), _names(sound, "RayCluster")
    for document in sound:
        where = f"{document['kind']}/{document.get('metadata', {}).get('name')}.spec"
        if document["kind"] == "RayJob":
            yield from _job_findings(document["spec"], where, clusters)
            if "rayClusterSpec" in document["spec"]:
                yield from _cluster_findings(
                    document["spec"]["rayClusterSpec"], f"{where}.rayClusterSpec", claims, words
                )
        elif document["kind"] == "RayCluster":
            yield from _cluster_findings(document["spec"], where, claims, words)
        elif document["kind"] == "PersistentVolumeClaim":
            yield from _claim_findings(document["spec"], where)


def _names(documents: Sequence[Document], kind: str) -> set[str]:
    return {d["metadata"]["name"] for d in documents if d["kind"] == kind}


def _schema_findings(document: Document) -> Iterator[Finding]:
    import jsonschema

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    kind, metadata = document["kind"], document.get("metadata")
    if kind not in KINDS:
        return
    where = f"{kind}/{metadata.get('name') if isinstance(metadata, dict) else '?'}"
    validator = jsonschema.Draft7Validator({**schema, "$ref": f"#/definitions/{kind}"})
    for error in validator.iter_errors(document):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
        yield Finding(where + path, f"is not what KubeRay takes: {error.message}.")


def _job_findings(spec: Document, where: str, clusters: set[str]) -> Iterator[Finding]:
    selected = spec.get("clusterSelector", {}).get("ray.io/cluster")
    if ("rayClusterSpec" in spec) == (selected is not None):
        yield Finding(where, "needs either rayClusterSpec or clusterSelector with ray.io/cluster: keep one.")
    elif selected is not None and clusters and selected not in clusters:
        yield Finding(
            f"{where}.clusterSelector",
            f"names the cluster {selected}, but the file has {', '.join(sorted(clusters))}.",
        )


def _groups(spec: Document, where: str) -> Iterator[tuple[str, Document]]:
    yield f"{where}.headGroupSpec", spec["headGroupSpec"]
    for i, group in enumerate(spec.get("workerGroupSpecs", [])):
        yield f"{where}.workerGroupSpecs[{i}]", group


def _cluster_findings(spec: Document, where: str, claims: set[str], words: Sequence[str]) -> Iterator[Finding]:
    version = spec.get("rayVersion")
    if version != pinned()["ray"]:
        yield Finding(
            f"{where}.rayVersion", f"is {version}, but this release is tested with Ray {pinned()['ray']}: write that."
        )
    for field, group in _groups(spec, where):
        pod = f"{field}.template.spec"
        for i, container in enumerate(group["template"]["spec"]["containers"]):
            yield from image_findings(f"{pod}.containers[{i}].image", container["image"])
        yield from _storage_findings(group["template"]["spec"], pod, claims)
    yield from _replica_findings(spec, where)
    yield from _access_findings(spec, where)
    head, *workers = [_node(group, field) for field, group in _groups(spec, where)]
    yield from placement_findings(head, workers, words)


def _node(group: Document, field: str) -> NodeType:
    field = f"{field}.template.spec.containers[0].resources"
    return NodeType(field, _resources(group), int(group.get("maxReplicas", 1)))


def _resources(group: Document) -> dict[str, float]:
    """What Ray counts in a pod: the limits of its first container, GPUs as the vendor's resource."""
    resources = group["template"]["spec"]["containers"][0].get("resources", {})
    limits = {**resources.get("requests", {}), **resources.get("limits", {})}
    gpus = sum(float(amount) for kind, amount in limits.items() if str(kind).endswith("/gpu"))
    cpu = str(limits.get("cpu", "1"))
    return {"CPU": float(cpu.removesuffix("m")) / (1000 if cpu.endswith("m") else 1), "GPU": gpus}


def _replica_findings(spec: Document, where: str) -> Iterator[Finding]:
    for i, group in enumerate(spec.get("workerGroupSpecs", [])):
        field = f"{where}.workerGroupSpecs[{i}]"
        if "maxReplicas" not in group:
            yield Finding(f"{field}.maxReplicas", "is missing: KubeRay would take 2147483647; say how many may start.")
        elif group["maxReplicas"] < group.get("minReplicas", 0):
            yield Finding(f"{field}.maxReplicas", f"is {group['maxReplicas']}, below minReplicas: raise it.")
        if group.get("minReplicas", 0) == 0 and not spec.get("enableInTreeAutoscaling") and not group.get("replicas"):
            yield Finding(f"{where}.enableInTreeAutoscaling", "is not true, so workers never grow from 0: set it.")


def _storage_findings(pod: Document, where: str, claims: set[str]) -> Iterator[Finding]:
    container = pod["containers"][0]
    home = next((e.get("value") for e in container.get("env", []) if e["name"] == "RAYFED_HOME"), None)
    mounts = {m["mountPath"]: m["name"] for m in container.get("volumeMounts", [])}
    volumes = {v["name"]: v for v in pod.get("volumes", [])}
    for name in set(mounts.values()) - set(volumes):
        yield Finding(f"{where}.volumes", f"lacks {name}, which volumeMounts names: add it.")
    if home is None or home not in mounts:
        yield warning(
            f"{where}.containers[0].env",
            "does not set RAYFED_HOME to a mounted volume that all pods share: private client states and checkpoints "
            "would be lost with the pod.",
        )
        return
    claim = volumes.get(mounts[home], {}).get("persistentVolumeClaim", {}).get("claimName")
    if claim is None:
        yield warning(f"{where}.volumes", f"gives RAYFED_HOME={home} no persistentVolumeClaim: it goes with the pod.")
    elif claims and claim not in claims:
        yield Finding(f"{where}.volumes", f"claims {claim}, but the file makes {', '.join(sorted(claims))}.")


def _claim_findings(spec: Document, where: str) -> Iterator[Finding]:
    if "ReadWriteMany" not in spec["accessModes"]:
        yield Finding(
            f"{where}.accessModes", f"is {spec['accessModes']}: several pods write, so it must be [ReadWriteMany]."
        )


def _access_findings(spec: Document, where: str) -> Iterator[Finding]:
    if spec.get("authOptions", {}).get("mode") != "token":
        yield warning(f"{where}.authOptions.mode", "is not token: whoever reaches the head can run code on every node.")
    head = spec["headGroupSpec"]
    if head.get("serviceType", "ClusterIP") != "ClusterIP" or head.get("enableIngress"):
        yield warning(
            f"{where}.headGroupSpec.serviceType",
            "lets the dashboard, which runs what it is told, be reached from outside the cluster: use ClusterIP and "
            "`kubectl port-forward`.",
        )
