"""Decisions of the Ray pool that need no Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray.exceptions

from rayfed.engine import actors, cards, memory, ray_pool
from rayfed.engine.memory import Need
from rayfed.engine.pool import ServerLost
from rayfed.engine.slots import Slot
from rayfed.errors import ResourceError

KILLED_FOR_MEMORY = ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")


def bare_pool(get):
    """A pool without actors, whose ``ray.get`` is ``get``."""
    pool = object.__new__(ray_pool.RayPool)
    pool._ray = SimpleNamespace(get=get, exceptions=ray.exceptions)
    call = SimpleNamespace(remote=lambda verb, *args: verb)
    pool._server = SimpleNamespace(call=call, ping=SimpleNamespace(remote=lambda: "ping"))
    pool._packets = {}
    return pool


@pytest.mark.parametrize("error", [ray.exceptions.ActorDiedError(), KILLED_FOR_MEMORY], ids=["crashed", "memory"])
def test_a_server_that_was_killed_is_lost_whatever_killed_it(error):
    def get(reference):
        raise error

    pool = bare_pool(get)
    with pytest.raises(ServerLost):
        pool.finish(SimpleNamespace(), (), (), last=True)()
    assert pool._server_is_dead()


def test_a_loss_is_named_by_its_reason():
    assert ray_pool._reason(ray, KILLED_FOR_MEMORY) == "killed for memory"
    assert ray_pool._reason(ray, ray.exceptions.ActorDiedError()) == "crashed"
    assert ray_pool._reason(ray, ray.exceptions.ObjectLostError("00", None, "")) == "reply lost"


@pytest.mark.parametrize(("most", "left"), [(3, 4), (4, 4), (5, 3), (9, 1), (40, 1)])
def test_as_many_go_on_side_by_side_as_the_card_holds(most, left, monkeypatch, caplog):
    killed = []
    monkeypatch.setattr(actors, "kill", killed.append)
    slots = [Slot(actor=number, usable=True) for number in range(4)]
    cards.spare(slots, Need(most * 2**30, 16 * 2**30))
    assert [slot.actor for slot in slots if slot.usable] == list(range(left))
    assert [slot.actor for slot in slots if slot.retired] == killed
    assert killed == list(range(left, 4))
    sentence = f"a client needs {most:.1f} GiB and its card has 16.0 GiB: {left} side by side instead of 4"
    assert (sentence in caplog.text) == (left < 4)


def test_actors_on_one_card_are_told_from_those_on_another():
    places = [("a", "0", True), ("a", "1", True), ("b", "0", True), ("a", "0", True), ("a", "0", False)]
    slots = [Slot(number, node, card, usable=usable) for number, (node, card, usable) in enumerate(places)]
    assert [[slot.actor for slot in group] for group in cards.sharing(slots)] == [[0, 3], [1], [2]]


def test_running_out_of_memory_says_who_and_what_to_do():
    said = pytest.raises(ResourceError, match=r"the server ran out of memory \(no room\): lower data.proxy\.")
    with said, memory.enough("the server", "lower data.proxy"):
        raise MemoryError("no room")
    with pytest.raises(ValueError, match="something else"), memory.enough("the server", ""):
        raise ValueError("something else")


def test_server_is_tried_again_while_ray_offers_the_lost_node(monkeypatch):
    monkeypatch.setattr(ray_pool, "PAUSE_S", 0.0)
    starts = []

    def get(ready):
        if ready < 3:
            raise ray.exceptions.ActorDiedError()

    pool = bare_pool(get)
    pool._start_server = lambda: (starts.append("try"), (f"actor {len(starts)}", len(starts)))[1]
    pool._options = SimpleNamespace(engine=SimpleNamespace(retries=2))
    assert pool._replacement() == "actor 3"
    starts.clear()
    pool._options = SimpleNamespace(engine=SimpleNamespace(retries=1))
    with pytest.raises(ResourceError, match="the server actor died while starting"):
        pool._replacement()
    assert len(starts) == 2
