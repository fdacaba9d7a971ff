"""What a sweep leaves for people: a table, ``trials.csv``, ``best.yaml`` and a plot of the figure by parameter."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console as RichConsole
from rich.table import Table

from rayfed import config
from rayfed.engine.store import write_whole
from rayfed.sweep.ledger import Trial
from rayfed.sweep.request import Request
from rayfed.sweep.space import LISTS, as_text
from rayfed.tracking.files import write_table

FEWEST = 4
"""Valid trials below which an importance would be a coincidence."""


def write_trials(out: Path, request: Request, order: Sequence[Trial]) -> None:
    """Write ``trials.csv``: a row per trial, best first."""
    names = [p.name for p in request.space.parameters]
    rows = [
        {
            "rank": rank + 1,
            "trial": trial.index,
            "state": trial.state,
            "rounds": trial.rounds,
            request.tune.metric: trial.score,
            **{name: as_text(trial.point[name]) if name in trial.point else None for name in names},
            "error": trial.error,
        }
        for rank, trial in enumerate(order)
    ]
    write_table(out / "trials.csv", rows)


def write_best(out: Path, request: Request, best: Trial) -> Path:
    """Write ``best.yaml``, which ``python -m rayfed.run config=`` takes; return its path."""
    options = request.options(best.point).model_copy(update={"out": None, "resume": "never"})
    found = f"{request.tune.metric} {best.score:.4f} after {best.rounds} rounds"
    lines = [f"# Trial {best.index} of the sweep in {out}: {found}."]
    if best.changes:
        lines.append(f"# Its values changed while it trained ({best.name}/trial.json); these are the last ones.")
    path = out / "best.yaml"
    write_whole(path, ("\n".join(lines) + "\n" + config.to_yaml(options)).encode())
    return path


def print_table(request: Request, order: Sequence[Trial], *, rows: int = 20) -> None:
    """Print the trials, best first; of failed and diverged ones the first line of their error."""
    console = RichConsole(width=None if sys.stdout.isatty() else 200, highlight=False)
    ascii_only = (console.encoding or "").lower() not in {"utf-8", "utf8"}
    from rich import box

    table = Table(box=box.ASCII if ascii_only else box.SIMPLE_HEAD)
    names = [p.name for p in request.space.parameters]
    for name in ("trial", "state", "rounds", request.tune.metric, *names):
        table.add_column(name.removeprefix("method."), justify="left" if name in {"state", *names} else "right")
    for trial in order[:rows]:
        score = "" if trial.score is None else f"{100 * trial.score:.1f} %"
        values = (as_shown(trial.point[name]) if name in trial.point else "" for name in names)
        table.add_row(str(trial.index), trial.state, str(trial.rounds), score, *values)
    console.print(table)
    if len(order) > rows:
        console.print(f"... and {len(order) - rows} more in trials.csv", markup=False)
    for trial in order:
        if trial.error:
            console.print(f"trial {trial.index} {trial.state}: {trial.error}", markup=False, soft_wrap=True)


def as_shown(value: Any) -> str:
    """A value for people: three significant digits are enough to tell points apart."""
    return f"{value:.3g}" if isinstance(value, float) else as_text(value)


def importance(values: Sequence[Any], scores: Sequence[float], *, ordered: bool) -> float | None:
    """How far a parameter orders the trials by their figure, in [0, 1]; None for too few trials or a constant.

    For numbers |rho|, Spearman's rank correlation; for listed values the correlation ratio of the ranks (the square
    root of the share of their variance that lies between the values).
    """
    if len(scores) < FEWEST or len({as_text(v) for v in values}) < 2 or len(set(scores)) < 2:
        return None
    ranks = _ranks(np.asarray(scores, dtype=np.float64))
    if ordered:
        own = _ranks(np.asarray(values, dtype=np.float64))
        return float(abs(np.corrcoef(own, ranks)[0, 1]))
    texts = np.array([as_text(v) for v in values])
    between = sum((texts == t).sum() * (ranks[texts == t].mean() - ranks.mean()) ** 2 for t in np.unique(texts))
    return float(np.sqrt(between / ((ranks - ranks.mean()) ** 2).sum()))


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ranks, equal values sharing the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    shared: npt.NDArray[np.float64] = (ends - (counts - 1) / 2)[place]
    return shared


def is_ordered(request: Request, name: str, values: Sequence[Any]) -> bool:
    """Whether a parameter's values are numbers (listed ones too)."""
    parameter = next(p for p in request.space.parameters if p.name == name)
    everything = [*values, *(parameter.values if parameter.kind in LISTS else ())]
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in everything)


def importances(request: Request, trials: Sequence[Trial]) -> dict[str, float | None]:
    """Importance of each parameter over the trials with a valid figure that have it."""
    found: dict[str, float | None] = {}
    for parameter in request.space.parameters:
        held = [t for t in trials if t.score is not None and parameter.name in t.point]
        values = [t.point[parameter.name] for t in held]
        scores = [t.score for t in held if t.score is not None]
        found[parameter.name] = importance(values, scores, ordered=is_ordered(request, parameter.name, values))
    return found


def draw_parameters(out: Path, request: Request, trials: Sequence[Trial], best: Trial | None) -> None:
    """Draw ``plots/parameters.png``: the figure against each parameter, whole and stopped trials apart."""
    from rayfed.tracking.plots import save

    save(out, "parameters.png", lambda: _panels(request, trials, best, importances(request, trials)))


def _panels(request: Request, trials: Sequence[Trial], best: Trial | None, weights: Mapping[str, float | None]) -> Any:
    from matplotlib.figure import Figure

    names = [p.name for p in request.space.parameters]
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(5.0, 3.5 * columns), 0.8 + 3 * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for place, name in zip(places, names, strict=False):
        _panel(place, request, name, [t for t in trials if t.score is not None and name in t.point], best)
        weight = weights[name]
        place.set(title=f"{name}\n" + ("" if weight is None else f"rank correlation {weight:.2f}"))
        place.title.set_fontsize(9)
        place.grid(alpha=0.3)
    for place in places[len(names) :]:
        place.remove()
    figure.supylabel(f"{request.tune.metric}, % (last round)", fontsize=9)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _panel(place: Any, request: Request, name: str, trials: Sequence[Trial], best: Trial | None) -> None:
    parameter = next(p for p in request.space.parameters if p.name == name)
    ordered = is_ordered(request, name, [t.point[name] for t in trials])
    texts = sorted({as_text(t.point[name]) for t in trials}, key=lambda text: (len(text), text))
    for state, mark, colour in (("finished", "o", "#1f77b4"), ("stopped", "x", "#999999")):
        held = [t for t in trials if t.state == state]
        across = [t.point[name] if ordered else texts.index(as_text(t.point[name])) for t in held]
        down = [100 * t.score for t in held if t.score is not None]
        label = "all rounds" if state == "finished" else "stopped early"
        place.scatter(across, down, marker=mark, color=colour, s=24, label=label, zorder=2)
    for trial, label, colour in ((best, "best", "#d62728"), (_baseline(request, trials), "baseline", "#2ca02c")):
        if trial is not None and name in trial.point and trial.score is not None:
            x = trial.point[name] if ordered else texts.index(as_text(trial.point[name]))
            ring = {"facecolors": "none", "edgecolors": colour, "linewidths": 1.5, "s": 90, "zorder": 3}
            place.scatter([x], [100 * trial.score], label=label, **ring)
    place.tick_params(axis="x", labelsize=8)
    if not ordered:
        place.set_xticks(range(len(texts)), texts)
    elif parameter.kind in LISTS:
        values = sorted({t.point[name] for t in trials})
        place.set_xticks(values, [as_shown(value) for value in values])
    elif parameter.kind == "loguniform" and trials:
        _logarithmic(place, [t.point[name] for t in trials])


def _logarithmic(place: Any, values: Sequence[float]) -> None:
    """Label decades, and where there are few of them three times each too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    place.set_xscale("log")
    place.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if max(values) < 300 * min(values) else (1.0,)))
    place.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    place.xaxis.set_minor_formatter(NullFormatter())


def _baseline(request: Request, trials: Sequence[Trial]) -> Trial | None:
    baseline = request.baseline()
    return next((t for t in trials if t.index == 0 and baseline is not None), None)
