"""As many client actors side by side as a card has memory for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rayfed.engine.memory import Need
from rayfed.engine.slots import Slot

log = logging.getLogger("rayfed")


def sharing(slots: Sequence[Slot]) -> list[list[Slot]]:
    """The usable ``slots``, put together by the cards of their actors."""
    cards: dict[tuple[str, str], list[Slot]] = {}
    for slot in slots:
        if slot.usable:
            cards.setdefault((slot.node, slot.cards), []).append(slot)
    return list(cards.values())


def spare(slots: Sequence[Slot], need: Need) -> None:
    """End those of a card's ``slots`` that would not fit beside the others; one is always left."""
    room = max(1, need.side_by_side)
    for slot in slots[room:]:
        slot.retire()
    if room < len(slots):
        log.warning("%s: %d side by side instead of %d (raise clients.gpu)", need, room, len(slots))
