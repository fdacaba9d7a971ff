"""Pretrain the embedded tiny CLIP: python -m rayfed.backbones.pretrain out=DIR

Contrastive training on captions of two sources: a finite pool of shape images in the domains photo, sketch and
bright, and Fashion-MNIST training images 0..24,999 in colours, contrasts and places the original never has. The
domain noisy, the original Fashion-MNIST rendering and training images 25,000..29,999 are only measured.

Writes to ``out``: weights.safetensors, hashes.npy (content hashes of the source pixels of every image trained on),
report.json (options and accuracies), log.jsonl and one checkpoint for each measurement. The same options give the
same weights on the same machine and versions of torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save_file
from torch import Tensor

from rayfed.backbones.tiny import MEAN, STD, HashTokenizer, build_tiny
from rayfed.data.idx import FASHION_CLASSES, load_fashion_mnist
from rayfed.data.images import content_hashes, resize_rgb
from rayfed.data.shapes import DOMAINS, class_names, render
from rayfed.errors import OptionError, RayfedError, first_line
from rayfed.rng import derive_seed, numpy_generator

if TYPE_CHECKING:
    from open_clip.model import CLIP

EVALUATION_TEMPLATE = "a photo of a {}."
SEEN_DOMAINS = ("photo", "sketch", "bright")
OWN_TEMPLATES = {
    "photo": (EVALUATION_TEMPLATE, "a photo of a {}"),
    "sketch": ("a sketch of a {}.", "a drawing of a {}."),
    "bright": ("a bright picture of a {}.", "a bright photo of a {}."),
    "fashion": (EVALUATION_TEMPLATE, "a photo of a {}"),
}
COMMON_TEMPLATES = ("a picture of a {}.", "an image of a {}.", "a {}.", "{}", EVALUATION_TEMPLATE)

FASHION_TRAINED = 25_000  # images 0..24,999 of the official training set
FASHION_HELD_OUT = 30_000  # up to here (exclusive) only measured

PEAK_RATE = 1.5e-3
WEIGHT_DECAY = 0.05
MAX_LOGIT_SCALE = 100.0

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


class Options(BaseModel):
    """What the command accepts, as name=value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    out: Path
    """Folder for everything written; made if needed."""
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=2000, ge=1)
    shape_images: int = Field(default=120, ge=1, le=288)
    """Shape images a step, each of another (class, domain)."""
    fashion_images: int = Field(default=72, ge=1)
    """Fashion-MNIST images a step."""
    per_class: int = Field(default=400, ge=1)
    """Shape images in the pool for each class and domain."""
    fashion_kept: float = Field(default=0.25, ge=0, le=1)
    """Share of Fashion-MNIST images whose light-on-dark contrast is kept; the rest is dark on light."""
    fashion_root: str | None = None
    """Folder with Fashion-MNIST; without it the Debian package's."""
    report_every: int = Field(default=250, ge=1)
    threads: int = Field(default=2, ge=1)
    device: str = "cpu"


def parse_options(words: Sequence[str]) -> Options:
    """Options from ``name=value`` words; raises OptionError naming everything that is wrong."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in Options.model_fields:
            close = get_close_matches(name, Options.model_fields, n=1)
            hint = (
                f"did you mean {close[0]}=...?" if close else f"use {', '.join(Options.model_fields)}, as name=value."
            )
            raise OptionError(f"Unknown option {word!r} for pretraining; {hint}")
        values[name] = value
    try:
        return Options.model_validate(values)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, item['loc']))}: {item['msg']} (got {item['input']!r})" for item in error.errors()
        ]
        raise OptionError(f"Pretraining cannot use these options: {'; '.join(problems)}.") from error


# Data ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """Everything trained on. ``shapes`` is uint8 [domains * classes, per_class, 3, 32, 32], domain-major;
    ``fashion`` is uint8 [25000, 32, 32] with ``fashion_labels`` int64 [25000]."""

    shapes: Images
    fashion: Images
    fashion_labels: Labels
    hashes: NDArray[np.uint64]


def load_sources(options: Options) -> Sources:
    """Render the pool, read Fashion-MNIST and hash the source pixels of both."""
    images, labels = load_fashion_mnist(options.fashion_root, "train")
    images, labels = images[:FASHION_TRAINED], labels[:FASHION_TRAINED]
    shapes = _render_pool(options.seed, options.per_class)
    hashes = np.concatenate([content_hashes(shapes.reshape(-1, 3, 32, 32)), content_hashes(images)])
    return Sources(shapes, resize_rgb(images, 32)[:, 0], labels, np.unique(hashes))


def _render_pool(seed: int, per_class: int) -> Images:
    """Every cell (domain, class) has indices of its own, so no scene appears in two domains."""
    classes, pool_seed = len(class_names()), derive_seed(seed, "pretrain", "pool")
    labels = np.repeat(np.arange(classes), per_class)
    parts = []
    for number, domain in enumerate(SEEN_DOMAINS):
        indices = np.arange(len(labels)) + number * len(labels)
        parts.append(render(labels, indices, seed=pool_seed, domain=domain))
    return np.concatenate(parts).reshape(-1, per_class, 3, 32, 32)


def disguise(grey: Images, kept: float, generator: np.random.Generator) -> Images:
    """Draw Fashion-MNIST images, uint8 [N, 32, 32], as the model may see them: uint8 [N, 3, 32, 32].

    Dark in one colour on a light ground of another (the original is white on black; a share ``kept`` stays light on
    dark), mirrored at random, moved by up to 3 pixels, contrast bent, noise added.
    """
    count = len(grey)
    garment = (_moved(grey, generator).astype(np.float32) / 255) ** generator.uniform(0.6, 1.6, (count, 1, 1))
    dark = generator.uniform(0, 0.45, (count, 3, 1, 1))
    light = generator.uniform(0.55, 1, (count, 3, 1, 1))
    keep = generator.random((count, 1, 1, 1)) < kept
    ground, ink = np.where(keep, dark, light), np.where(keep, light, dark)
    picture = ground + (ink - ground) * garment[:, None] + generator.normal(0, 0.06, (count, 3, 32, 32))
    return np.round(picture.clip(0, 1) * 255).astype(np.uint8)


def _moved(grey: Images, generator: np.random.Generator) -> Images:
    """Each image mirrored with probability 1/2 and moved by -3..3 pixels in both directions, black filling in."""
    count, size = len(grey), grey.shape[1]
    padded = np.pad(grey, ((0, 0), (3, 3), (3, 3)))
    top, left = generator.integers(0, 7, (2, count, 1))
    columns = np.where(generator.random((count, 1)) < 0.5, np.arange(size)[::-1], np.arange(size)) + left
    rows = np.arange(size) + top
    moved: Images = padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return moved


@dataclass(frozen=True)
class Batch:
    """Images uint8 [B, 3, 32, 32]; ``captions`` are distinct and ``caption_of`` [B] says which one an image has."""

    images: Images
    captions: tuple[str, ...]
    caption_of: Labels


def make_batch(sources: Sources, options: Options, step: int) -> Batch:
    """Batch of one step; it depends on (seed, step) only.

    Shape images come from distinct (domain, class) cells. In half of the steps everything shares one template, so
    that a class has one caption in all domains; in the other half each domain has a template of its own.
    """
    generator = numpy_generator(options.seed, "pretrain", "batch", step)
    cells = generator.choice(len(sources.shapes), options.shape_images, replace=False)
    shapes = sources.shapes[cells, generator.integers(0, options.per_class, len(cells))]
    picked = generator.integers(0, len(sources.fashion), options.fashion_images)
    fashion = disguise(sources.fashion[picked], options.fashion_kept, generator)
    templates = _templates(generator)
    names = class_names()
    texts = [templates[SEEN_DOMAINS[cell // len(names)]].format(names[cell % len(names)]) for cell in cells]
    texts += [templates["fashion"].format(FASHION_CLASSES[label]) for label in sources.fashion_labels[picked]]
    captions = tuple(dict.fromkeys(texts))
    place = {caption: number for number, caption in enumerate(captions)}
    return Batch(np.concatenate([shapes, fashion]), captions, np.array([place[text] for text in texts], dtype=np.int64))


def _templates(generator: np.random.Generator) -> dict[str, str]:
    """One template for each group of images."""
    if generator.random() < 0.5:
        return dict.fromkeys(OWN_TEMPLATES, COMMON_TEMPLATES[generator.integers(len(COMMON_TEMPLATES))])
    return {group: options[generator.integers(len(options))] for group, options in OWN_TEMPLATES.items()}


def normalised(images: Images, device: str) -> Tensor:
    """float32 [N, 3, 32, 32] as the model takes it."""
    pixels = torch.from_numpy(images).to(device).float() / 255
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std


# Training ------------------------------------------------------------------------------------------------------------


def caption_loss(image_features: Tensor, text_features: Tensor, scale: Tensor, caption_of: Tensor) -> Tensor:
    """Symmetric contrastive loss of unit features, images [B, D] and distinct captions [C, D].

    From image to caption it is a cross entropy; from caption to image the target is spread evenly over the images
    that have the caption, so equal captions are never negatives of each other.
    """
    logits = scale * image_features @ text_features.T
    owners = F.one_hot(caption_of, len(text_features)).T.to(logits.dtype)
    spread = owners / owners.sum(1, keepdim=True)
    return (F.cross_entropy(logits, caption_of) + F.cross_entropy(logits.T, spread)) / 2


class Trainer:
    """Model, optimiser and schedule of one pretraining."""

    def __init__(self, options: Options, sources: Sources) -> None:
        self.options, self.sources = options, sources
        self.model: CLIP = build_tiny(options.seed).to(options.device)
        self.tokenizer = HashTokenizer()
        matrices = [value for value in self.model.parameters() if value.ndim >= 2]
        vectors = [value for value in self.model.parameters() if value.ndim < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimiser, PEAK_RATE, total_steps=options.steps + 1, pct_start=0.15, cycle_momentum=False
        )

    def step(self, number: int) -> float:
        """One optimiser step; returns the loss."""
        batch, device = make_batch(self.sources, self.options, number), self.options.device
        self.model.train()
        images = self.model.encode_image(normalised(batch.images, device), normalize=True)
        texts = self.model.encode_text(self.tokenizer(batch.captions).to(device), normalize=True)
        caption_of = torch.from_numpy(batch.caption_of).to(device)
        loss = caption_loss(images, texts, self.model.logit_scale.exp(), caption_of)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.schedule.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=float(np.log(MAX_LOGIT_SCALE)))
        return float(loss.item())


# Measuring -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def zero_shot(model: CLIP, images: Images, names: Sequence[str], device: str = "cpu") -> Labels:
    """Predicted class of uint8 images [N, 3, 32, 32] among ``names``, int64 [N], with the evaluation template."""
    model.eval()
    prompts = HashTokenizer()([EVALUATION_TEMPLATE.format(name) for name in names]).to(device)
    texts = model.encode_text(prompts, normalize=True)
    parts = [
        (model.encode_image(normalised(images[start : start + 512], device), normalize=True) @ texts.T).argmax(1).cpu()
        for start in range(0, len(images), 512)
    ]
    predicted: Labels = torch.cat(parts).numpy()
    return predicted


def measuring(options: Options, per_class: int = 10) -> Callable[[CLIP], dict[str, Any]]:
    """A function that gives the zero-shot accuracies of a model on images it never trained on."""
    names, seed = class_names(), derive_seed(options.seed, "pretrain", "probe")
    labels = np.tile(np.arange(len(names)), per_class)
    probes = {domain: render(labels, np.arange(len(labels)), seed=seed, domain=domain) for domain in DOMAINS}
    grey, fashion_labels = load_fashion_mnist(options.fashion_root, "train")
    held_out = slice(FASHION_TRAINED, FASHION_HELD_OUT)
    fashion, fashion_labels = resize_rgb(grey[held_out], 32), fashion_labels[held_out]

    def measure(model: CLIP) -> dict[str, Any]:
        right = {name: zero_shot(model, images, names, options.device) == labels for name, images in probes.items()}
        found = zero_shot(model, fashion, FASHION_CLASSES, options.device) == fashion_labels
        classes = {name: float(found[fashion_labels == k].mean()) for k, name in enumerate(FASHION_CLASSES)}
        return {name: float(hits.mean()) for name, hits in right.items()} | {
            "fashion": float(found.mean()),
            "fashion_classes": classes,
        }

    return measure


def save_weights(model: CLIP, path: Path) -> None:
    """Write the state dict as float32 safetensors."""
    save_file({name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}, path)


def pretrain(options: Options) -> dict[str, Any]:
    """Run the whole pretraining and write its files; returns the last accuracies."""
    torch.set_num_threads(options.threads)
    _check_device(options.device)
    _prepare_folder(options.out)
    started = time.perf_counter()
    trainer, measure = Trainer(options, load_sources(options)), measuring(options)
    np.save(options.out / "hashes.npy", trainer.sources.hashes, allow_pickle=False)
    losses: list[float] = []
    result: dict[str, Any] = {}
    for step in range(1, options.steps + 1):
        losses.append(trainer.step(step))
        if step % 50 == 0:
            _log(options.out, {"step": step, "loss": float(np.mean(losses[-50:])), "s": time.perf_counter() - started})
        if step % options.report_every == 0 or step == options.steps:
            result = measure(trainer.model)
            _log(options.out, {"step": step, "logit_scale": float(trainer.model.logit_scale.exp().item()), **result})
            save_weights(trainer.model, options.out / f"checkpoint-{step}.safetensors")
    save_weights(trainer.model, options.out / "weights.safetensors")
    _write_report(options, result, time.perf_counter() - started)
    return result


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an assertion where torch was built without CUDA
        reason = first_line(error)
        raise OptionError(f"Device {device!r} cannot be used ({reason}); use device=cpu.") from error


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.jsonl").unlink(missing_ok=True)  # a second run must not read as one log
    except OSError as error:
        raise OptionError(f"Folder {folder} cannot be written ({error.strerror}); give another one as out=.") from error


def _log(folder: Path, record: dict[str, Any]) -> None:
    line = json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()})
    print(line, flush=True)
    with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _write_report(options: Options, result: dict[str, Any], seconds: float) -> None:
    settings = options.model_dump(mode="json", exclude={"out", "fashion_root"})
    report = {"options": settings, "accuracy": result, "minutes": round(seconds / 60, 1), "torch": torch.__version__}
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    try:
        pretrain(parse_options(sys.argv[1:] if words is None else words))
    except RayfedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
