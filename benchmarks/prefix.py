"""What keeping frozen activations saves: ``python -m benchmarks.prefix``.

One client's local training by FedDTL, in rounds of supervision (2 epochs) and of policy optimisation (3 epochs), with
random images and random weights where a model has none of its own. CPU seconds per local epoch on one thread, which
other work on the machine disturbs less than wall time; the round's reference policy is part of it, the one pass that
fills the cache is shown by itself. Writes benchmarks/results/prefix.md.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.config import parse_options
from rayfed.data.task import ImageSet
from rayfed.engine.bench import Bench
from rayfed.engine.client import LocalJob
from rayfed.engine.images import ArrayImages
from rayfed.messages import Payload
from rayfed.methods.base import Batch, FitReport, TaskView

RESULTS = Path(__file__).parent / "results" / "prefix.md"
CLASSES = tuple(f"thing {number}" for number in range(50))
STAGES = {"supervised": 0, "policy optimisation": 1}


@dataclass(frozen=True)
class Case:
    """A model, its images, and the words that choose it."""

    label: str
    images: int
    batch: int
    words: tuple[str, ...]


CASES = (
    Case("tiny (32 px), blocks 2-3 of 4 adapted", 160, 64, ("method.text_blocks=1",)),
    Case(
        "ViT-B/16 (224 px), blocks 10-11 of 12 adapted",
        16,
        16,
        ("backbone=ViT-B-16", "backbone.pretrained=none", "method.text_blocks=2"),
    ),
)


@dataclass(frozen=True)
class Whole:
    """Images whose every policy runs the whole tower in every batch, as without any sharing."""

    images: ArrayImages
    is_augmented: bool = True

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, index: Tensor) -> Batch:
        """As of the images."""
        return self.images.batch(index)

    def in_order(self) -> Iterator[Batch]:
        """As of the images."""
        return self.images.in_order()


class Timed(LocalJob):
    """A client's job that notes the CPU seconds of its fit."""

    seconds = 0.0

    def fit(self, *args: Any, **kwargs: Any) -> FitReport:
        """As of ``LocalJob``."""
        started = time.process_time()
        report = super().fit(*args, **kwargs)
        Timed.seconds = time.process_time() - started
        return report


def measure(case: Case, cache: str, stage: str) -> tuple[float, float]:
    """CPU seconds of one local epoch, and of filling the cache."""
    words = ["method=feddtl", "profile=paper", f"engine.cache={'off' if cache == 'none' else cache}", "rounds=2"]
    options = parse_options([*words, f"train.batch={case.batch}", "engine.pool=local", *case.words])
    bench = Bench(options, TaskView(CLASSES, "a photo of a {}.", 0), gpu_share=0)
    images = bench.images(random_images(case.images, bench.backbone.image_size), key="client")
    if cache == "none":
        bench.backbone.split = None
    started = time.process_time()
    next(images.in_order()).prefix() if cache in ("fp32", "fp16") else None
    filling = time.process_time() - started
    values = bench.parameters
    job = Timed(
        client_id=0,
        round_index=STAGES[stage],
        rounds=2,
        phase="train",
        task=bench.view,
        train=Whole(images) if cache == "none" else images,
        proxy=images,
        options=options.train,
        extras={},
        received=Payload(None, {"sft": next(iter(values.values())).read()}),
        class_features=F.normalize(torch.randn(len(CLASSES), bench.backbone.embed_dim), dim=-1),
        bench=bench,
        labels=("client", 0, STAGES[stage], "train"),
    )
    bench.method.client_step(bench.model, job)
    epochs = options.train.epochs if STAGES[stage] == 0 else 3
    return Timed.seconds / epochs, filling


def random_images(count: int, size: int) -> ImageSet:
    """``count`` pictures of noise, labels in turn."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    zeros = np.zeros(count, dtype=np.int64)
    return ImageSet(pixels, np.arange(count) % len(CLASSES), zeros.astype(np.uint64), zeros, ("all",))


HOW = {
    "none": "one full forward per policy and batch",
    "off": "first blocks once per batch (`engine.cache=off`)",
    "fp32": "kept, float32 (`engine.cache=fp32`)",
    "fp16": "kept, float16 (`engine.cache=fp16`)",
}


def table() -> str:
    """The Markdown table of all cases."""
    lines = [
        "| model | first blocks | "
        + " | ".join(f"{s}, CPU s per epoch | times faster" for s in STAGES)
        + " | filling, CPU s |"
    ]
    lines.append("|---" * (len(lines[0].split("|")) - 2) + "|")
    for case in CASES:
        found = {how: {stage: measure(case, how, stage) for stage in STAGES} for how in HOW}
        for how, by_stage in found.items():
            cells = [f"{s:.2f} | {found['none'][stage][0] / s:.1f}" for stage, (s, _) in by_stage.items()]
            filling = by_stage["supervised"][1]
            lines.append(
                f"| {case.label} | {HOW[how]} | {' | '.join(cells)} | {f'{filling:.2f}' if filling > 0.005 else '-'} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = table()
    sizes = "; ".join(f"{case.label}: {case.images} images, batches of {case.batch}" for case in CASES)
    head = f"{(__doc__ or '').strip()}\n\n{sizes}. torch {torch.__version__}, {platform.machine()}, one thread.\n\n"
    RESULTS.write_text(f"# Activations before the first adapted block\n\n{head}{text}\n", "utf-8")


if __name__ == "__main__":
    main()
