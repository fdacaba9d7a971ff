"""The versions a cluster is pinned to (``constraints.txt``), and what container images and install steps say."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from rayfed.cluster.findings import Finding, warning

CONSTRAINTS = Path(__file__).with_name("constraints.txt")


@functools.cache
def pinned() -> dict[str, str]:
    """The tested version of every direct dependency by name, and ``python`` (major.minor)."""
    text = CONSTRAINTS.read_text(encoding="utf-8")
    found = dict(re.findall(r"^([a-z0-9_-]+)==(\S+)$", text, re.MULTILINE))
    found["python"] = re.findall(r"^# python (\S+)$", text, re.MULTILINE)[0]
    return found


def image_findings(field: str, image: object) -> Iterator[Finding]:
    """What is wrong with the tag of a container image: Ray and Python must be the pinned ones on every node."""
    ray, python = pinned()["ray"], pinned()["python"]
    wanted = f"py{python.replace('.', '')}"
    remedy = f"use rayproject/ray:{ray}-{wanted}-gpu, or an image of cluster/Dockerfile tagged ...ray{ray}-{wanted}"
    name, _, tag = str(image).rpartition(":")
    if not name or "/" in tag or re.match(r"(latest|nightly)\b", tag):
        yield Finding(field, f"is {image}, a tag that moves: nodes started later would run another Ray; {remedy}.")
        return
    official = name.rpartition("/")[0] in {"rayproject", "docker.io/rayproject"}
    found_ray = re.search(r"(?:^|ray)(\d+\.\d+\.\d+\w*)" if official else r"ray(\d+\.\d+\.\d+\w*)", tag)
    found_python = re.search(r"\bpy(\d{2,3})\b", tag)
    if found_ray and found_ray[1] != ray:
        yield Finding(field, f"is {image} with Ray {found_ray[1]}, but this release is tested with {ray}; {remedy}.")
    if found_python and found_python[0] != wanted:
        yield Finding(field, f"is {image} with {found_python[0]}, but this release is tested with {wanted}; {remedy}.")
    if not (found_ray and found_python):
        yield warning(field, f"is {image}, whose tag does not say which Ray and Python are in it; {remedy}.")


def install_findings(field: str, command: str) -> Iterator[Finding]:
    """What is wrong with a set-up step that installs Ray or names a Python of its own."""
    ray, python = pinned()["ray"], pinned()["python"]
    for version in re.findall(r"\bray(?:\[[\w,-]*\])?==([^\s'\"]+)", command):
        if version != ray:
            yield Finding(field, f"installs ray=={version}, but this release is tested with {ray}: write ray=={ray}.")
    for version in re.findall(r"\bpython(3\.\d+)\b", command):
        if version != python:
            yield Finding(
                field, f"uses python{version}, but the pinned Ray is tested with {python}: write python{python}."
            )
