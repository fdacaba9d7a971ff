"""Class names to texts, and texts to token rows that still tell the classes apart."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rayfed.errors import BackboneError, DataError, OptionError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

# Room to tokenize a text in full, so that it can be told whether the model's own length would cut it.
_ROOM = 4096


def readable_name(name: str) -> str:
    """``name`` as it is read out: Unicode in composed form, underscores as spaces, single spaces."""
    return " ".join(unicodedata.normalize("NFC", name).replace("_", " ").split())


def class_texts(names: Sequence[str], template: str) -> tuple[list[str], list[list[int]]]:
    """Fill ``template`` with each class name; also return the groups of class ids whose names read alike.

    Names read alike if they are equal without regard to case, underscores, spacing and Unicode form. Raises
    ``OptionError`` unless "{}" occurs exactly once in the template, ``DataError`` for an empty name.
    """
    if template.count("{}") != 1:
        raise OptionError(
            f"Template {template!r} has {template.count('{}')} places for the class name but needs exactly one; "
            "write it with one {}, as in 'a photo of a {}.'."
        )
    readable = [readable_name(name) for name in names]
    empty = [index for index, name in enumerate(readable) if not name]
    if empty:
        raise DataError(f"Class {empty[0]} has an empty name ({names[empty[0]]!r}); give every class a name.")
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(readable):
        groups.setdefault(unicodedata.normalize("NFC", name.casefold()), []).append(index)
    texts = [template.replace("{}", name) for name in readable]
    return texts, [group for group in groups.values() if len(group) > 1]


def tokenize_texts(
    tokenizer: Callable[..., Tensor], length: int, texts: Sequence[str], names: Sequence[str] | None = None
) -> Tensor:
    """Token rows [N, length] of ``texts``, none of which loses what sets it apart.

    A text too long for the model is replaced by its entry in ``names``, if that is given and fits: the template is cut,
    not the name. What is still cut is named in a warning. Raises ``BackboneError`` if a text is empty, if two different
    texts are cut to the same row, or if the tokenizer does not produce rows of ``length``.
    """
    final = _checked(texts, names)
    cut = _cut_rows(tokenizer, length, final)
    if names is not None and cut:
        short = [readable_name(names[index]) for index in cut]
        still = set(_cut_rows(tokenizer, length, short))
        for place, index in enumerate(cut):
            if place not in still:
                final[index] = short[place]
        _warn_template_dropped([short[place] for place in range(len(cut)) if place not in still])
        cut = [index for place, index in enumerate(cut) if place in still]
    rows = tokenizer(final, context_length=length)
    if tuple(rows.shape) != (len(final), length):
        raise BackboneError(
            f"The tokenizer gives rows of {rows.shape[-1]} tokens but the text tower takes {length}; "
            "use the tokenizer that belongs to the model."
        )
    _check_cut(rows, cut, final, length)
    return rows


def _checked(texts: Sequence[str], names: Sequence[str] | None) -> list[str]:
    if names is not None and len(names) != len(texts):
        raise BackboneError(f"{len(texts)} texts came with {len(names)} names; give one name for each text.")
    empty = [index for index, text in enumerate(texts) if not text.strip()]
    if empty or not texts:
        which = f"Text {empty[0]} is empty" if empty else "The list of class texts is empty"
        raise BackboneError(f"{which}, so the text tower has nothing to encode; give every class a name.")
    return [unicodedata.normalize("NFC", text) for text in texts]


def _cut_rows(tokenizer: Callable[..., Tensor], length: int, texts: Sequence[str]) -> list[int]:
    """Indices of the texts that do not fit into ``length`` tokens."""
    room = max(_ROOM, 2 * length)
    full = tokenizer([*texts, "a"], context_length=room)
    padding = full[-1, -1]
    # Shorter rows hold nothing but padding from the model's length on, whatever token the tokenizer pads with.
    overflow = (full[:-1, length:] != padding).any(dim=1)
    return [int(index) for index in overflow.nonzero().flatten()]


def _warn_template_dropped(names: Sequence[str]) -> None:
    if names:
        logger.warning("The template is too long beside these class names, which are used alone: %s.", _listed(names))


def _check_cut(rows: Tensor, cut: Sequence[int], texts: Sequence[str], length: int) -> None:
    for index in cut:
        for other in range(len(texts)):
            if texts[other] != texts[index] and bool((rows[other] == rows[index]).all()):
                raise BackboneError(
                    f"Texts {_short(texts[min(index, other)])} and {_short(texts[max(index, other)])} (classes "
                    f"{min(index, other)} and {max(index, other)}) are equal once cut to the {length} tokens the model "
                    "takes; shorten the names or the template."
                )
    if cut:
        logger.warning(
            "These texts are longer than the %d tokens the model takes and were cut: %s.",
            length,
            _listed([texts[index] for index in cut]),
        )


def _listed(texts: Sequence[str]) -> str:
    shown = ", ".join(_short(text) for text in texts[:10])
    return shown + (f" and {len(texts) - 10} more" if len(texts) > 10 else "")


def _short(text: str) -> str:
    """Both ends of a long text: what tells two of them apart is often the end."""
    return repr(text if len(text) <= 120 else f"{text[:60]} ... {text[-50:]}")
