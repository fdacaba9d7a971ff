"""Pictures of a run, for people: accuracy by round, per client, who has what, and the figures methods report."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.data.task import Task

VIEWS = (
    ("zero_shot", "zero-shot", "#888888"),
    ("global", "global (GM)", "#1f77b4"),
    ("personal", "personal (PM)", "#d62728"),
)


def draw_all(
    out: Path, task: Task, history: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[Path]:
    """Draw every plot that has something to show into ``out/plots``; return the files."""
    evaluated = [(r["round"] + 1, r["evaluation"]) for r in history if r["evaluation"]]
    drawn = [
        save(out, "accuracy.png", lambda: accuracy(evaluated)),
        save(out, "clients.png", lambda: clients(rows)),
        save(out, "partition.png", lambda: partition(task)),
    ]
    if any(r["clients"] or r["server"] for r in history):
        drawn.append(save(out, "training.png", lambda: training(history)))
    if any(e["global"].get("few") is not None for _, e in evaluated):
        drawn.append(save(out, "balance.png", lambda: by_class_size(evaluated)))
    for name, panels in cells(history).items():
        drawn.append(save(out, f"{name}.png", functools.partial(heatmaps, panels, name)))
    return drawn


def save(out: Path, name: str, draw: Callable[[], Figure]) -> Path:
    """Save what ``draw`` makes as ``out/plots/name``; return its path."""
    path = out / "plots" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # Class names are shown as they are: no maths, and a box for a sign the font lacks is no reason to warn.
    with (
        matplotlib.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = draw()
        figure.savefig(path, dpi=130)
    return path


def _axes(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)
    return figure, list(axes[0])


def accuracy(evaluated: Sequence[tuple[int, Mapping[str, Any]]]) -> Figure:
    """Mean accuracy over clients by round, with the band from the 10th to the 90th percentile of the clients."""
    figure, (axes,) = _axes(7, 4.2)
    rounds = [index for index, _ in evaluated]
    for view, label, colour in VIEWS:
        mean, low, high = ([_percent(e[view][key]) for _, e in evaluated] for key in ("acc_macro", "p10", "p90"))
        if not mean or np.isnan(mean).all():
            continue
        axes.plot(
            rounds,
            mean,
            color=colour,
            label=label,
            linestyle="--" if view == "zero_shot" else "-",
            marker="o",
            markersize=3,
        )
        if view == "personal":
            axes.fill_between(
                rounds, low, high, color=colour, alpha=0.12, linewidth=0, label="PM, 10th to 90th percentile"
            )
    axes.set(xlabel="round", ylabel="accuracy on the clients' test images, %", title="Mean accuracy over clients")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, fontsize=8)
    return figure


def by_class_size(evaluated: Sequence[tuple[int, Mapping[str, Any]]]) -> Figure:
    """Accuracy by round of classes with many, medium and few training images, one panel a group."""
    groups = ("many", "medium", "few")
    figure, axes = _axes(11, 3.8, len(groups))
    rounds = [index for index, _ in evaluated]
    for place, group in zip(axes, groups, strict=True):
        for view, label, colour in VIEWS:
            values = [_percent(e[view].get(group)) for _, e in evaluated]
            if not np.isnan(values).all():
                style = "--" if view == "zero_shot" else "-"
                place.plot(rounds, values, color=colour, label=label, linestyle=style, marker="o", markersize=3)
        place.set(xlabel="round", title=f"classes with {group} images", ylabel="accuracy (%)")
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
        place.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    return figure


def clients(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Each client's accuracy by view, sorted by the personal one; clients without test images are not shown."""
    held = sorted((r for r in rows if r["personal"] is not None), key=lambda r: r["personal"])
    figure, (axes,) = _axes(7, max(2.5, 0.28 * min(len(held), 60) + 1.2))
    held = held if len(held) <= 60 else [held[i] for i in np.linspace(0, len(held) - 1, 60).astype(int)]
    for place, row in enumerate(held):
        values = [_percent(row[view]) for view, _, _ in VIEWS if row.get(view) is not None]
        axes.plot([min(values), max(values)], [place, place], color="#cccccc", zorder=1)
    for view, label, colour in VIEWS:
        points = [(_percent(r[view]), i) for i, r in enumerate(held) if r.get(view) is not None]
        if points:
            across, down = zip(*points, strict=True)
            axes.scatter(across, down, color=colour, label=label, zorder=2, s=26)
    axes.set_yticks(range(len(held)), [f"client {r['client']} ({r['num_train']} images)" for r in held], fontsize=8)
    axes.set(xlabel="accuracy on its own test images, %", title="Accuracy per client")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.55 / figure.get_figheight()), ncols=3)
    return figure


def partition(task: Task) -> Figure:
    """Who has what: training images per class and client."""
    num_classes = len(task.classes)
    counts = np.stack([np.bincount(task.train.labels[c.train], minlength=num_classes) for c in task.clients])
    figure, (axes,) = _axes(min(14, 4 + 0.12 * num_classes), min(10, 2.2 + 0.22 * len(task.clients)))
    shown = np.ma.masked_equal(counts, 0)
    image = axes.imshow(shown, aspect="auto", cmap="viridis", interpolation="nearest")
    step = max(1, -(-num_classes // 48))
    axes.set_xticks(
        range(0, num_classes, step),
        [task.classes[i][:24] for i in range(0, num_classes, step)],
        rotation=90,
        fontsize=6,
    )
    every = max(1, -(-len(task.clients) // 40))
    axes.set_yticks(
        range(0, len(task.clients), every), [str(i) for i in range(0, len(task.clients), every)], fontsize=7
    )
    axes.set(xlabel="class", ylabel="client", title="Training images per client and class (white: none)")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="images", fraction=0.03)
    return figure


def training(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Losses in one panel, and a panel for each figure of the method, with the extremes over clients beside it."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in history:
        for name, value in {**record["clients"], **record["server"]}.items():
            if name.count("/") < 2:
                series.setdefault(name, []).append((record["round"] + 1, value))
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, values in series.items():
        title = "local loss terms" if name.startswith("loss_") else name
        for suffix in ("_min", "_max", "_many", "_medium", "_few"):
            title = title.removesuffix(suffix)
        panels.setdefault(title, {})[name.removeprefix("loss_")] = values
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(5.5, 3.6 * columns), 0.6 + 3 * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, (title, group) in zip(places, panels.items(), strict=False):
        for name, values in group.items():
            style = "--" if name.endswith(("_min", "_max")) else "-"
            place.plot(*zip(*values, strict=True), style, marker="o", markersize=3, label=name)
        place.set(xlabel="round", title=title)
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
        place.grid(alpha=0.3)
        if len(group) > 1:
            place.legend(frameon=False, fontsize=7)
    for place in places[len(panels) :]:
        place.remove()
    return figure


Cells = dict[str, dict[str, dict[int, float]]]


def cells(history: Sequence[Mapping[str, Any]]) -> dict[str, Cells]:
    """Figures named ``picture/panel/row``, as ``{picture: {panel: {row: {round: value}}}}``."""
    found: dict[str, Cells] = {}
    for record in history:
        for name, value in {**record["clients"], **record["server"]}.items():
            if name.count("/") == 2:
                picture, panel, row = name.split("/")
                rows = found.setdefault(picture, {}).setdefault(panel, {})
                rows.setdefault(row, {})[record["round"] + 1] = value
    return found


def heatmaps(panels: Cells, name: str) -> Figure:
    """One heatmap a panel, rows in order of their names and rounds across; one colour scale, that of ``name``."""
    values = [v for rows in panels.values() for row in rows.values() for v in row.values()]
    names = sorted({name for rows in panels.values() for name in rows})
    last = max(index for rows in panels.values() for row in rows.values() for index in row)
    figure, axes = _axes(2 + 3.5 * len(panels), min(14, 1.5 + 0.28 * len(names)), len(panels))
    for place, (panel, rows) in zip(axes, sorted(panels.items()), strict=True):
        grid = [[rows.get(name, {}).get(index, np.nan) for index in range(1, last + 1)] for name in names]
        extent = (0.5, last + 0.5, len(names) - 0.5, -0.5)
        shown = np.ma.masked_invalid(np.array(grid, dtype=float))
        image = place.imshow(shown, aspect="auto", extent=extent, vmin=min(values), vmax=max(values), cmap="viridis")
        place.set_yticks(range(len(names)), names, fontsize=7)
        place.set(xlabel="round", title=panel)
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, fraction=0.04, label=name)
    return figure


def _percent(value: float | None) -> float:
    return float("nan") if value is None else 100 * value
