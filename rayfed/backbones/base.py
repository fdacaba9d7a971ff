"""The frozen backbone: one or two towers with everything needed to feed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rayfed.backbones.text import tokenize_texts
from rayfed.errors import BackboneError

if TYPE_CHECKING:
    from rayfed.backbones.prefix import Split

Tokenizer = Callable[..., Tensor]
"""``tokenizer(texts, context_length=None) -> long [N, T]``: pads, and cuts rows longer than ``context_length``."""


@dataclass(frozen=True)
class Preprocessing:
    """Square input size in pixels and the channel statistics (in units of 0..1 pixels) a backbone expects."""

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Backbone(nn.Module):
    """A frozen pretrained model: an image tower and, for CLIP, a text tower (``has_text``).

    ``embed_dim`` (D) is the width of what both encoders return. ``logit_scale`` is the factor on cosine similarities,
    already exponentiated (1.0 without text). ``settings`` describes the model in plain JSON values and is saved with
    its weights. Nothing here requires gradients, and the module stays in evaluation mode whatever ``train`` is told;
    a module attached later that needs training mode has to be switched on its own. ``split``: the halves of the image
    tower, if a method has cut it where its adapters begin.
    """

    _mean: Tensor
    _std: Tensor

    def __init__(
        self,
        name: str,
        image_tower: nn.Module,
        *,
        embed_dim: int,
        preprocessing: Preprocessing,
        settings: dict[str, Any],
        text_tower: nn.Module | None = None,
        tokenizer: Tokenizer | None = None,
        context_length: int = 0,
        extras: dict[str, Tensor] | None = None,
    ) -> None:
        """``extras`` holds weights that belong to no tower (``logit_scale`` in log space, ``logit_bias``)."""
        super().__init__()
        self.name = name
        self.image_size = preprocessing.image_size
        self.mean = preprocessing.mean
        self.std = preprocessing.std
        self.embed_dim = embed_dim
        self.settings = settings
        self.image_tower = image_tower
        self.text_tower = text_tower
        self.context_length = context_length
        self.split: Split | None = None
        self.extras = {key: value.detach().clone() for key, value in (extras or {}).items()}
        self.logit_scale = float(self.extras["logit_scale"].exp()) if "logit_scale" in self.extras else 1.0
        self._tokenizer = tokenizer
        self.register_buffer("_mean", torch.tensor(self.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("_std", torch.tensor(self.std).view(3, 1, 1), persistent=False)
        self.requires_grad_(False)
        self.eval()

    @property
    def has_text(self) -> bool:
        """Whether there is a text tower, so that class names alone make a classifier."""
        return self.text_tower is not None

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._mean.device

    def train(self, mode: bool = True) -> Backbone:
        """Keep evaluation mode: a frozen model has no dropout and no running statistics to update."""
        del mode
        return super().train(False)

    def normalise(self, images: Tensor) -> Tensor:
        """Turn uint8 images [B, 3, S, S] into float32 ones with the statistics the backbone was trained with."""
        return (images.float() / 255.0 - self._mean) / self._std

    def encode_image(self, images: Tensor) -> Tensor:
        """Features [B, D], not normalised to unit length, of normalised float images [B, 3, S, S]."""
        features: Tensor = self.image_tower(images)
        return features

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Features [N, D], not normalised to unit length, of token rows [N, T].

        Raises ``BackboneError`` if there is no text tower.
        """
        if self.text_tower is None:
            raise self._no_text()
        features: Tensor = self.text_tower(tokens)
        return features

    def tokenize(self, texts: Sequence[str], names: Sequence[str] | None = None) -> Tensor:
        """Token rows [N, T] (long, CPU) of ``texts``; see ``rayfed.backbones.text.tokenize_texts`` for long ones.

        Raises ``BackboneError`` if there is no text tower, a text is empty, or cutting makes two texts equal.
        """
        if self._tokenizer is None:
            raise self._no_text()
        return tokenize_texts(self._tokenizer, self.context_length, texts, names)

    def _no_text(self) -> BackboneError:
        return BackboneError(f"Backbone {self.name!r} has no text tower; choose a CLIP backbone for class texts.")
