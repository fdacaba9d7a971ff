"""Saved rounds: a server state, the names and hashes of every client's private state, and the figures so far.

    out/checkpoints/round_00005/manifest.json   written last; a round without a whole manifest does not exist
    out/checkpoints/round_00005/server.safetensors
    out/checkpoints/clients/00003/r00005-train-<hash>.safetensors

Everything is written aside and renamed. Loading takes the newest round whose every file has the recorded hash, and
says which newer ones it passed over and why.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayfed.conf.options import RESUMABLE
from rayfed.engine.jobs import StateRef
from rayfed.engine.store import write_whole
from rayfed.errors import CheckpointError, StorageError

MANIFEST, SERVER = "manifest.json", "server.safetensors"


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved run after ``rounds_done`` rounds."""

    rounds_done: int
    server: bytes
    private: dict[int, StateRef]
    figures: dict[str, Any]
    passed_over: tuple[str, ...] = field(default=())


class Checkpoints:
    """The saved rounds under ``out/checkpoints``; ``may_change`` names options in which a save may differ."""

    def __init__(
        self, out: Path, *, keep: int, options: Mapping[str, Any], may_change: frozenset[str] = frozenset()
    ) -> None:
        self.root = out / "checkpoints"
        self.clients = self.root / "clients"
        self._keep = keep
        self._options, self._may_change = dict(options), may_change
        self._last: dict[int, StateRef] | None = None
        self._superseded: list[tuple[int, list[str]]] = []

    def save(
        self, rounds_done: int, server: bytes, private: Mapping[int, StateRef], figures: Mapping[str, Any]
    ) -> None:
        """Save a round, then remove what only older rounds than the last ``keep`` need.

        Raises:
            StorageError: it cannot be written (a full disk); the saves before it are untouched.
        """
        folder = self.root / f"round_{rounds_done:05d}"
        manifest = {
            "rounds_done": rounds_done,
            "options": self._options,
            "server_sha256": hashlib.sha256(server).hexdigest(),
            "private": {str(client): [ref.file, ref.sha256] for client, ref in sorted(private.items())},
            "figures": figures,
        }
        try:
            write_whole(folder / SERVER, server)
            write_whole(folder / MANIFEST, json.dumps(manifest).encode())
        except OSError as error:
            raise StorageError(
                f"round {rounds_done} cannot be saved in {folder} ({error.strerror}): free some space and go on with "
                "resume=auto; the last good save is kept."
            ) from error
        self._prune(rounds_done, private)

    def exists(self) -> bool:
        """Whether any round was saved here, whole or not."""
        return any(self._folders())

    def load_newest(self) -> Saved | None:
        """Return the newest whole save, or None where there is none.

        Raises:
            CheckpointError: it belongs to a run with other options (named).
        """
        passed_over: list[str] = []
        for folder in self._folders():
            try:
                manifest, server = self._read(folder)
            except CheckpointError as error:
                passed_over.append(f"{folder.name}: {error}")
                continue
            self._refuse_other_options(manifest["options"])
            private = {int(client): StateRef(*ref) for client, ref in manifest["private"].items()}
            return Saved(manifest["rounds_done"], server, private, manifest["figures"], tuple(passed_over))
        if passed_over:
            raise CheckpointError(f"no saved round in {self.root} is whole: {'; '.join(passed_over)}.")
        return None

    def _folders(self) -> list[Path]:
        return sorted(self.root.glob("round_*"), reverse=True)

    def _read(self, folder: Path) -> tuple[dict[str, Any], bytes]:
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            server = (folder / SERVER).read_bytes()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{' '.join(str(error).split())}") from error
        if hashlib.sha256(server).hexdigest() != manifest["server_sha256"]:
            raise CheckpointError("the server state is damaged")
        for file, sha256 in manifest["private"].values():
            path = self.clients / file
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
                raise CheckpointError(f"private state {file} is missing or damaged")
        return manifest, server

    def _refuse_other_options(self, saved: Mapping[str, Any]) -> None:
        names = sorted(saved.keys() | self._options.keys())
        other = [n for n in names if saved.get(n) != self._options.get(n) and n not in self._may_change]
        if other:
            shown = ", ".join(f"{n} was {saved.get(n)} and is now {self._options.get(n)}" for n in other[:5])
            raise CheckpointError(
                f"the saved run in {self.root} has other options ({shown}): restore them or choose another out=."
            )

    def _prune(self, rounds_done: int, private: Mapping[int, StateRef]) -> None:
        """Keep the newest saves up to ``rounds_done``; later folders are leftovers of a run that was set back.

        The first time everything that no save needs is removed; from then on, what this process saw replaced.
        """
        saves = [folder for folder in self._folders() if folder.name <= f"round_{rounds_done:05d}"]
        kept = saves[: self._keep]
        for folder in set(self._folders()) - set(kept):
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        if self._last is None:
            self._sweep(kept)
        else:
            replaced = [ref.file for client, ref in self._last.items() if private.get(client) != ref]
            self._superseded.append((rounds_done, replaced))
        self._last = dict(private)
        oldest = int(kept[-1].name.removeprefix("round_"))
        for _, files in (found for found in self._superseded if found[0] <= oldest):
            for file in files:
                (self.clients / file).unlink(missing_ok=True)
        self._superseded = [found for found in self._superseded if found[0] > oldest]

    def _sweep(self, kept: Sequence[Path]) -> None:
        found = list(self.clients.glob("*/*.safetensors"))
        needed = {file for folder in kept for file in _private_files(folder)} if found else set()
        for path in found:
            if needed and str(path.relative_to(self.clients)) not in needed:
                path.unlink(missing_ok=True)


def _private_files(folder: Path) -> list[str]:
    try:
        return [file for file, _ in json.loads((folder / MANIFEST).read_text())["private"].values()]
    except (OSError, ValueError):
        return []


def identity(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The options that make a run what it is: all but ``RESUMABLE``."""
    return {name: value for name, value in flat.items() if name not in RESUMABLE}
