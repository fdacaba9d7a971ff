"""The embedded foundation model: a small CLIP trained on coloured shapes and Fashion-MNIST (see MODEL_CARD.md).

Importing this module reads the configuration and nothing else; torch and open_clip are imported on use.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rayfed.errors import BackboneError

if TYPE_CHECKING:
    import torch
    from open_clip.model import CLIP

_FOLDER = Path(__file__).parent

CONFIG: dict[str, Any] = json.loads((_FOLDER / "config.json").read_text(encoding="utf-8"))
"""open_clip model configuration: embed_dim, vision_cfg, text_cfg."""

MEAN: tuple[float, float, float] = (0.5, 0.5, 0.5)
"""Subtracted from pixels in [0, 1] (uint8 / 255), per channel."""

STD: tuple[float, float, float] = (0.25, 0.25, 0.25)
"""Divides the pixels after that, per channel."""


class HashTokenizer:
    """Turn texts into token ids by hashing, with no vocabulary file; any script, any word.

    Layout of a row, as open_clip's tokenizers have it: start, two ids for each word, end, padding. The end id is the
    largest, because open_clip pools the text features at the arg max. Words are runs of letters, digits and marks
    of any script, and every other visible character alone, after NFC normalisation and case folding.
    """

    pad_id = 0
    start_id = 1

    def __init__(self) -> None:
        self.context_length: int = CONFIG["text_cfg"]["context_length"]
        self.vocab_size: int = CONFIG["text_cfg"]["vocab_size"]
        self.end_id = self.vocab_size - 1

    def __call__(self, texts: str | Sequence[str], context_length: int | None = None) -> torch.Tensor:
        """Token ids, int64 [N, context_length], of N texts (one text counts as a list of one).

        Raises BackboneError for a text without words or with more than (context_length - 2) // 2: cutting it short
        could make two classes the same.
        """
        import torch

        length = self.context_length if context_length is None else context_length
        rows = [self._row(text, length) for text in ([texts] if isinstance(texts, str) else texts)]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), length)

    def _row(self, text: str, length: int) -> list[int]:
        words, room = split_words(text), (length - 2) // 2
        if not words:
            raise BackboneError(f"The text {text!r} holds no word; give each class a name and each prompt some text.")
        if len(words) > room:
            raise BackboneError(
                f"The text {text!r} has {len(words)} words and signs but the tiny backbone reads {room}; "
                "shorten the class name or the template."
            )
        ids = [self.start_id, *(token for word in words for token in self._word_ids(word)), self.end_id]
        return ids + [self.pad_id] * (length - len(ids))

    def _word_ids(self, word: str) -> tuple[int, int]:
        """Two ids between the start and the end id; two words share both about once in 16 million pairs."""
        digest, span = hashlib.blake2b(word.encode("utf-8"), digest_size=16).digest(), self.end_id - 2
        return 2 + int.from_bytes(digest[:8], "big") % span, 2 + int.from_bytes(digest[8:], "big") % span


def split_words(text: str) -> list[str]:
    """Words of a text in normal form: "AT&T" gives at, &, t."""
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    words: list[str] = []
    for in_word, run in groupby(folded, key=lambda sign: unicodedata.category(sign)[0] in "LMN"):
        signs = [sign for sign in run if not sign.isspace()]
        words += ["".join(signs)] if in_word else signs
    return words


def weights_path() -> Path:
    """The file with the pretrained weights (safetensors, float32)."""
    return _FOLDER / "weights.safetensors"


def load_tiny() -> CLIP:
    """The pretrained model on the CPU, float32, in evaluation mode.

    Raises BackboneError where the weights are missing, damaged or belong to another configuration.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    model = build_tiny(0)
    try:
        model.load_state_dict(load_file(weights_path()), strict=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        detail = str(error).replace("\n", " ")
        raise BackboneError(
            f"The tiny backbone's weights {weights_path()} cannot be loaded ({detail}); reinstall rayfed-vlm."
        ) from error
    return model.eval()


def build_tiny(seed: int) -> CLIP:
    """The untrained model, in training mode; its initial values depend on ``seed`` only."""
    import torch
    from open_clip.model import CLIP

    from rayfed.rng import derive_seed

    with torch.random.fork_rng(devices=[]):  # open_clip draws from the global stream
        torch.manual_seed(derive_seed(seed, "pretrain", "initial values"))
        return CLIP(**CONFIG)


def pretraining_hashes() -> NDArray[np.uint64]:
    """Content hashes of the source pixels of every pretraining image, sorted uint64 [M].

    Raises BackboneError where the list is missing or damaged.
    """
    path = _FOLDER / "hashes.npy"
    try:
        hashes: NDArray[np.uint64] = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BackboneError(
            f"The list of pretraining images {path} cannot be read ({error}); reinstall rayfed-vlm."
        ) from error
    return hashes
