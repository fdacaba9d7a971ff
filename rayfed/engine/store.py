"""Private client states as files of their own; a state counts only once the run has recorded its name and hash."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from pathlib import Path

import safetensors.torch
from torch import Tensor

from rayfed.engine.jobs import StateRef
from rayfed.errors import CheckpointError, StorageError
from rayfed.state import ClientState

PRIVATE = "private"
CACHED_STATES = 64


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` aside, flush it to disk, and rename: ``path`` is either old or whole, never cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


class ClientStore:
    """Reads and stages private states under ``root``; keeps the latest in memory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._recent: OrderedDict[str, ClientState] = OrderedDict()

    def stage(self, client_id: int, label: str, state: ClientState) -> StateRef:
        """Save ``state`` under a name of its own content: doing it twice is harmless.

        Raises:
            StorageError: it cannot be written (a full disk).
        """
        data = safetensors.torch.save({PRIVATE: state.private, **{f"extra.{k}": v for k, v in state.extras.items()}})
        digest = hashlib.sha256(data).hexdigest()
        ref = StateRef(f"{client_id:05d}/{label}-{digest[:12]}.safetensors", digest)
        try:
            write_whole(self._root / ref.file, data)
        except OSError as error:
            raise StorageError(
                f"the private state of client {client_id} cannot be saved in {self._root} ({error.strerror}): free "
                "some space and go on with resume=auto; the last good save is kept."
            ) from error
        self._remember(ref, state)
        return ref

    def discard(self, ref: StateRef) -> None:
        """Remove a staged state that nothing refers to."""
        self._recent.pop(ref.sha256, None)
        (self._root / ref.file).unlink(missing_ok=True)

    def load(self, ref: StateRef) -> ClientState:
        """Return a recorded state. Raises CheckpointError if the file is missing or not what was recorded."""
        if ref.sha256 in self._recent:
            return self._recent[ref.sha256]
        path = self._root / ref.file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"private state {path} cannot be read ({error.strerror}); resume from an older round."
            ) from error
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CheckpointError(
                f"private state {path} is not what was saved (damaged file); resume from an older round."
            )
        tensors = safetensors.torch.load(data)
        state = ClientState(tensors.pop(PRIVATE), _extras(tensors))
        self._remember(ref, state)
        return state

    def _remember(self, ref: StateRef, state: ClientState) -> None:
        self._recent[ref.sha256] = state
        while len(self._recent) > CACHED_STATES:
            self._recent.popitem(last=False)


def _extras(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("extra."): tensor for name, tensor in tensors.items()}
