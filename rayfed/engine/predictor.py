"""A finished run's model in one process: the global one, or a client's personal one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from rayfed import config
from rayfed.adapters.scope import Scope
from rayfed.engine.bench import Bench
from rayfed.engine.images import ArrayImages
from rayfed.errors import AdapterError
from rayfed.methods.base import TaskView, View
from rayfed.metrics.groups import class_groups


class Predictor:
    """Predicts with the adapters of a results folder; every tensor of the model must be in the files and no other.

    ``classes`` are candidates other than the run's, by name, for a model with a text tower.

    Raises:
        AdapterError: a file is missing or damaged, holds other tensors than the model, or the client has no model.
    """

    def __init__(self, out: str | Path, *, client: int | None = None, classes: Sequence[str] | None = None) -> None:
        folder = Path(out)
        try:
            task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise AdapterError(f"{folder} is not the results folder of a run (no readable task.json in it).") from error
        counts = tuple(task.get("train_counts", ()))  # not in files of earlier versions
        known = tuple(task["classes"]), task["template"], int(task["num_proxy"])
        view = TaskView(*known, counts, class_groups(counts))
        options = config.parse_options([f"config={folder / 'config.yaml'}"])
        self.classes = view.classes if classes is None else tuple(classes)
        self.view: View = "global" if client is None else "personal"
        self._bench = Bench(options, view, gpu_share=float(torch.cuda.is_available()))
        self._load(Scope.SHARED, folder / "adapters" / "shared.safetensors")
        self._load(Scope.SERVER, folder / "adapters" / "server.safetensors")
        if client is not None:
            self._load(Scope.PRIVATE, _client_file(folder, client, len(task["clients"])))
        self._features = self._bench.class_features(self.classes)
        if classes is not None and self._features is None:
            raise AdapterError("the run's backbone has no text tower: it knows its own classes only (classes=None).")

    def _load(self, scope: Scope, file: Path) -> None:
        flat = self._bench.parameters[scope]
        if not flat.entries:
            return
        try:
            flat.write(flat.flatten(safetensors.torch.load_file(file)))
        except (OSError, safetensors.SafetensorError) as error:
            raise AdapterError(f"{file} cannot be read ({error}).") from error
        except AdapterError as error:
            raise AdapterError(f"{file}: {error}") from error

    def logits(self, images: npt.NDArray[np.uint8]) -> Tensor:
        """Logits [N, C] of uint8 ``images`` [N, 3, S, S], S the backbone's image size."""
        bench = self._bench
        source = ArrayImages(
            images,
            np.full(len(images), -1, dtype=np.int64),
            np.arange(len(images)),
            backbone=bench.backbone,
            device=bench.device,
            batch_size=bench.options.eval.batch,
        )
        return torch.cat(list(self._batches(source)))

    def probabilities(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Class probabilities [N, C]."""
        found: npt.NDArray[np.float32] = self.logits(images).softmax(-1).numpy()
        return found

    def _batches(self, source: ArrayImages) -> Iterator[Tensor]:
        with self._bench.inference():
            for batch in source.in_order():
                logits = self._bench.method.predict(self._bench.model, batch, self.view, self._features)
                yield logits.float().cpu()


def _client_file(folder: Path, client: int, num_clients: int) -> Path:
    if not 0 <= client < num_clients:
        raise AdapterError(f"client {client} does not exist: the run has clients 0 to {num_clients - 1}.")
    file = folder / "adapters" / "clients" / f"{client:05d}.safetensors"
    has_private = (folder / "adapters" / "clients").is_dir()
    if has_private and not file.exists():
        raise AdapterError(f"client {client} was never trained: it predicts with the global model (client=None).")
    return file
