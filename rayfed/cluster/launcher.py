"""Files of ``ray up``: Ray's own schema and loader first, then what they let through."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rayfed.cluster.findings import Document, Finding, warning
from rayfed.cluster.placement import NodeType, placement_findings
from rayfed.cluster.versions import image_findings, install_findings

COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
NEEDS_DRIVER = re.compile(r"nvidia-smi|nvidia-ctk|torch\.cuda|--gpus\b|--runtime[= ]nvidia|\bnvcc\b")
WAITS = re.compile(r"\b(until|while)\b[^;|]*(nvidia-smi|torch\.cuda)|cloud-init status --wait")
Step = tuple[str, str]
"""A command, after the field it stands in."""


def launcher_findings(document: Document, words: Sequence[str]) -> Iterator[Finding]:
    """Everything wrong with a ``ray up`` file that asks for the run of ``words``.

    Raises OptionError if the run options are wrong themselves.
    """
    broken = list(_schema_findings(document))
    yield from broken
    yield from _maximum_findings(document)
    yield from _image_findings(document)
    for field, command in _all_steps(document):
        yield from install_findings(field, command)
    yield from _driver_findings(document)
    if not broken:
        yield from _loader_findings(document)
        yield from _placement(document, words)
        yield from _safety_findings(document)


def _schema_findings(document: Document) -> Iterator[Finding]:
    """Ray's own schema, every mistake with its field."""
    import jsonschema
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    for error in jsonschema.Draft7Validator(schema).iter_errors(document):
        field = ".".join(str(part) for part in error.absolute_path) or "the file"
        yield Finding(field, f"is refused by Ray's schema: {error.message}.")


def _loader_findings(document: Document) -> Iterator[Finding]:
    """What Ray's loader says once defaults are filled in."""
    from ray.autoscaler._private.providers import _NODE_PROVIDERS
    from ray.autoscaler._private.util import prepare_config, validate_config

    provider = document["provider"]["type"]
    if _NODE_PROVIDERS.get(provider) is None:
        known = ", ".join(sorted(name for name, found in _NODE_PROVIDERS.items() if found is not None))
        yield Finding("provider.type", f"is {provider}, which Ray does not know: one of {known}.")
        return
    said = io.StringIO()  # Ray prints the reason and raises an exception without one
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            validate_config(prepare_config(copy.deepcopy(document)))
    except Exception as error:  # Ray aborts in many ways: click, assertions, ValueError
        reason = str(error) or re.sub(r"\x1b[^m]*m", "", said.getvalue()) or type(error).__name__
        yield Finding("the file", f"is refused by Ray's loader: {' '.join(reason.split())}")


def _node_types(document: Document) -> dict[str, Document]:
    types = document.get("available_node_types")
    return {k: v for k, v in types.items() if isinstance(v, dict)} if isinstance(types, dict) else {}


def _workers(document: Document) -> dict[str, Document]:
    return {name: node for name, node in _node_types(document).items() if name != document.get("head_node_type")}


def _maximum_findings(document: Document) -> Iterator[Finding]:
    """Ray fills a missing maximum with the global one: as many machines as that may start."""
    total = document.get("max_workers")
    for name, node in _workers(document).items():
        field, most = f"available_node_types.{name}.max_workers", node.get("max_workers")
        if most is None:
            yield Finding(field, f"is missing: Ray would take the global max_workers={total}; say how many may start.")
        elif isinstance(most, int) and isinstance(least := node.get("min_workers", 0), int) and most < least:
            yield Finding(field, f"is {most}, below min_workers={least}: raise it.")
    if _workers(document) and total is None:
        yield Finding("max_workers", "is missing: Ray would take 2; say how many workers of all types may run at once.")


def _image_findings(document: Document) -> Iterator[Finding]:
    places = {"docker": document.get("docker")}
    places |= {f"available_node_types.{n}.docker": node.get("docker") for n, node in _node_types(document).items()}
    for field, docker in places.items():
        for key in ("image", "head_image", "worker_image"):
            if isinstance(docker, dict) and docker.get(key):
                yield from image_findings(f"{field}.{key}", docker[key])


def _steps(commands: Any, field: str) -> list[Step]:
    return [(f"{field}[{i}]", str(c)) for i, c in enumerate(commands)] if isinstance(commands, list) else []


def _all_steps(document: Document) -> Iterator[Step]:
    for field in COMMANDS:
        yield from _steps(document.get(field), field)
    for name, node in _node_types(document).items():
        for field in ("initialization_commands", "worker_setup_commands"):
            yield from _steps(node.get(field), f"available_node_types.{name}.{field}")


def _sequence(document: Document, name: str, node: Document) -> list[Step]:
    """The commands a node of a type runs, in order: a list of its own replaces the common one."""
    own = f"available_node_types.{name}."
    first = "initialization_commands"
    steps = _steps(node[first], own + first) if first in node else _steps(document.get(first), first)
    if "worker_setup_commands" in node:
        return steps + _steps(node["worker_setup_commands"], own + "worker_setup_commands")
    side = "head" if name == document.get("head_node_type") else "worker"
    for field in ("setup_commands", f"{side}_setup_commands", f"{side}_start_ray_commands"):
        steps += _steps(document.get(field), field)
    return steps


def _driver_findings(document: Document) -> Iterator[Finding]:
    """Steps that need the NVIDIA driver before anything has waited for it."""
    remedy = "put `timeout 600 bash -c 'until nvidia-smi; do sleep 5; done'` before it"
    found: dict[str, Finding] = {}
    for name, node in (_node_types(document) or {"": {}}).items():
        waited = False
        for field, command in _sequence(document, name, node):
            waited = waited or WAITS.search(command) is not None
            if not waited and (need := NEEDS_DRIVER.search(command)):
                sentence = f"needs the NVIDIA driver ({need[0]}), which may still be loading at that time: {remedy}."
                found[field] = Finding(field, sentence)
        if not waited and "install-nvidia-driver" in json.dumps(node.get("node_config"), default=str):
            field = f"available_node_types.{name}.initialization_commands"
            sentence = f"does not wait for the NVIDIA driver that node_config.metadata has installed: {remedy}."
            found[field] = Finding(field, sentence)
    yield from found.values()


def _placement(document: Document, words: Sequence[str]) -> Iterator[Finding]:
    head = _node_types(document).get(str(document.get("head_node_type")))
    if head is None:  # machines that exist already: Ray asks them what they have
        return
    prefix = "available_node_types"
    workers = [
        NodeType(f"{prefix}.{name}.resources", _floats(node), _most(node)) for name, node in _workers(document).items()
    ]
    yield from placement_findings(
        NodeType(f"{prefix}.{document['head_node_type']}.resources", _floats(head)), workers, words
    )


def _most(node: Document) -> int:
    """How many nodes of a type to reckon with; where the file is wrong about it, that is said elsewhere."""
    return max(int(node.get("max_workers", 1)), int(node.get("min_workers", 0)))


def _floats(node: Document) -> dict[str, float]:
    return {kind: float(amount) for kind, amount in node["resources"].items()}


def _safety_findings(document: Document) -> Iterator[Finding]:
    """What starts, but should not be left so."""
    docker = document.get("docker") or {}
    options = [str(o) for key in ("run_options", "head_run_options") for o in docker.get(key, [])]
    start = _steps(document.get("head_start_ray_commands"), "head_start_ray_commands")
    everything = "\n".join([*options, *(command for _, command in start)])
    if not any("ray start" in command for _, command in start):
        yield warning("head_start_ray_commands", "is missing: Ray's default lets the dashboard listen everywhere.")
    for field, command in start:
        if re.search(r"--dashboard-host[= ](0\.0\.0\.0|::)", command):
            yield warning(
                field,
                "lets the dashboard, which runs what it is told, listen on every address: use "
                "--dashboard-host=127.0.0.1 and reach it through `ray dashboard FILE`.",
            )
    if not re.search(r"RAY_AUTH_MODE=token", everything):
        yield warning(
            "docker.run_options" if docker else "head_start_ray_commands",
            "does not set RAY_AUTH_MODE=token: whoever reaches the head's ports can run code on every node.",
        )
    elif not any("auth_token" in str(remote) for remote in document.get("file_mounts", {})):
        yield warning("file_mounts", "carries no auth_token, so nodes cannot know the token: mount ~/.ray/auth_token.")
    yield from _storage_findings(document, everything)
    for remote, local in document.get("file_mounts", {}).items():
        if not Path(os.path.expanduser(str(local))).exists():
            hint = "run `ray get-auth-token --generate`" if "auth_token" in str(local) else "start from the checkout"
            yield warning(f"file_mounts.{remote}", f"is {local}, which is not here; `ray up` would stop: {hint}.")


def _storage_findings(document: Document, everything: str) -> Iterator[Finding]:
    home = re.search(r"RAYFED_HOME=(\S+?)(?=[\s;'\"]|$)", everything)
    if home is None:
        yield warning(
            "docker.run_options" if document.get("docker") else "head_start_ray_commands",
            "does not set RAYFED_HOME to storage that all nodes share: private client states and checkpoints of a job "
            "would lie on one node and be lost with it.",
        )
    elif document["provider"]["type"] != "local" and not any(
        "mount" in command and home[1] in command for _, command in _all_steps(document)
    ):
        yield warning("initialization_commands", f"mounts nothing at RAYFED_HOME={home[1]}: it would lie on one node.")
