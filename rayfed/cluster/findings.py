"""What a check finds: a field, and one sentence about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (``refused``) or risky with a cluster file."""

    field: str
    """Where: dotted path, such as ``available_node_types.gpu.max_workers``."""
    sentence: str
    """The value, the rule it breaks, what to write instead."""
    refused: bool = True

    def __str__(self) -> str:
        return f"{'error' if self.refused else 'warning'}: {self.field} {self.sentence}"


def warning(field: str, sentence: str) -> Finding:
    """A finding that does not stop a cluster from starting."""
    return Finding(field, sentence, refused=False)
