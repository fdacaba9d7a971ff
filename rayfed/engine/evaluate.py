"""Who is evaluated on what: predictions are jobs like training, figures are made of them here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayfed.data.task import Task
from rayfed.engine import novel
from rayfed.engine.jobs import Prediction, Predictions, PredictJob, StateRef, stretches
from rayfed.metrics.accuracy import BoolArray, over_clients, per_class
from rayfed.metrics.balance import balance
from rayfed.metrics.groups import class_groups


def jobs(task: Task, private: Mapping[int, StateRef], *, zero_shot: bool, last: bool = True) -> list[PredictJob]:
    """The predictions one evaluation needs; personal models on whole test sets only in the ``last`` one.

    Global (and once zero-shot) over the whole test set; personal on each client's own test and validation images. A
    client without private state predicts with the global model, so its test images are not predicted twice.
    """
    found: list[PredictJob] = []
    for start, stop in stretches(len(task.test)):
        found.append(PredictJob(-1, stop - start, "global", "stretch", start, stop))
        if zero_shot:
            found.append(PredictJob(-1, stop - start, "zero_shot", "stretch", start, stop))
    for client_id, client in enumerate(task.clients):
        ref = private.get(client_id)
        if ref is not None and len(client.test):
            found.append(PredictJob(client_id, 2 * len(client.test), "personal", "test", private=ref))
        if len(client.val):
            view = "global" if ref is None else "personal"
            found.append(PredictJob(client_id, 2 * len(client.val), view, "val", private=ref))  # type: ignore[arg-type]
    if task.novel is not None:
        found += novel.jobs(task, private, zero_shot=zero_shot, last=last)
    return found


@dataclass(slots=True)
class Scores:
    """Predicted classes by view: whole test set, and per client."""

    zero_shot: Predictions | None = None
    global_: Predictions | None = None
    personal: dict[int, Predictions] = field(default_factory=dict)
    trained: dict[int, Predictions] = field(default_factory=dict)
    val: dict[int, Predictions] = field(default_factory=dict)
    novel: novel.NovelScores = field(default_factory=novel.NovelScores)

    def next(self, clients: Iterable[int]) -> None:
        """Make room for the next evaluation, in which ``clients`` have personal models."""
        self.personal, self.val = {}, {}
        self.novel = self.novel.without_personal(frozenset(clients))


def collect(task: Task, predictions: Iterable[Prediction], scores: Scores) -> Scores:
    """Sort ``predictions`` into ``scores``."""
    whole = np.full(len(task.test.labels), -1, dtype=np.int32)
    views: dict[str, Predictions] = {}
    for prediction in predictions:
        job = prediction.job
        if task.novel is not None:
            novel.collect(task, prediction, scores.novel)
        if job.part == "novel" or (job.part == "stretch" and job.client_id >= 0):
            continue
        if job.part == "stretch":
            views.setdefault(job.view, whole.copy())[job.start : job.stop] = prediction.classes
        elif job.part == "val":
            scores.val[job.client_id] = prediction.classes
        else:
            scores.personal[job.client_id] = prediction.classes
    scores.zero_shot = views.get("zero_shot", scores.zero_shot)
    scores.global_ = views.get("global", scores.global_)
    return scores


def client_hits(task: Task, scores: Scores, view: str) -> dict[int, BoolArray]:
    """Which of its own test images each client gets right in a view; personal falls back to global."""
    hits: dict[int, BoolArray] = {}
    for client_id, client in enumerate(task.clients):
        truth = task.test.labels[client.test]
        if view == "trained" and client_id not in scores.trained:
            continue
        own = {"personal": scores.personal, "trained": scores.trained}.get(view, {}).get(client_id)
        shared = scores.zero_shot if view == "zero_shot" else scores.global_
        if own is None:
            if shared is None:
                continue
            own = shared[client.test]
        hits[client_id] = own == truth
    return hits


def figures(task: Task, scores: Scores) -> dict[str, Any]:
    """Return the figures of one evaluation, by view; accuracies in [0, 1]."""
    found: dict[str, Any] = {}
    for view in ("zero_shot", "global", "personal"):
        found[view] = over_clients(client_hits(task, scores, view))
    for view, whole in (("zero_shot", scores.zero_shot), ("global", scores.global_)):
        found[view]["acc_full"] = None if whole is None or not len(whole) else float((whole == task.test.labels).mean())
    for view, by_class in _balances(task, scores).items():
        found[view] |= by_class
    if task.novel is not None:
        own_images = {view: found[view]["acc_macro"] for view in novel.VIEWS}
        for view, values in novel.figures(task, scores.novel, own_images).items():
            found[view] |= values
    found["personal_trained"] = over_clients(client_hits(task, scores, "trained"))
    val = {c: p == task.val.labels[task.clients[c].val] for c, p in scores.val.items()}
    found["val"] = {"personal_acc": over_clients(val)["acc_weighted"]}
    return found


def _balances(task: Task, scores: Scores) -> dict[str, dict[str, float | None]]:
    """Figures by class: of zero-shot and global on the whole test set, of personal on the clients' own images."""
    num_classes = len(task.classes)
    groups = class_groups(task.train_counts())
    found = {}
    for view, whole in (("zero_shot", scores.zero_shot), ("global", scores.global_)):
        hits = np.zeros(0, np.bool_) if whole is None else whole == task.test.labels
        found[view] = balance(groups, per_class(task.test.labels[: len(hits)], hits, num_classes))
    own = client_hits(task, scores, "personal")
    labels = [task.test.labels[task.clients[c].test] for c in own] or [np.zeros(0, np.int64)]
    hits = np.concatenate([np.zeros(0, np.bool_), *own.values()])
    found["personal"] = balance(groups, per_class(np.concatenate(labels), hits, num_classes))
    return found


def class_rows(task: Task, scores: Scores) -> list[dict[str, Any]]:
    """One row per class: its training images and group, its test images at the clients, and each view's accuracy."""
    columns = {}
    for view in ("zero_shot", "global", "personal"):
        hits = client_hits(task, scores, view)
        labels = [task.test.labels[task.clients[c].test] for c in hits]
        if hits:
            columns[view] = per_class(np.concatenate(labels), np.concatenate(list(hits.values())), len(task.classes))
    counts = np.bincount(
        np.concatenate([task.test.labels[c.test] for c in task.clients] or [np.zeros(0, np.int64)]),
        minlength=len(task.classes),
    )
    held = task.train_counts()
    groups = class_groups(held)
    fixed = [{"num_train": n, "group": group} for n, group in zip(held, groups, strict=True)]
    return [
        {
            "class": i,
            "name": name,
            **fixed[i],
            "num_test": int(counts[i]),
            **{view: column[i] for view, column in columns.items()},
        }
        for i, name in enumerate(task.classes)
    ]


def client_rows(task: Task, scores: Scores) -> list[dict[str, Any]]:
    """One row per client: its images and the accuracy of each view on its own test images (None without any)."""
    views = {view: client_hits(task, scores, view) for view in ("zero_shot", "global", "personal", "trained")}
    rows = []
    for client_id, client in enumerate(task.clients):
        labels = task.train.labels[client.train]
        row: dict[str, Any] = {
            "client": client_id,
            "num_train": len(client.train),
            "num_val": len(client.val),
            "num_test": len(client.test),
            "num_classes": len(np.unique(labels)),
        }
        for view, hits in views.items():
            own = hits.get(client_id)
            row["personal_trained" if view == "trained" else view] = (
                float(own.mean()) if own is not None and len(own) else None
            )
        rows.append(row)
    return rows
