"""Evaluation on base and on novel classes: what each view predicts, and the figures made of it.

Views: zero_shot, global, and personal, the mean over clients of each client's own model. Figures, per view:

    local       clients' own test images, candidates all base classes; mean over clients
    local_own   the same images, candidates only the classes the client has training images of; mean over clients
    held        all base test images of the classes the client has training images of, candidates all base classes
    base        all test images of base classes, candidates all base classes
    novel       all test images of novel classes, candidates all novel classes
    hm          harmonic mean of base and novel

Every personal model on the whole test set is much work: personal held, base and novel are of the last round only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rayfed.data.task import Task
from rayfed.engine.jobs import Prediction, Predictions, PredictJob, StateRef, stretches
from rayfed.metrics.novel import harmonic_mean

Whole = Mapping[tuple[str, int], Predictions]
VIEWS = ("zero_shot", "global", "personal")
FIGURES = ("local", "local_own", "held", "base", "novel", "hm")


@dataclass(slots=True)
class NovelScores:
    """Predicted class numbers: ``own`` among the owner's classes, ``base`` and ``novel`` of whole test sets.

    Keys: a view and a client, which is -1 for what is the same for all. ``clients`` are those with a personal model;
    their ``own`` is of their own test images, other ``own`` of all pairs of a test image and a client that tests on it,
    every other entry of a whole test set.
    """

    clients: frozenset[int] = frozenset()

    own: dict[tuple[str, int], Predictions] = field(default_factory=dict)
    base: dict[tuple[str, int], Predictions] = field(default_factory=dict)
    novel: dict[tuple[str, int], Predictions] = field(default_factory=dict)

    def without_personal(self, clients: frozenset[int]) -> NovelScores:
        """What is the same for all clients, for the next evaluation, in which ``clients`` have personal models."""
        parts = (
            {key: value for key, value in part.items() if key[1] < 0} for part in (self.own, self.base, self.novel)
        )
        return NovelScores(clients, *parts)


def jobs(task: Task, private: Mapping[int, StateRef], *, zero_shot: bool, last: bool) -> Iterator[PredictJob]:
    """The predictions on novel classes that one evaluation needs and, in the ``last`` one, those of personal models."""
    assert task.novel is not None
    for start, stop in stretches(len(task.novel.test)):
        yield PredictJob(-1, stop - start, "global", "novel", start, stop)
        if zero_shot:
            yield PredictJob(-1, stop - start, "zero_shot", "novel", start, stop)
    for client_id, ref in sorted(private.items()) if last else ():
        for start, stop in stretches(len(task.novel.test)):
            yield PredictJob(client_id, 2 * (stop - start), "personal", "novel", start, stop, ref)
        for start, stop in stretches(len(task.test)):
            yield PredictJob(client_id, 2 * (stop - start), "personal", "stretch", start, stop, ref)


def collect(task: Task, prediction: Prediction, scores: NovelScores) -> None:
    """Put one prediction where it belongs."""
    assert task.novel is not None
    job = prediction.job
    key = job.view, job.client_id
    if job.part in ("novel", "stretch"):
        known, count = (scores.novel, len(task.novel.test)) if job.part == "novel" else (scores.base, len(task.test))
        known.setdefault(key, np.full(count, -1, dtype=np.int32))[job.start : job.stop] = prediction.classes
    if prediction.own is None:
        return
    if job.part == "test":
        scores.own[key] = prediction.own
    elif job.client_id < 0:
        image, _ = task.tested_pairs()
        whole = scores.own.setdefault(key, np.full(len(image), -1, dtype=np.int32))
        whole[(image >= job.start) & (image < job.stop)] = prediction.own


def figures(
    task: Task, scores: NovelScores, own_images: Mapping[str, float | None]
) -> dict[str, dict[str, float | None]]:
    """The figures by view, in [0, 1]; None where nothing was predicted. ``own_images``: ``local`` by view."""
    assert task.novel is not None
    found: dict[str, dict[str, float | None]] = {}
    for view in VIEWS:
        base = _whole(task, scores, scores.base, view, task.test.labels)
        novel = _whole(task, scores, scores.novel, view, task.novel.test.labels)
        found[view] = {
            "local": own_images[view],
            "local_own": _local_own(task, scores, view),
            "held": _held(task, scores, view),
            "base": base,
            "novel": novel,
            "hm": None if base is None or novel is None else harmonic_mean(base, novel),
        }
    return found


def _members(task: Task) -> list[int]:
    """Clients that take part: those with training images."""
    return [c for c, client in enumerate(task.clients) if len(client.train)]


def _of_client(scores: NovelScores, known: Whole, view: str, client_id: int) -> Predictions | None:
    """What a view predicts for a client; one without a model of its own predicts with the global one."""
    if view == "personal" and client_id in scores.clients:
        return known.get(("personal", client_id))
    return known.get(("global" if view == "personal" else view, -1))


def _whole(task: Task, scores: NovelScores, known: Whole, view: str, labels: npt.NDArray[np.int64]) -> float | None:
    """Accuracy of a view on a whole test set; of personal, the mean over clients."""
    hits = []
    for client_id in _members(task) if view == "personal" else (-1,):
        predictions = _of_client(scores, known, view, client_id)
        if predictions is None or not len(labels):
            return None
        hits.append(float((predictions == labels).mean()))
    return float(np.mean(hits)) if hits else None


def _held(task: Task, scores: NovelScores, view: str) -> float | None:
    """Mean over clients of the accuracy on all test images of the classes each holds."""
    accuracies, held = [], task.held_classes()
    for client_id in _members(task):
        predictions = _of_client(scores, scores.base, view, client_id)
        if predictions is None:
            return None
        mine = held[client_id][task.test.labels]
        if mine.any():
            accuracies.append(float((predictions == task.test.labels)[mine].mean()))
    return float(np.mean(accuracies)) if accuracies else None


def _local_own(task: Task, scores: NovelScores, view: str) -> float | None:
    """Mean over clients of the accuracy on their own test images among their own classes."""
    accuracies, (_, owner) = [], task.tested_pairs()
    for client_id, client in enumerate(task.clients):
        if not len(client.test):
            continue
        predictions = _of_client(scores, scores.own, view, client_id)
        if predictions is None:
            return None
        own = view == "personal" and client_id in scores.clients
        mine = predictions if own else predictions[owner == client_id]
        accuracies.append(float((mine == task.test.labels[client.test]).mean()))
    return float(np.mean(accuracies)) if accuracies else None
