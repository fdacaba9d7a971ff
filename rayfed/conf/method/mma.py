"""Options of mma: the Multi-Modal Adapter, averaged by examples."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rayfed.conf.method import blend
from rayfed.conf.options import BottleneckOptions, Count


class Options(BottleneckOptions):
    """Shared bottlenecks whose middle layer is one for both towers."""

    needs_text: ClassVar[bool] = True

    name: Literal["mma"] = "mma"
    rank: Count = 32
    """Width of the bottlenecks and of their middle layer."""
    blocks: Annotated[tuple[str, ...], Field(min_length=1)] = ("5-",)
    """Adapted blocks of both towers: all, numbers from 1 (5, 5-12, 5-), module names or patterns such as *.1?."""

    def ranks(self) -> dict[str, int]:
        """The one rank."""
        return {"rank": self.rank}


PROFILES: dict[str, dict[str, Any]] = {
    # Accuracy on validation images (seed 100, 8 rounds, `python -m benchmarks.studies lr`): 81.1 for 1e-3 and for 3e-3,
    # 81.5 for 1e-2, 81.2 for 3e-2.
    "embedded": {**blend.EMBEDDED, "method.blocks": ("all",)},
    "paper": {  # the paper trains centrally: its optimiser, in BLEND's federation
        **blend.PROFILES["paper"],
        "train.optimizer": "sgd",
        "train.momentum": 0.9,
    },
}
