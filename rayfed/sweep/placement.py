"""What a trial reserves: everything it starts, in one placement group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.conf.options import RunOptions
from rayfed.engine.resources import Plan, cluster_nodes, coming_nodes, describe, plan_actors
from rayfed.errors import ResourceError

Bundle = dict[str, float]
LEAST_CPU = 0.001
"""What a trial that asks for nothing reserves: Ray has no empty placement group."""


def plan_trial(options: RunOptions, nodes: Sequence[Mapping[str, float]]) -> Plan:
    """How many client actors a trial gets on ``nodes``: those asked for, or as many as fit if it is alone.

    Raises:
        ResourceError: not even one fits; it tells the sum of what a trial needs and what there is.
    """
    try:
        plan = plan_actors(options, nodes)
    except ResourceError as error:
        least = bundles(options, 1)
        cpu, gpu = (sum(bundle.get(kind, 0.0) for bundle in least) for kind in ("CPU", "GPU"))
        raise ResourceError(
            f"no trial can ever start: server and one client actor need {cpu:g} CPUs and {gpu:g} GPUs in all, and "
            f"there is {describe(nodes)}; {error}"
        ) from error
    return Plan(1) if options.engine.pool == "local" else plan


def bundles(options: RunOptions, num_actors: int) -> list[Bundle]:
    """Driver, server, and one per client actor, without those that need nothing; a run in one process is one bundle."""
    clients, server = options.clients, options.server
    if options.engine.pool == "local":
        return [_bundle(max(clients.cpu, server.cpu, LEAST_CPU), max(clients.gpu, server.gpu))]
    wanted = [_bundle(server.cpu, server.gpu), *[_bundle(clients.cpu, clients.gpu)] * num_actors]
    # The driver only waits, as that of a run of its own does, so it reserves nothing: an empty head bundle.
    needed = [bundle for bundle in wanted if bundle]
    return [{}, *needed] if needed else [_bundle(LEAST_CPU, 0)]


def _bundle(cpu: float, gpu: float) -> Bundle:
    return {kind: amount for kind, amount in (("CPU", cpu), ("GPU", gpu)) if amount > 0}


def side_by_side(wanted: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], most: int) -> int:
    """How many trials of such bundles fit on ``nodes`` at once (first fit; at least 1, at most ``most``)."""
    free = [dict(node) for node in nodes]
    for count in range(most):
        for bundle in sorted(wanted, key=lambda b: (-b.get("GPU", 0.0), -b.get("CPU", 0.0))):
            place = next((n for n in free if all(n.get(k, 0.0) >= v - 1e-9 for k, v in bundle.items())), None)
            if place is None:
                return max(count, 1)
            for kind, amount in bundle.items():
                place[kind] = place.get(kind, 0.0) - amount
    return max(most, 1)


def all_nodes() -> list[dict[str, float]]:
    """The nodes of the joined cluster, and those its autoscaler can add."""
    living = cluster_nodes()
    return [*living, *coming_nodes(living)]


def factory(options: RunOptions, num_actors: int) -> Any:
    """The placement group of a trial: packed, on one node where it fits there."""
    from ray import tune

    return tune.PlacementGroupFactory(bundles(options, num_actors), strategy="PACK")
