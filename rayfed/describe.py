"""What the command tells about itself: --help, --list, --dry-run."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayfed import config
from rayfed.backbones import names
from rayfed.conf.options import RunOptions
from rayfed.conf.tune import TuneOptions
from rayfed.errors import DataError
from rayfed.methods import METHODS, make_method
from rayfed.sweep.request import Request
from rayfed.sweep.space import as_text, read_space
from rayfed.sweep.space import names as names_of_spaces

BACKBONE_KINDS = {"tiny": "embedded", "clip": "CLIP (open_clip)", "vit": "ViT (timm), classified by a linear head"}


def option_help(words: Sequence[str]) -> str:
    """All options with defaults and meaning; ``method.*`` of the method named in ``words`` (else fedglad)."""
    method = next((w.partition("=")[2] for w in words if w.startswith("method=")), "fedglad")
    lines = [f"options (those of method={method}; profile and data set change some defaults):", ""]
    for name, field in config.fields(config.method_schema(method)).items():
        default = "" if field.is_required() else f" [{_shown(field.get_default(call_default_factory=True))}]"
        lines.append(f"  {name.removesuffix('.name')}{default}")
        lines.append(f"      {(field.description or '').strip()}")
    return "\n".join(lines)


def tune_help(words: Sequence[str]) -> str:
    """The options of a sweep; those of its runs are told by ``python -m rayfed.run --help``."""
    lines = ["options of the sweep:", ""]
    for name, field in TuneOptions.model_fields.items():
        lines.append(f"  tune.{name} [{_shown(field.get_default(call_default_factory=True))}]")
        lines.append(f"      {(field.description or '').strip()}")
    lines += ["", "  out, resume, tracking.*, engine.address: as of a run, for the sweep as a whole", ""]
    return "\n".join(lines) + "\n" + option_help(words)


def space_listing() -> str:
    """The search spaces that come with rayfed."""
    lines = ["search spaces:"]
    for name in names_of_spaces():
        space = read_space(name)
        lines.append(f"  {name:<10} {', '.join(p.name for p in space.parameters)}")
    return "\n".join(lines)


def dry_sweep(request: Request, out: Path) -> str:
    """What would be searched, the options all trials share, and the first points."""
    lines = [config.to_yaml(request.base).rstrip(), ""]
    for p in request.space.parameters:
        when = "".join(f" when {n} is {' or '.join(map(as_text, v))}" for n, v in p.when.items())
        lines.append(f"searches: {p.name} {p.kind} {as_text(list(p.values))}{when}{' (mutates)' * p.mutate}")
    lines.append(f"results:  {out}")
    lines += [f"note:     {note}" for note in request.notes()]
    lines.append(f"trials:   {request.samples()}")
    for index, point in enumerate(request.points()[:8]):
        lines.append(f"trial {index}:  {' '.join(f'{n}={as_text(v)}' for n, v in point.items())}")
    return "\n".join(lines)


def listing() -> str:
    """Methods, data sets and backbones by name."""
    known = names.known_names()
    lines = ["methods:", *(f"  {name:<12} {_first_doc(name)}" for name in METHODS), "", "data sets:"]
    lines += [f"  {name}" for name in config.DATA_DEFAULTS]
    lines += ["", "backbones:"]
    for kind, members in known.items():
        text = textwrap.fill(
            ", ".join(members), 108, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
        lines += [f"  {BACKBONE_KINDS[kind]}:", text]
    return "\n".join(lines)


def dry_run(options: RunOptions, out: Path) -> str:
    """The resolved options, who would run, steps, and the bytes of the first round."""
    from rayfed.data import build_task_from_options

    task = build_task_from_options(options)
    sizes = [len(c.train) for c in task.clients if len(c.train)]
    if not sizes:
        raise DataError("no client has a training image: nothing would be trained.")
    trains = bool(make_method(options.method).phases(0, options.rounds))
    steps = trains * sum(-(-n // options.train.batch) * options.train.epochs for n in sizes) / max(len(sizes), 1)
    down, up = _bytes(options, task)
    cohort = min(options.cohort_size, len(sizes))
    lines = [config.to_yaml(options).rstrip(), "", f"results:  {out}", *(f"note:     {n}" for n in task.notes)]
    lines.append(f"clients:  {len(sizes)} with {min(sizes)} to {max(sizes)} training images; {cohort} a round")
    lines.append(
        f"actors:   {options.clients.actors} of {options.clients.cpu:g} CPU and {options.clients.gpu:g} GPU each"
    )
    lines.append(f"steps:    {steps:.1f} per client and round, {steps * cohort * options.rounds:.0f} in all")
    lines.append(
        f"bytes:    {down} down and {up} up per client and round, {(down + up) * cohort * options.rounds} in all"
    )
    return "\n".join(lines)


def _bytes(options: RunOptions, task: Any) -> tuple[int, int]:
    """Encoded sizes of the first broadcast and of one upload."""
    import torch

    from rayfed.comms.codec import encoded_size
    from rayfed.engine.bench import task_view
    from rayfed.engine.server import Server
    from rayfed.messages import Payload

    server = Server(options, task_view(task), task.proxy)
    phases = server.bench.method.phases(0, options.rounds)
    down = sum(server.begin(0, phase).size for phase in phases)
    up, view = 0, server.bench.view
    sides = {"C": len(view.classes), "D": server.bench.backbone.embed_dim, "P": view.num_proxy}
    sides |= dict.fromkeys(("N", "R"), round(sum(view.counts) / max(len(task.clients), 1)))
    for phase in phases:
        wire = [f for f in server.bench.method.wire(view) if f.direction == "up" and f.phase == phase.name]
        shapes = {f.name: tuple(sides.get(s, 0) if isinstance(s, str) else s for s in f.shape) for f in wire}
        extras = {f.name: torch.zeros(shapes[f.name], dtype=getattr(torch, f.dtype)) for f in wire}
        shared = server.state.shared
        up += encoded_size(Payload(shared if phase.uploads and shared.numel() else None, extras))
    return down, up


def _first_doc(method: str) -> str:
    import ast

    module = METHODS[method].partition(":")[0]
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return doc.splitlines()[0].partition(": ")[2]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
