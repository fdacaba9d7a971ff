"""FedGLAD on real images: 10 clients x 40 of Fashion-MNIST, Dirichlet 0.1, 10 rounds of 2 epochs, 1,000 test images."""

from __future__ import annotations

from benchmarks.studies.cells import Study
from benchmarks.studies.fedglad import COLUMNS, VARIANTS, cells

ROWS = {**VARIANTS, "fedglad (C)": ("method=fedglad", "method.distill=class_mean")}
"""With ten classes a client has enough images of some for the default threshold of protocol C."""
SETTING = (
    "data=fashion_mnist",
    "clients.n=10",
    "data.shots=40",
    "data.test_shots=100",
    "partition.alpha=0.1",
    "train.epochs=2",
)

STUDY = Study(cells(ROWS, SETTING, 10), COLUMNS, goal="fedlora")
