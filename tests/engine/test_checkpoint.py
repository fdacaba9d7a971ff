"""Saves are whole or absent; the newest whole one is taken and what was passed over is named."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from rayfed.engine import store
from rayfed.engine.checkpoint import Checkpoints
from rayfed.engine.store import ClientStore, write_whole
from rayfed.errors import CheckpointError
from rayfed.state import ClientState


def saved(tmp_path, rounds=3, keep=2):
    checkpoints = Checkpoints(tmp_path, keep=keep, options={"train.lr": 0.1})
    clients = ClientStore(checkpoints.clients)
    for done in range(1, rounds + 1):
        private = {c: clients.stage(c, f"r{done}", ClientState(torch.full((3,), float(done + c)))) for c in (0, 4)}
        checkpoints.save(done, f"server {done}".encode(), private, {"history": list(range(done))})
    return checkpoints


def test_newest_whole_save_comes_back(tmp_path):
    found = saved(tmp_path).load_newest()
    assert found.rounds_done == 3 and found.server == b"server 3" and found.figures == {"history": [0, 1, 2]}
    assert sorted(found.private) == [0, 4] and found.passed_over == ()
    state = ClientStore(tmp_path / "checkpoints" / "clients").load(found.private[4])
    assert torch.equal(state.private, torch.full((3,), 7.0))


def test_old_saves_and_states_only_they_need_are_removed(tmp_path):
    saved(tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("round_*")) == ["round_00002", "round_00003"]
    assert len(list((tmp_path / "checkpoints" / "clients").glob("*/*.safetensors"))) == 4


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("file", ["round_00003/manifest.json", "round_00003/server.safetensors", "private"])
def test_a_cut_file_is_passed_over_and_said(tmp_path, file, size):
    checkpoints = saved(tmp_path)
    if file == "private":
        ref = checkpoints.load_newest().private[4]
        path = checkpoints.clients / ref.file
    else:
        path = checkpoints.root / file
    path.write_bytes(path.read_bytes()[:size])
    found = checkpoints.load_newest()
    assert found.rounds_done == 2 and found.server == b"server 2"
    assert len(found.passed_over) == 1 and found.passed_over[0].startswith("round_00003: ")


def test_nothing_whole_is_an_error_that_lists_why(tmp_path):
    checkpoints = saved(tmp_path)
    for path in checkpoints.root.glob("round_*/server.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no saved round .* is whole: round_00003: .*round_00002: "):
        checkpoints.load_newest()


def test_other_options_are_refused_by_name(tmp_path):
    saved(tmp_path)
    other = Checkpoints(tmp_path, keep=2, options={"train.lr": 0.2})
    with pytest.raises(CheckpointError, match=r"train\.lr was 0\.1 and is now 0\.2"):
        other.load_newest()


def test_a_full_disk_leaves_the_last_good_save_and_says_so(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"round 4 cannot be saved .*No space left on device.*last good save is kept"
    ):
        checkpoints.save(4, b"server 4", {}, {})
    monkeypatch.undo()
    assert checkpoints.load_newest().server == b"server 3"
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_save_never_leaves_a_half_written_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old")
    monkeypatch.setattr(store.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        write_whole(path, b"new and longer")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_state_staged_twice_is_one_file(tmp_path):
    clients = ClientStore(tmp_path)
    state = ClientState(torch.arange(4.0), {"anchor": torch.ones(2)})
    first, second = clients.stage(7, "r1", state), clients.stage(7, "r1", state)
    assert first == second and len(list(tmp_path.rglob("*.safetensors"))) == 1
    again = ClientStore(tmp_path).load(first)
    assert torch.equal(again.private, state.private) and torch.equal(again.extras["anchor"], torch.ones(2))


def test_a_damaged_or_missing_state_is_named(tmp_path):
    ref = ClientStore(tmp_path).stage(7, "r1", ClientState(torch.arange(4.0)))
    path = tmp_path / ref.file
    path.write_bytes(path.read_bytes()[:-4] + b"oops")
    with pytest.raises(CheckpointError, match="is not what was saved"):
        ClientStore(tmp_path).load(ref)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        ClientStore(tmp_path).load(ref)
