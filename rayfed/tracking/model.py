"""The adapted model as an MLflow pyfunc: adapters and options as files, code instead of a pickle."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import rayfed
from rayfed.conf.options import TrackingOptions

FILES = ("task.json", "config.yaml", "adapters/shared.safetensors", "adapters/server.safetensors")
PRIVATE = "adapters/clients"


def log_model(client: Any, run_id: str, out: Path, tracking: TrackingOptions) -> None:
    """Log the model of the results folder ``out`` as ``model`` of the run, and register it where a name is given."""
    with tempfile.TemporaryDirectory() as scratch:
        staged, model = Path(scratch) / "run", Path(scratch) / "model"
        _stage(out, staged, private=tracking.model == "personal")
        _save(staged, model)
        client.log_artifacts(run_id, str(model), artifact_path="model")
    if tracking.register_as is not None:
        _register(client, run_id, tracking.register_as)


def _stage(out: Path, staged: Path, *, private: bool) -> None:
    """Copy what a model is made of; private adapters only where they were asked for."""
    for name in FILES:
        if (out / name).exists():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(out / name, staged / name)
    if private and (out / PRIVATE).is_dir():
        shutil.copytree(out / PRIVATE, staged / PRIVATE)


def _save(staged: Path, model: Path) -> None:
    import mlflow
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    signature = ModelSignature(
        inputs=Schema([TensorSpec(np.dtype(np.uint8), (-1, 3, -1, -1))]),
        outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, -1))]),
        params=ParamSchema([ParamSpec("client", DataType.long, -1)]),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example.*")  # the signature says what it would show
        mlflow.pyfunc.save_model(
            str(model),
            python_model=str(Path(__file__).with_name("served.py")),
            artifacts={"run": str(staged)},
            signature=signature,
            pip_requirements=[f"rayfed-vlm=={rayfed.__version__}"],  # finding them out would import the model elsewhere
        )


def _register(client: Any, run_id: str, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException:  # there is one of that name: this is its next version
        client.get_registered_model(name)
    client.create_model_version(name, source=f"runs:/{run_id}/model", run_id=run_id)
