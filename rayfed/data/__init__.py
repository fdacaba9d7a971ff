"""Images, and who has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayfed.conf.options import RunOptions
    from rayfed.data.long_tail import LongTail
    from rayfed.data.task import Task


def build_task_from_options(options: RunOptions) -> Task:
    """Build the task of a run; see ``rayfed.data.task.build_task``."""
    from rayfed.backbones import image_size
    from rayfed.data.task import build_task

    return build_task(
        options.data,
        options.partition,
        num_clients=options.clients.n,
        seed=options.seed,
        image_size=image_size(options.backbone.name),
        backbone=options.backbone.name,
        needs_proxy=options.method.uses_proxy(),
        tail=_tail(options),
        split=options.task.split,
    )


def _tail(options: RunOptions) -> LongTail | None:
    from rayfed.data.long_tail import LongTail

    chosen = options.partition
    if chosen.long_tail is None:
        return None
    factor = min(chosen.long_tail, 1 / chosen.long_tail)
    return LongTail(factor, chosen.long_tail_order, chosen.long_tail_min)
