"""What ``ray job submit --working-dir`` would send, by Ray's own rules, and which folders it comes from."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path

from rayfed.errors import OptionError

MIB = 2**20
LARGE = 20 * MIB
"""An upload above this is worth a look: it is sent again whenever a file changes."""


def upload_sizes(folder: Path) -> Counter[str]:
    """Bytes that would be sent, before compression: ``""`` for all, files beside, and folders two levels deep.

    ``.gitignore`` and ``.rayignore`` count at every level, and Ray's own exclusions (``.git``, ``.venv``, ...) too.
    """
    from ray._private import ray_constants
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    sizes: Counter[str] = Counter()
    folder = folder.absolute()

    def count(path: Path) -> None:
        if not path.is_file():
            return
        *parents, name = path.relative_to(folder).parts
        size = path.stat().st_size
        sizes[""] += size
        if not parents:
            sizes[name] += size
        for depth in range(1, min(len(parents), 2) + 1):
            sizes["/".join(parents[:depth]) + "/"] += size

    _dir_travel(
        folder,
        [_get_excludes(folder, ray_constants.get_runtime_env_default_excludes())],
        count,
        include_gitignore=os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1",
        logger=logging.getLogger("rayfed.quiet"),
    )
    return sizes


def upload_report(folder: Path, largest: int = 8) -> tuple[str, bool]:
    """The size of the upload, its largest parts and how to leave them out; and whether Ray would take it.

    Raises:
        OptionError: ``folder`` is no folder.
    """
    from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE

    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder: give the one you would pass as --working-dir.")
    sizes = upload_sizes(folder)
    total = sizes.pop("", 0)
    lines = [
        f"{folder}: {total / MIB:.1f} MiB to upload before compression (Ray takes {GCS_STORAGE_MAX_SIZE / MIB:.0f} MiB)"
    ]
    lines += [f"  {size / MIB:8.1f} MiB  {name}" for name, size in sizes.most_common(largest)]
    if total > LARGE:
        first = next((name for name, _ in sizes.most_common() if name.endswith("/")), next(iter(sizes)))
        lines.append(
            f"To leave something out, write its path into {folder / '.rayignore'}, one a line and with a leading "
            f"slash, such as /{first} (.gitignore counts too). Data belong on storage the nodes share: data.root=DIR."
        )
    return "\n".join(lines), total <= GCS_STORAGE_MAX_SIZE
