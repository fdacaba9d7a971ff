"""Names a tracking store takes for figures whose own names may hold any sign (class names do)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from rayfed.engine.store import write_whole

FILE = "metric-names.json"
LONGEST = 200
FORBIDDEN = re.compile(r"[^A-Za-z0-9_. -]")


class NameTable:
    """Safe names for real ones: two different names never become one, and the table is kept with the run."""

    def __init__(self) -> None:
        self._real: dict[str, str] = {}

    def safe(self, figures: Mapping[str, float]) -> dict[str, float]:
        """``figures`` under safe names."""
        return {self.name(real): value for real, value in figures.items()}

    def name(self, real: str) -> str:
        """The safe name of ``real``: itself if it is safe, else what is safe of it and a hash of all of it."""
        for digits in range(6, 129, 2):
            name = _safe(real, digits)
            if self._real.setdefault(name, real) == real:
                return name
        raise AssertionError(real)

    def write(self, out: Path) -> None:
        """Write the table ``{safe: real}`` of the names that had to change, if there are any."""
        changed = {safe: real for safe, real in self._real.items() if safe != real}
        if changed and out.is_dir():
            write_whole(out / FILE, (json.dumps(changed, ensure_ascii=False, indent=1) + "\n").encode())


def _safe(real: str, digits: int) -> str:
    parts = [FORBIDDEN.sub("_", part) for part in real.split("/")]
    # A name is used as a path: no empty parts, none that means a folder above, no blanks at the ends.
    cleaned = "/".join(part if part.strip(" .") and part == part.strip() else "_" for part in parts)
    unchanged = cleaned == real and len(real) <= LONGEST
    if unchanged and digits == 6:
        return real
    return f"{cleaned[:LONGEST]}-{hashlib.blake2b(real.encode(), digest_size=64).hexdigest()[:digits]}"
