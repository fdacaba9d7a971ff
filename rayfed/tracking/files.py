"""The files of a run under ``out``, all UTF-8 whatever the locale."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch

from rayfed.conf.options import RunOptions
from rayfed.config import to_yaml
from rayfed.data.task import Task
from rayfed.engine.store import write_whole


def write_start(out: Path, options: RunOptions, task: Task) -> None:
    """Write ``config.yaml`` and ``task.json`` (classes, prompt, who has how much)."""
    write_whole(out / "config.yaml", to_yaml(options).encode())
    content = {
        "classes": list(task.classes),
        "novel_classes": [] if task.novel is None else list(task.novel.classes),
        "template": task.template,
        "num_proxy": len(task.proxy.labels),
        "train_counts": task.train_counts(),
        "num_test": len(task.test.labels),
        "clients": [{"train": len(c.train), "val": len(c.val), "test": len(c.test)} for c in task.clients],
        "notes": list(task.notes),
    }
    write_whole(out / "task.json", dump(content))


def write_history(out: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write ``metrics.jsonl``, one line a round."""
    lines = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in history)
    write_whole(out / "metrics.jsonl", lines)


def append_record(out: Path, record: Mapping[str, Any]) -> None:
    """Add one round to ``metrics.jsonl``."""
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``rows`` as CSV; a value that does not exist (None) is ``n/a``."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "n/a" if value is None else value for name, value in row.items()} for row in rows)
    write_whole(path, text.getvalue().encode())


def write_adapters(
    out: Path,
    shared: Mapping[str, Any],
    server: Mapping[str, Any],
    private: Mapping[int, Mapping[str, Any]],
    peft: tuple[Mapping[str, Any], Any] | None,
) -> None:
    """Write ``adapters/``: shared, server, clients/<id> (safetensors), and the shared LoRA in PEFT's format."""
    folder = out / "adapters"
    for name, tensors in (("shared", shared), ("server", server)):
        if tensors:
            write_whole(folder / f"{name}.safetensors", safetensors.torch.save(dict(tensors)))
    for client_id, tensors in private.items():
        write_whole(folder / "clients" / f"{client_id:05d}.safetensors", safetensors.torch.save(dict(tensors)))
    if peft is not None:
        tensors, config = peft
        write_whole(
            folder / "peft" / "adapter_model.safetensors", safetensors.torch.save(dict(tensors), {"format": "pt"})
        )
        write_whole(folder / "peft" / "adapter_config.json", dump(config))


def dump(content: Any) -> bytes:
    """JSON for people: UTF-8, indented; refuses NaN, which JSON does not have."""
    return (json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n").encode()
