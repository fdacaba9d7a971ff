"""How training images are dealt out to clients, and test images after them. Pure NumPy; indices are int64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfed.errors import DataError
from rayfed.rng import numpy_generator

Indices = NDArray[np.int64]

# Gamma draws spent at most on redrawing: keeps a hopeless request under five seconds whatever the machine's clock says.
_DRAW_BUDGET = 20_000_000
_DRAW_OVERHEAD = 2_000


@dataclass(frozen=True)
class Request:
    """What to divide: per image its class and domain [N], over how many clients, and how.

    ``alpha`` is the concentration of the Dirichlet distributions, ``boost`` what "dir_boost" adds for a class's own
    client, ``min_train`` the fewest images a client may get, ``max_draws`` how often a Dirichlet partition is drawn
    anew to reach it.
    """

    labels: Indices
    domains: Indices
    num_clients: int
    seed: int
    alpha: float = 0.5
    min_train: int = 2
    max_draws: int = 1000
    boost: float = 1.0

    def generator(self, *labels: str | int) -> np.random.Generator:
        """Random stream of this partition for one purpose."""
        return numpy_generator(self.seed, "partition", *labels)


def divide(name: str, request: Request) -> list[Indices]:
    """Divide all images of ``request`` by the rule ``name``: sorted index arrays, one for each client.

    Every image goes to exactly one client. Raises ``DataError`` if the request is impossible, or if no draw gave every
    client ``min_train`` images.
    """
    rule = _RULES.get(name)
    if rule is None:
        raise DataError(f"Partition {name!r} is not known; choose from {', '.join([*_RULES, 'file'])}.")
    check_possible(len(request.labels), request.num_clients, request.min_train)
    parts = [np.sort(part) for part in rule(request)]
    smallest = min(len(part) for part in parts)
    if smallest < request.min_train:
        raise DataError(
            f"Partition {name!r} over {request.num_clients} clients leaves one with {smallest} training images, fewer "
            f"than partition.min_train={request.min_train}; use fewer clients, more images or a lower minimum."
        )
    return parts


def check_possible(num_images: int, num_clients: int, min_train: int) -> None:
    """Raise ``DataError`` if ``num_images`` cannot give each client ``min_train``, whatever the rule."""
    if num_clients < 1:
        raise DataError(f"The number of clients is {num_clients} but must be at least 1; ask for one or more.")
    if num_clients * min_train > num_images:
        raise DataError(
            f"{num_clients} clients with at least {min_train} training images each need {num_clients * min_train}, but "
            f"there are {num_images}; use at most {num_images // max(min_train, 1)} clients, more images, or a lower "
            "partition.min_train."
        )


def iid(request: Request) -> list[Indices]:
    """Shuffle all images and cut them into parts whose sizes differ by at most one."""
    order = request.generator("iid").permutation(len(request.labels))
    return np.array_split(order, request.num_clients)


def dirichlet(request: Request) -> list[Indices]:
    """Divide each class over the clients by shares drawn from Dir(alpha); redraw until all have ``min_train``."""
    everyone = np.arange(len(request.labels))
    return _dirichlet_within(request, everyone, request.num_clients, request.generator("dirichlet"))


def dir_boost(request: Request) -> list[Indices]:
    """Divide every class by ``dirichlet_boost``; clients below ``min_train`` get images of the largest ones."""
    parts = dirichlet_boost(
        request.labels,
        request.num_clients,
        alpha=request.alpha,
        boost=request.boost,
        shots=None,
        seed=request.seed,
    )
    return _fill(parts, request.min_train, request.generator("dir_boost", "fill"))


def dirichlet_boost(
    labels: Indices, num_clients: int, *, alpha: float, boost: float, shots: int | None, seed: int
) -> list[Indices]:
    """Give each class mostly to one client, class c of ``labels`` [N] to client c mod ``num_clients`` (BLEND's code).

    Per class: shares from a Dirichlet distribution with ``alpha`` everywhere plus ``boost`` at the class's own client,
    then a multinomial of ``shots`` images drawn at random (of all there are for None, or fewer) over the clients. A
    client left empty gets one image of the largest. Returns sorted index arrays into ``labels``, one for each client.

    Raises:
        DataError: fewer images than clients, or a parameter out of its range.
    """
    if alpha <= 0 or boost < 0 or (shots is not None and shots < 1):
        raise DataError(
            f"dir_boost needs alpha > 0, boost >= 0 and shots >= 1, but they are {alpha:g}, {boost:g} and {shots}: "
            "change what is out of range."
        )
    labels = np.asarray(labels, dtype=np.int64)
    classes, sizes = np.unique(labels, return_counts=True)
    check_possible(int(sizes.sum() if shots is None else np.minimum(sizes, shots).sum()), num_clients, 1)
    generator = numpy_generator(seed, "partition", "dir_boost")
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    for label in classes:
        members = generator.permutation(np.flatnonzero(labels == label))[:shots]
        concentration = np.full(num_clients, alpha)
        concentration[label % num_clients] += boost
        counts = generator.multinomial(len(members), generator.dirichlet(concentration))
        for part, piece in zip(parts, np.split(members, np.cumsum(counts)[:-1]), strict=True):
            part.append(piece)
    return [np.sort(part) for part in _fill([np.concatenate(part) for part in parts], 1, generator)]


def _fill(parts: list[Indices], least: int, generator: np.random.Generator) -> list[Indices]:
    """Move single images, drawn at random, from the largest part (the first of equals) to those below ``least``."""
    parts = list(parts)
    for place in range(len(parts)):
        while len(parts[place]) < least:
            giver = max(range(len(parts)), key=lambda k: len(parts[k]))
            chosen = int(generator.integers(len(parts[giver])))
            parts[place] = np.append(parts[place], parts[giver][chosen])
            parts[giver] = np.delete(parts[giver], chosen)
    return parts


def disjoint(request: Request) -> list[Indices]:
    """Shuffle the classes and give each client a block of its own, block sizes differing by at most one class."""
    classes = np.unique(request.labels)
    if len(classes) < request.num_clients:
        raise DataError(
            f"Partition 'disjoint' cannot give {request.num_clients} clients classes of their own from "
            f"{len(classes)}; use at most {len(classes)} clients, or partition=dirichlet."
        )
    blocks = np.array_split(request.generator("disjoint").permutation(classes), request.num_clients)
    return [np.flatnonzero(np.isin(request.labels, block)) for block in blocks]


def domain(request: Request) -> list[Indices]:
    """Give each client images of one domain (of several, if there are fewer clients), evenly among its clients."""

    def evenly(members: Indices, count: int, generator: np.random.Generator) -> list[Indices]:
        return np.array_split(generator.permutation(members), count)

    return _by_domain(request, evenly)


def domain_dirichlet(request: Request) -> list[Indices]:
    """As ``domain``, with each class of a domain divided over the domain's clients by shares from Dir(alpha)."""

    def skewed(members: Indices, count: int, generator: np.random.Generator) -> list[Indices]:
        return _dirichlet_within(request, members, count, generator)

    return _by_domain(request, skewed)


_RULES: Mapping[str, Callable[[Request], list[Indices]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dir_boost": dir_boost,
    "disjoint": disjoint,
    "domain": domain,
    "domain_dirichlet": domain_dirichlet,
}


def _by_domain(request: Request, split: Callable[[Indices, int, np.random.Generator], list[Indices]]) -> list[Indices]:
    found = np.unique(request.domains)
    if len(found) < 2:
        raise DataError(
            "Partitions by domain need data with at least two domains, but there is one; "
            "list several in data.domains, or use partition=dirichlet."
        )
    groups = np.array_split(found, min(len(found), request.num_clients))
    counts = [len(block) for block in np.array_split(np.arange(request.num_clients), len(groups))]
    parts: list[Indices] = []
    for position, (group, count) in enumerate(zip(groups, counts, strict=True)):
        members = np.flatnonzero(np.isin(request.domains, group))
        if count * request.min_train > len(members):
            raise DataError(
                f"{count} clients with at least {request.min_train} training images each share a domain of "
                f"{len(members)} images; use fewer clients, more images, or a lower partition.min_train."
            )
        parts.extend(split(members, count, request.generator("domain", position)))
    return parts


def _dirichlet_within(
    request: Request, members: Indices, num_clients: int, generator: np.random.Generator
) -> list[Indices]:
    classes, class_sizes = np.unique(request.labels[members], return_counts=True)
    counts = _draw_counts(request, class_sizes, num_clients, generator)
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    for row, label in enumerate(classes):
        shuffled = generator.permutation(members[request.labels[members] == label])
        pieces = np.split(shuffled, np.cumsum(counts[row])[:-1])
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _draw_counts(
    request: Request, class_sizes: Indices, num_clients: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Images of each class for each client, int64 [C, K], none of the column sums below ``min_train``."""
    draws = min(request.max_draws, max(1, _DRAW_BUDGET // (len(class_sizes) * num_clients + _DRAW_OVERHEAD)))
    best = 0
    for _ in range(draws):
        shares = generator.dirichlet(np.full(num_clients, request.alpha), size=len(class_sizes))
        counts = _round_shares(shares, class_sizes)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= request.min_train:
            return counts
        best = max(best, smallest)
    raise DataError(
        f"No Dirichlet partition over n={request.num_clients} clients with alpha={request.alpha:g} gave every client "
        f"partition.min_train={request.min_train} training images: in {draws} draws the smallest client never got more "
        f"than {best}; raise partition.alpha, or use fewer clients, more images or a lower partition.min_train."
    )


def _round_shares(shares: NDArray[np.float64], class_sizes: Indices) -> NDArray[np.int64]:
    """Whole numbers of images in the proportions ``shares`` [C, K], each row summing to its class size."""
    cuts = np.floor(np.cumsum(shares, axis=1) * class_sizes[:, None] + 0.5).astype(np.int64)
    cuts = np.minimum(cuts, class_sizes[:, None])
    cuts[:, -1] = class_sizes
    return np.diff(cuts, axis=1, prepend=0)


def follow(
    labels: Indices, train_counts: NDArray[np.int64], generator: np.random.Generator
) -> tuple[list[Indices], Indices]:
    """Divide images of ``labels`` [N] over clients in proportion to ``train_counts`` [C, K], class by class.

    Whole images go by largest remainder, ties in random order. Returns sorted index arrays, one for each client, and
    the indices nobody gets because no client trains on their class.
    """
    parts: list[list[Indices]] = [[] for _ in range(train_counts.shape[1])]
    unclaimed: list[Indices] = [np.empty(0, dtype=np.int64)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        weights = train_counts[label]
        if weights.sum() == 0:
            unclaimed.append(members)
            continue
        pieces = np.split(members, np.cumsum(_largest_remainder(weights, len(members), generator))[:-1])
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    empty = np.empty(0, dtype=np.int64)
    return [np.sort(np.concatenate([empty, *part])) for part in parts], np.sort(np.concatenate(unclaimed))


def give_to_holders(labels: Indices, train_counts: NDArray[np.int64]) -> tuple[list[Indices], Indices]:
    """Give every client all images of ``labels`` [N] whose class it trains on: images may go to several clients.

    ``train_counts`` is [C, K]. Returns as ``follow`` does.
    """
    held = train_counts[labels] > 0
    return [np.flatnonzero(column) for column in held.T], np.flatnonzero(~held.any(axis=1))


def _largest_remainder(weights: NDArray[np.int64], total: int, generator: np.random.Generator) -> NDArray[np.int64]:
    # In whole numbers, so that no rounding decides who gets an image; a client of weight 0 has remainder 0 and
    # is reached by no leftover, since those are fewer than the clients with a remainder.
    scaled = weights * total
    counts, remainders = np.divmod(scaled, weights.sum())
    tie = generator.permutation(len(weights))
    order = np.lexsort((tie, -remainders))
    counts[order[: total - int(counts.sum())]] += 1
    return np.asarray(counts, dtype=np.int64)


def count_table(labels: Indices, parts: Sequence[Indices], num_classes: int) -> NDArray[np.int64]:
    """Images of each class at each client, int64 [C, K]."""
    return np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts], axis=1)


@dataclass(frozen=True)
class FilePart:
    """One client of a partition file; None for what the file does not list."""

    train: Indices
    val: Indices | None
    test: Indices | None


def read_file(path: str | None, num_clients: int | None) -> list[FilePart]:
    """Read a partition file: ``{"clients": [{"train": [...], "val": [...], "test": [...]}, ...]}``, UTF-8 JSON.

    ``train`` and ``val`` count the data set's training images from 0, ``test`` its test images; ``val`` and ``test``
    may be left out, for all clients alike. ``num_clients`` None takes as many clients as it lists. Raises
    ``DataError`` if the file is missing, malformed or for another number of clients.
    """
    if path is None:
        raise DataError("Partition 'file' needs a file of image numbers; set partition.file to its path.")
    file = Path(path).expanduser()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"Partition file {str(file.absolute())!r} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise DataError(f"Partition file {str(file)!r} is not UTF-8 JSON ({error}); write it again.") from error
    entries = content.get("clients") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f'Partition file {str(file)!r} lacks {{"clients": [{{"train": [...]}}, ...]}}; write it so.')
    if num_clients is not None and len(entries) != num_clients:
        raise DataError(
            f"Partition file {str(file)!r} divides data over {len(entries)} clients but {num_clients} were asked for; "
            f"ask for {len(entries)} clients or give another file."
        )
    return [_file_part(file, number, entry) for number, entry in enumerate(entries)]


def _file_part(file: Path, number: int, entry: dict[str, Any]) -> FilePart:
    unknown = sorted(set(entry) - {"train", "val", "test"})
    if unknown or "train" not in entry:
        problem = f"unknown part {unknown[0]!r}" if unknown else "no 'train'"
        raise DataError(f"Client {number} in {str(file)!r} has {problem}; list 'train' and, if wanted, 'val', 'test'.")
    for name, values in entry.items():
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise DataError(f"Client {number} in {str(file)!r} has a {name!r} that is no list of whole numbers.")

    def indices(name: str) -> Indices | None:
        return np.array(sorted(entry[name]), dtype=np.int64) if name in entry else None

    return FilePart(np.array(sorted(entry["train"]), dtype=np.int64), indices("val"), indices("test"))


def check_file(parts: Sequence[FilePart], path: str, num_train: int, num_test: int) -> None:
    """Raise ``DataError`` if an image number is out of range, used twice, or listed for some clients only."""
    for name in ("val", "test"):
        listed = [getattr(part, name) is not None for part in parts]
        if any(listed) and not all(listed):
            raise DataError(
                f"Partition file {path!r} lists {name!r} for some clients but not for client {listed.index(False)}; "
                "list it for all (it may be empty) or for none."
            )
    train = [(number, values) for number, part in enumerate(parts) for values in (part.train, part.val)]
    _check_once(train, path, "training", num_train)
    _check_once([(number, part.test) for number, part in enumerate(parts)], path, "test", num_test)


def _check_once(lists: Sequence[tuple[int, Indices | None]], path: str, what: str, count: int) -> None:
    owner: dict[int, int] = {}
    for number, values in lists:
        for value in values.tolist() if values is not None else ():
            if not 0 <= value < count:
                raise DataError(
                    f"Client {number} in {path!r} lists {what} image {value}, but the data set has {count}, "
                    f"numbered from 0; correct the file."
                )
            if value in owner:
                raise DataError(
                    f"{what.capitalize()} image {value} is listed twice in {path!r}, for clients {owner[value]} and "
                    f"{number}; list every image once."
                )
            owner[value] = number
