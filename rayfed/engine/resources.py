"""Joining a Ray cluster, and whether it can ever run what is asked."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfed.conf.options import RunOptions
from rayfed.errors import ResourceError


@dataclass(frozen=True, slots=True)
class Plan:
    """How many client actors run side by side, and why not more."""

    num_actors: int
    note: str | None = None


def connect(options: RunOptions) -> bool:
    """Join the cluster that ``engine.address``, RAY_ADDRESS or this machine offers, else start one here.

    Returns whether this call made the connection (and must end it). Raises ResourceError if it cannot be reached, or
    if this process is in another cluster already.
    """
    try:
        import ray
    except ImportError as error:
        raise ResourceError(
            f"engine.pool=ray but {sys.executable} has no Ray: pip install 'ray[default]' there, use the Python "
            "that has it (activate its environment before `ray start`), or set engine.pool=local."
        ) from error
    address = options.engine.address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        _refuse_unreachable(address)
    if ray.is_initialized():
        _refuse_another(options.engine.address, ray.get_runtime_context().gcs_address)
        return False
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # an actor with 0 GPUs sees none
    settings: dict[str, Any] = {"namespace": "rayfed", "logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:  # one of our own: runs side by side on a machine must not take each other's actors' places
        settings |= {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    else:
        settings["address"] = address
    try:
        ray.init(**settings)
    except Exception as error:  # whatever Ray raises: no cluster, another version, a token it does not accept
        raise ResourceError(
            f"no Ray cluster could be joined at {address or 'this machine'} ({' '.join(str(error).split())[:300]}): "
            "check engine.address, or use engine.pool=local."
        ) from error
    return True


def _refuse_unreachable(address: str) -> None:
    """Ray itself tries for minutes; a port that nobody listens on is told at once."""
    host, _, port = address.partition("://")[2].rpartition(":") if "://" in address else address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or something Ray will judge
    for place in (host, *_what_ray_makes_of(host)):
        try:
            socket.create_connection((place, int(port)), timeout=5).close()
        except OSError as error:
            where = "" if place == host else f" of this machine as {place}, which Ray connects to"
            raise ResourceError(
                f"nothing answers at engine.address={address}{where} ({error.strerror or error}): check it, start a "
                "cluster there, or leave it out for a private one."
            ) from error


def _what_ray_makes_of(host: str) -> list[str]:
    """Ray replaces a loopback name by the machine's own address; a head bound to loopback alone is not found there."""
    import ray

    return [ray.util.get_node_ip_address()] if host in {"localhost", "127.0.0.1", "::1"} else []


def _refuse_another(asked: str | None, joined: str) -> None:
    """A process is in one cluster at a time: another one by name is refused, not silently passed over."""
    if asked is None or ":" not in asked or "://" in asked:
        return
    host, _, port = asked.rpartition(":")
    if joined not in {f"{place}:{port}" for place in (host, *_what_ray_makes_of(host))}:
        raise ResourceError(
            f"engine.address={asked} but this process is in the Ray cluster at {joined} already: leave engine.address "
            "out, or call ray.shutdown() first."
        )


def plan_actors(
    options: RunOptions, living: Sequence[Mapping[str, float]], coming: Sequence[Mapping[str, float]] = ()
) -> Plan:
    """Return how many client actors fit beside the server on nodes (each a ``{"CPU": n, "GPU": n}``).

    ``coming`` nodes are those an autoscaler starts when they are asked for.

    Raises:
        ResourceError: the server or not even one client actor fits on any node, now or ever.
    """
    nodes = [*living, *coming]
    _refuse_impossible("server", options.server.cpu, options.server.gpu, nodes)
    _refuse_impossible("clients", options.clients.cpu, options.clients.gpu, nodes)
    free = _place_server(options, nodes)
    fit = sum(_fits(options.clients.cpu, options.clients.gpu, node) for node in free)
    if fit == 0:
        raise ResourceError(
            f"the server (server.cpu={options.server.cpu:g}, server.gpu={options.server.gpu:g}) leaves no room for "
            f"a client actor (clients.cpu={options.clients.cpu:g}, clients.gpu={options.clients.gpu:g}) on "
            f"{describe(nodes)}: "
            "lower one of them."
        )
    useful = min(fit, options.cohort_size)
    asked = options.clients.actors
    if asked == "auto":
        return Plan(useful, f"{len(coming)} nodes can be added by the autoscaler as needed." if coming else None)
    if asked > fit:
        return Plan(
            fit, f"clients.actors={asked} but {fit} fit on {describe(nodes)}: {fit} run at a time, clients take turns."
        )
    return Plan(min(asked, useful))


def _refuse_impossible(who: str, cpu: float, gpu: float, nodes: Sequence[Mapping[str, float]]) -> None:
    most_gpu = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    most_cpu = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
    if gpu > most_gpu:
        remedy = (
            f"use at most {who}.gpu={most_gpu:g}"
            if most_gpu
            else f"use {who}.gpu=0, or join a cluster with GPUs (engine.address)"
        )
        raise ResourceError(
            f"{who}.gpu={gpu:g} can never be met: the largest node has {most_gpu:g} GPUs ({describe(nodes)}); {remedy}."
        )
    if cpu > most_cpu:
        raise ResourceError(
            f"{who}.cpu={cpu:g} can never be met: the largest node has {most_cpu:g} CPUs "
            f"({describe(nodes)}); use at most {who}.cpu={most_cpu:g}."
        )


def _place_server(options: RunOptions, nodes: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    free = [dict(node) for node in nodes]
    need = {"CPU": options.server.cpu, "GPU": options.server.gpu}
    for node in sorted(free, key=lambda n: n.get("GPU", 0.0)):
        if all(node.get(kind, 0.0) >= amount for kind, amount in need.items()):
            for kind, amount in need.items():
                node[kind] = node.get(kind, 0.0) - amount
            return free
    return free


def _fits(cpu: float, gpu: float, node: Mapping[str, float]) -> int:
    by_cpu = math.floor(node.get("CPU", 0.0) / cpu + 1e-9) if cpu else 10**6
    if not gpu:
        return by_cpu if cpu else max(1, int(node.get("CPU", 1)))
    # A fractional share has to lie on one card.
    cards = math.floor(node.get("GPU", 0.0) + 1e-9)
    by_gpu = cards * math.floor(1 / gpu + 1e-9) if gpu <= 1 else cards // int(gpu)
    leftover = node.get("GPU", 0.0) - cards
    if gpu <= 1:
        by_gpu += math.floor(leftover / gpu + 1e-9)
    return min(by_cpu, by_gpu)


def describe(nodes: Sequence[Mapping[str, float]]) -> str:
    """What ``nodes`` have, in words."""
    cpu, gpu = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)} with {cpu:g} CPUs and {gpu:g} GPUs in all"


def cluster_nodes() -> list[dict[str, float]]:
    """The living nodes of the joined cluster and what each has."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def coming_nodes(living: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The nodes that the cluster's autoscaler may still start: what its groups allow, less those that live."""
    from ray._private.state import state

    config = state.get_cluster_config()
    found: list[dict[str, float]] = []
    for group in config.node_group_configs if config is not None else ():
        size = {kind: float(group.resources.get(kind, 0)) for kind in ("CPU", "GPU")}
        here = sum(all(node.get(kind, 0.0) == amount for kind, amount in size.items()) for node in living)
        most = MANY if group.max_count < 0 else group.max_count
        found += [size] * max(0, min(most, MANY) - here)
    return found


MANY = 256
"""Nodes of one group that are reckoned with where the group has no maximum."""


def plan_here(options: RunOptions) -> Plan:
    """The plan for the joined cluster as it is now, or for this process; raises as ``plan_actors`` does."""
    if options.engine.pool == "local":
        return Plan(1)
    living = cluster_nodes()
    return plan_actors(options, living, coming_nodes(living))
