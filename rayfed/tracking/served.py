"""What MLflow loads where a logged model is used: MLflow runs this file, so nothing of the model is a pickle.

model = mlflow.pyfunc.load_model("runs:/<run>/model")
model.predict(images)                          # uint8 [N, 3, S, S] -> probabilities [N, C] of the global model
model.predict(images, params={"client": 3})    # of client 3's personal model (logged with tracking.model=personal)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np

import rayfed

GLOBAL = -1


class ServedRun(mlflow.pyfunc.PythonModel):  # type: ignore[misc]  # MLflow is not typed here
    """Class probabilities by the global model or a client's, made when they are first asked for."""

    def load_context(self, context: Any) -> None:
        """Take the folder with the adapters."""
        self._out = Path(context.artifacts["run"])
        self._models: dict[int, Any] = {}

    # Without type hints, which MLflow would take for the schema of single inputs.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Class probabilities [N, C] of uint8 images [N, 3, S, S]; ``params={"client": k}`` for a personal model.

        Raises:
            ValueError: a client was asked for, but private adapters were not logged.
        """
        client = int((params or {}).get("client", GLOBAL))
        if client != GLOBAL and not (self._out / "adapters" / "clients").is_dir():
            raise ValueError("no private adapters were logged: train with tracking.model=personal for client models.")
        if client not in self._models:
            self._models[client] = rayfed.load_run(self._out, client=None if client == GLOBAL else client)
        return self._models[client].probabilities(np.asarray(model_input, dtype=np.uint8))


mlflow.models.set_model(ServedRun())
