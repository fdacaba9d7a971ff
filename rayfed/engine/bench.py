"""What a worker and the server both hold: one model, its parameters by owner, and the task's images."""

from __future__ import annotations

import functools
import socket
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.adapters.scope import FlatParameters, Scope, flatten_scopes
from rayfed.backbones import load_backbone
from rayfed.backbones.base import Backbone
from rayfed.backbones.prefix import PrefixCache
from rayfed.backbones.text import class_texts
from rayfed.conf.options import RunOptions, TrainOptions
from rayfed.data.task import ImageSet, Task
from rayfed.engine.fit import Fit
from rayfed.engine.images import ArrayImages
from rayfed.errors import ResourceError
from rayfed.methods import make_method
from rayfed.methods.base import AnyMethod, TaskView
from rayfed.metrics.groups import class_groups
from rayfed.rng import derive_seed


class Bench:
    """A method's model on its device, built the same in every process."""

    def __init__(self, options: RunOptions, view: TaskView, *, gpu_share: float) -> None:
        torch.set_num_threads(options.engine.threads)
        self.options = options
        self.view = view
        self.device = pick_device(gpu_share if options.engine.device == "auto" else 0.0)
        self.autocast = use_autocast(options.engine.precision, self.device)
        self.method: AnyMethod = make_method(options.method)
        chosen = options.backbone
        tag = None if chosen.pretrained == "auto" else chosen.pretrained
        self.backbone: Backbone = load_backbone(chosen.name, pretrained=tag, checkpoint=chosen.checkpoint)
        self.model: nn.Module = self._build()
        self.parameters: Mapping[Scope, FlatParameters] = flatten_scopes(self.model)
        self.prefixes = _prefix_cache(options)
        self.initial = {scope: flat.read() for scope, flat in self.parameters.items()}

    def _build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.options.seed, "model"))
            return self.method.build_model(self.backbone, self.view).to(self.device).eval()

    def images(
        self, images: ImageSet, index: npt.NDArray[np.int64] | None = None, *, key: Hashable = None
    ) -> ArrayImages:
        """The images ``index`` of a set (all of them for None) as batches for this model.

        With a ``key``, activations before the first adapted block are kept under it.
        """
        where = np.arange(len(images.labels)) if index is None else index
        return ArrayImages(
            images.images,
            images.labels,
            where,
            backbone=self.backbone,
            device=self.device,
            batch_size=self.options.eval.batch,
            prefixes=None if key is None else self.prefixes,
            key=key,
        )

    def fit(self, options: TrainOptions) -> Fit:
        """A training loop on this model."""
        return Fit(self.model, self.parameters, options, self.autocast)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """No gradients, and the frozen model's arithmetic."""
        with torch.no_grad(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            yield

    def class_features(self, names: Sequence[str] | None = None) -> Tensor | None:
        """[C, D] of ``names`` (the task's for None) as the model stands, without gradient."""
        with self.inference():
            return self.method.class_features(self.model, self.view.classes if names is None else names)

    def zero_shot_classes(self, names: Sequence[str]) -> Tensor:
        """[C, D] of ``names`` by the untouched text tower: adapters act only when a method switches them on."""
        texts, _ = class_texts(names, self.view.template)
        tokens = self.backbone.tokenize(texts, names).to(self.device)
        return F.normalize(self.backbone.encode_text(tokens), dim=-1)

    @functools.cached_property
    def text_owners(self) -> frozenset[Scope]:
        """Whose parameters the class features depend on, found by differentiating them once."""
        places = [(scope, p) for scope, flat in self.parameters.items() for p in flat.parameters]
        for _, parameter in places:
            parameter.requires_grad_(True)
        features = self.method.class_features(self.model, self.view.classes)
        if features is None or not features.requires_grad or not places:
            return frozenset()
        gradients = torch.autograd.grad(features.sum(), [p for _, p in places], allow_unused=True)
        return frozenset(scope for (scope, _), g in zip(places, gradients, strict=True) if g is not None)


def _prefix_cache(options: RunOptions) -> PrefixCache:
    engine = options.engine
    dtype = {"off": None, "fp32": torch.float32, "fp16": torch.float16}[engine.cache]
    folder = None if engine.cache_dir is None else Path(engine.cache_dir)
    return PrefixCache(dtype=dtype, limit=engine.cache_mb * 2**20, folder=folder)


def task_view(task: Task) -> TaskView:
    """What a method may know of ``task``."""
    counts = task.train_counts()
    return TaskView(task.classes, task.template, len(task.proxy.labels), tuple(counts), class_groups(counts))


def novel_names(task: Task) -> tuple[str, ...]:
    """The classes of ``task`` that only evaluation may know of."""
    return () if task.novel is None else task.novel.classes


def pick_device(gpu_share: float) -> torch.device:
    """The card Ray gave this process (the only visible one, or the first), or the CPU for a share of 0.

    Raises:
        ResourceError: a share was asked for but torch sees no GPU in this process.
    """
    if gpu_share <= 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ResourceError(
            f"a GPU share was given to a process on node {socket.gethostname()} but torch sees no GPU there: check the "
            "driver and the CUDA build of torch on that node, or set clients.gpu=0 and server.gpu=0."
        )
    return torch.device("cuda:0")


def use_autocast(precision: str, device: torch.device) -> bool:
    """Whether the frozen model computes in bfloat16. Raises ResourceError where the device cannot."""
    wanted = precision == "bf16" or (precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())
    if wanted and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ResourceError("engine.precision=bf16 but this GPU has no bfloat16: use engine.precision=fp32.")
    return wanted
