"""Whether the nodes of a cluster file can ever run what is asked of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayfed import config
from rayfed.cluster.findings import Finding
from rayfed.engine.resources import MANY, plan_actors
from rayfed.errors import ResourceError


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node: where the file describes it, what one has, and how many there can be."""

    field: str
    resources: dict[str, float]
    most: int = 1


def asked_for(text: str, words: Sequence[str]) -> list[str]:
    """The run options of the file's ``# rayfed:`` lines; ``words`` of the command line win."""
    lines = re.findall(r"^#\s*rayfed:(.*)$", text, re.MULTILINE)
    chosen = {word.partition("=")[0]: word for line in lines for word in shlex.split(line)}
    return list((chosen | {word.partition("=")[0]: word for word in words}).values())


def placement_findings(head: NodeType, workers: Sequence[NodeType], words: Sequence[str]) -> Iterator[Finding]:
    """What of the run ``words`` ask for can find no place. Raises OptionError for options that are wrong themselves."""
    options = config.parse_options(words)
    gpus = head.resources.get("GPU", 0.0)
    if options.server.gpu > gpus:
        yield Finding(
            f"{head.field}.GPU",
            f"is {gpus:g}, but server.gpu={options.server.gpu:g} is asked for: the server keeps the shared state and "
            "belongs on the head, since a worker can be taken away; choose a head with a GPU, or server.gpu=0.",
        )
        return
    coming = [node.resources for node in workers for _ in range(min(node.most, MANY))]
    try:
        plan_actors(options, [head.resources], coming)
    except ResourceError as error:
        yield Finding(workers[0].field if workers else head.field, f"cannot hold the run: {error}")
