"""Bytes a client receives and sends in a round: measured from the encoded messages, beside the closed form.

    python -m benchmarks.traffic

4 clients with 96 images each of 96 classes on the embedded model: image tower of 4 blocks (width 128, MLP 512) and a
projection to embeddings of 64 numbers; text tower of 2 blocks, width 96. A message has a table of names and shapes
besides its values, about 100 bytes, which the closed form leaves out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.studies.cells import COMMON, ENVIRONMENT, ROOT

CLIENTS, IMAGES, CLASSES, PROXY, EMBEDDING = 4, 96, 96, 128, 64
BLOCKS, WIDTH, MLP = 4, 128, 512
TEXT_BLOCKS, TEXT_WIDTH = 2, 96
SETTING = (f"clients.n={CLIENTS}", "data.shots=4", "data.test_shots=1", f"data.proxy={PROXY}", "partition=iid")
ROUNDS = 4
ATTENTION, HALF_MLP = 2 * WIDTH, WIDTH + MLP
"""d_in + d_out of a projection of the attention, and of a layer of the MLP."""
ALL = BLOCKS * (4 * ATTENTION + 2 * HALF_MLP) + WIDTH + EMBEDDING
TABLES = 400
"""More than the tables of a client's messages in a round take."""


@dataclass(frozen=True)
class Case:
    """A method's options, and the closed form (in words and in bytes) of what a client gets and gives in a round."""

    label: str
    words: tuple[str, ...]
    form: str
    down: int
    up: int


def bottlenecks(rank: int) -> int:
    """Parameters of the bottlenecks d -> r -> d with biases beside every block of both towers."""
    return sum(blocks * (2 * d * rank + rank + d) for blocks, d in ((BLOCKS, WIDTH), (TEXT_BLOCKS, TEXT_WIDTH)))


LORA = 4 * 4 * ALL
LAST = 4 * 4 * 2 * 3 * ATTENTION  # q, k and v of the last two blocks, rank 4
CASES = (
    Case("fedlora", ("method=fedlora",), "4 r Σ(d_in + d_out), r = 4, all 25 layers", LORA, LORA),
    Case("fedglad (A)", ("method=fedglad",), "as fedlora", LORA, LORA),
    Case(
        "fedglad (B)",
        ("method=fedglad", "method.distill=proxy_client"),
        "up + 2 P C",
        LORA,
        LORA + 2 * PROXY * CLASSES,
    ),
    Case(
        "fedglad (C)",
        ("method=fedglad", "method.distill=class_mean"),
        "both + 4 (C² + C)",
        LORA + 4 * (CLASSES**2 + CLASSES),
        LORA + 4 * (CLASSES**2 + CLASSES),
    ),
    Case(
        "fedsdg",
        ("method=fedsdg", "method.rank=8"),
        "4 r Σ(d_in + d_out), r = 8, outputs of attention and MLP",
        4 * 8 * BLOCKS * (ATTENTION + HALF_MLP),
        4 * 8 * BLOCKS * (ATTENTION + HALF_MLP),
    ),
    Case(
        "fedpurel",
        ("method=fedpurel",),
        "4 r Σ(d_in + d_out), r = 8, both layers of the MLP; up + 4 x 5 of the record",
        4 * 8 * BLOCKS * 2 * HALF_MLP,
        4 * 8 * BLOCKS * 2 * HALF_MLP + 4 * 5,
    ),
    Case(
        "feddtl",
        ("method=feddtl", "method.sft_rounds=1"),
        "4 r Σ(d_in + d_out), r = 4, q k v of 2 blocks; down + 4 C D; up + n (2 D + 4)",
        LAST + 4 * CLASSES * EMBEDDING,
        LAST + IMAGES * (2 * EMBEDDING + 4),
    ),
    Case(
        "mma",
        ("method=mma",),
        "4 Σ(2 d r + r + d) + 4 x 4 (r² + r), r = 32, 6 blocks, 4 middle layers",
        4 * (bottlenecks(32) + BLOCKS * (32**2 + 32)),
        4 * (bottlenecks(32) + BLOCKS * (32**2 + 32)),
    ),
    Case("blend", ("method=blend",), "4 Σ(2 d r + r + d), r = 16, 6 blocks", 4 * bottlenecks(16), 4 * bottlenecks(16)),
)


def measured(case: Case) -> tuple[float, float]:
    """Bytes down and up per client in the last round but one: FedPuReL's last is personal and sends nothing up."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [*case.words, *SETTING, f"rounds={ROUNDS}", "train.epochs=1", "eval.every=0", *COMMON, f"out={scratch}"]
        command = [sys.executable, "-m", "rayfed.run", *words]
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
        record = json.loads((Path(scratch) / "metrics.jsonl").read_text("utf-8").splitlines()[-2])
    return record["bytes_down"] / CLIENTS, record["bytes_up"] / CLIENTS


def main() -> None:
    """Print the table; exit with 1 if a measured figure is not its closed form and a table."""
    print("| method | closed form | down: closed, measured | up: closed, measured |\n|---|---|---|---|")
    wrong = []
    for case in CASES:
        down, up = measured(case)
        print(f"| {case.label} | {case.form} | {case.down:,}, {down:,.0f} | {case.up:,}, {up:,.0f} |", flush=True)
        if not (0 < down - case.down < TABLES and 0 < up - case.up < TABLES):
            wrong.append(case.label)
    if wrong:
        raise SystemExit(f"not the closed form: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
