"""A cluster of several nodes: shares of a card are kept, a node that is added is used, one that dies costs nothing."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter

import pytest
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions
from ray.cluster_utils import Cluster

from tests.engine.runs import FAST, assert_same_bits, run, run_well, start, wait_until

WORDS = [*[w for w in FAST if not w.startswith(("clients.n=", "rounds="))], "clients.n=8", "rounds=12"]
METHOD = "method=tests.engine.faulty:Faulty"
SHARE = ["clients.gpu=0.25", "clients.cpu=0.5", "engine.device=cpu"]


@pytest.fixture(scope="module")
def cluster():
    """A head without a card and a node with one (a pretended one)."""
    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    found.first = found.add_node(num_cpus=2, num_gpus=1)
    yield found
    found.shutdown()


def state_of(cluster) -> GlobalState:
    """What the cluster says of itself."""
    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(cluster.gcs_address, None, True, True))
    return state


def workers_by_node(cluster) -> Counter[str]:
    """How many client actors live on each node."""
    actors = [a for a in state_of(cluster).actor_table(None).values() if a["ActorClassName"] == "ClientActor"]
    return Counter(a["Address"]["NodeID"] for a in actors if a["State"] == "ALIVE")


def test_nodes_come_and_go(cluster, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    process = start(METHOD, f"engine.address={cluster.address}", *SHARE, f"out={out}", *WORDS)
    wait_until((out / "checkpoints" / "round_00001" / "manifest.json").exists, process)
    first = cluster.first.node_id
    assert workers_by_node(cluster) == {first: 4}, "four clients share the only card"
    second = cluster.add_node(num_cpus=1, num_gpus=1)
    wait_until(lambda: workers_by_node(cluster)[second.node_id] == 2, process)
    assert workers_by_node(cluster)[first] == 4
    cluster.remove_node(cluster.first, allow_graceful=False)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, output + errors
    assert (out / "summary.json").exists() and workers_by_node(cluster)[first] == 0
    run_well(METHOD, "engine.pool=local", f"out={whole}", *WORDS)
    assert_same_bits(whole, out)
    assert all(not json.loads(line)["failures"] for line in (out / "metrics.jsonl").read_text().splitlines())


def test_clients_that_do_not_fit_a_card_together_are_fewer_side_by_side(cluster, tmp_path):
    """The card is pretended to hold two clients; four would share it."""
    cluster.add_node(num_cpus=2, num_gpus=1)
    words = [word for word in WORDS if not word.startswith("rounds=")]
    whole, out = tmp_path / "whole", tmp_path / "run"
    share = ["clients.gpu=0.25", "clients.cpu=0.25", "engine.device=cpu", "clients.actors=8"]
    done = run_well(
        METHOD, "method.card_mib=1000", f"engine.address={cluster.address}", *share, f"out={out}", *words, "rounds=1"
    )
    assert "a client needs 0.4 GiB and its card has 1.0 GiB: 2 side by side instead of 4" in done.stderr
    run_well(METHOD, "engine.pool=local", f"out={whole}", *words, "rounds=1")
    assert_same_bits(whole, out)


def test_those_for_whom_there_is_no_share_of_a_card_take_turns(cluster, tmp_path):
    """0.34 of a card goes twice into one, not three times."""
    words = [word for word in WORDS if not word.startswith("rounds=")]
    share = ["clients.gpu=0.34", "clients.cpu=0.25", "engine.device=cpu", "clients.actors=8"]
    address, out = f"engine.address={cluster.address}", tmp_path / "run"
    done = run_well("method=fedlora", address, *share, f"out={out}", *words, "rounds=1")
    cards = sum(n["Alive"] and n["Resources"].get("GPU", 0) for n in state_of(cluster).node_table())
    fit = int(2 * cards)
    assert f"clients.actors=8 but {fit} fit" in done.stdout and "clients take turns" in done.stdout, done.stdout
    (record,) = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(record["cohort"]) == 8 and not record["failures"]


def test_cards_that_torch_cannot_use_are_reported_with_the_node(cluster, tmp_path):
    """Ray counts cards that torch does not see (no driver, another build): said before the first round."""
    started = time.monotonic()
    done = run(
        "method=fedlora", f"engine.address={cluster.address}", "clients.gpu=0.25", f"out={tmp_path / 'o'}", *FAST
    )
    assert time.monotonic() - started < 60
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"a process on node {socket.gethostname()} but torch sees no GPU there" in done.stderr
    assert "round 1/" not in done.stdout
