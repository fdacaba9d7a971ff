"""From the words of ``python -m rayfed.tune`` to a sweep that is known to make sense, before anything heavy loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rayfed import config
from rayfed.conf.options import RESUMABLE, RunOptions
from rayfed.conf.tune import TuneOptions
from rayfed.errors import OptionError
from rayfed.sweep.space import Parameter, Point, Space, as_text, read_inline, read_space

NOT_SEARCHED = RESUMABLE - {"clients.min_updates", "clients.deadline_s"}
"""Options of how a run is carried out: a trial's result must not depend on them, so nothing can be found by them."""
DEFAULT_SAMPLES = 16
PATHS = ("data.root", "partition.file")
"""Options that name files relative to where the command was typed, besides those the run command makes absolute."""


@dataclass(frozen=True, slots=True)
class Request:
    """A sweep: its options, what is searched, the words every trial starts from, and the options they make alone."""

    tune: TuneOptions
    space: Space
    words: Mapping[str, str]
    base: RunOptions
    source: str | None

    def options(self, point: Mapping[str, Any]) -> RunOptions:
        """The options of a trial at ``point``. Raises OptionError as ``config.parse_options`` does."""
        return config.parse_options(_words({**self.words, **{n: as_text(v) for n, v in point.items()}}))

    def anchored(self, base: RunOptions) -> Request:
        """The same sweep with every option of ``base`` spelled out: trials do not depend on where they are parsed."""
        flat = config.flatten(base)
        for name in PATHS:
            flat[name] = flat[name] and str(Path(flat[name]).expanduser().resolve())
        words = {name: as_text(value) for name, value in flat.items() if name not in {"out", "resume"}}
        return replace(self, words=words, base=base)

    def definition(self) -> dict[str, Any]:
        """What makes it this sweep: a resumed one must agree in it."""
        tune = self.tune.model_dump(mode="json", exclude={"samples", "concurrent", "fail"})
        run = {n: v for n, v in config.flatten(self.base).items() if n not in RESUMABLE or n == "rounds"}
        searched = [asdict(p) for p in self.space.parameters]
        return {"tune": tune, "options": run, "parameters": searched, "baseline": self.baseline()}

    @property
    def fixed(self) -> dict[str, Any]:
        """What a run without a sweep would have: conditions on options that are not searched look here."""
        return config.flatten(self.base)

    @property
    def is_grid(self) -> bool:
        """Whether the points are all combinations."""
        return self.tune.searcher == "grid" or (self.tune.searcher == "auto" and self.space.is_grid)

    def baseline(self) -> Point | None:
        """The point tried first: what the space names, else what a run without a sweep would have.

        A value that cannot be drawn is moved to the nearest that can; ``notes`` tells of it.
        """
        if self.space.baseline is None:
            return None
        drawn = {p.name: p.nearest(self._default(p.name)) for p in self.space.parameters}
        return self.space.active(drawn, self.fixed)

    def notes(self) -> list[str]:
        """What a person should know before the sweep starts."""
        moved = [p for p in self.space.parameters if p.name in (self.baseline() or {})]
        found = []
        for parameter in moved:
            default = self._default(parameter.name)
            if as_text(nearest := parameter.nearest(default)) != as_text(default):
                name, asked = parameter.name, as_text(default)
                found.append(f"the baseline's {name}={asked} cannot be drawn: tried at {as_text(nearest)}")
        return found

    def _default(self, name: str) -> Any:
        return (self.space.baseline or {}).get(name, self.fixed[name])

    def samples(self) -> int:
        """How many trials there are, at most."""
        if self.is_grid:
            return sum(1 for _ in self._stream())
        return DEFAULT_SAMPLES if self.tune.samples == "auto" else self.tune.samples

    def points(self) -> list[Point]:
        """The points of a random or grid search in order (of a model-based one, only those known beforehand)."""
        if self.tune.searcher == "optuna":
            baseline = self.baseline()
            return [] if baseline is None else [baseline]
        wanted = None if self.is_grid and self.tune.samples == "auto" else self.samples()
        found: list[Point] = []
        for point in self._stream():
            if wanted is not None and len(found) >= wanted:
                break
            found.append(point)
        return found

    def _stream(self) -> Iterator[Point]:
        fixed, baseline = self.fixed, self.baseline()
        if baseline is not None:
            yield baseline
        if self.is_grid:
            yield from (point for point in self.space.combinations(fixed) if point != baseline)
            return
        for index in range(10**6):
            yield self.space.draw(self.tune.seed, index, fixed)


def parse_request(words: Sequence[str]) -> Request:
    """Return the sweep that ``words`` ask for: ``space=``, ``tune.*``, run options, and distributions in their place.

    Raises:
        OptionError: every mistake at once, one sentence each.
    """
    typed = config.split(words)
    source = typed.pop("space", None)
    group = {name.removeprefix("tune."): typed.pop(name) for name in list(typed) if name.startswith("tune.")}
    tune, problems = config.parse_group(TuneOptions, group, "tune.")
    space, more = _space_of(source, typed)
    problems += more + (tune.problems() if tune is not None else [])
    plain = {name: value for name, value in typed.items() if read_inline(name, value) is None}
    if space is None:
        raise OptionError("\n".join(problems))
    method = {} if space.method is None else {"method.name": space.method}
    chosen = {**method, **{name: as_text(value) for name, value in space.fixed.items()}, **plain}
    base, wrong = _attempt(chosen)
    problems += wrong
    if base is None or tune is None:
        raise OptionError("\n".join(problems))
    request = Request(tune, space, chosen, base, source)
    if problems := [*problems, *_contradictions(request), *_range_problems(request)]:
        raise OptionError("\n".join(dict.fromkeys(problems)))
    return request


def _space_of(source: str | None, typed: Mapping[str, str]) -> tuple[Space | None, list[str]]:
    """The file's space with what the command line gives or searches instead."""
    inline = [parameter for name, value in typed.items() if (parameter := read_inline(name, value)) is not None]
    problems = [sentence for parameter in inline for sentence in parameter.problems()]
    if source is None and not inline:
        known = "space=NAME (see --list) or a distribution such as 'train.lr=grid(1e-3,1e-2)'"
        return None, [*problems, f"nothing to search: give {known}."]
    try:
        space = Space() if source is None else read_space(source)
    except OptionError as error:
        return None, [*problems, *str(error).splitlines()]
    method = typed.get("method.name")
    if space.method is not None and method not in {None, space.method}:
        problems.append(f"method={method} but space={source} searches method={space.method}: leave one out.")
        return None, problems
    given = {name: value for name, value in typed.items() if name not in {p.name for p in inline}}
    return space.without(given).joined(inline), problems


def _words(options: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


def _attempt(chosen: Mapping[str, str]) -> tuple[RunOptions | None, list[str]]:
    try:
        return config.parse_options(_words(chosen)), []
    except OptionError as error:
        return None, str(error).splitlines()


def _contradictions(request: Request) -> list[str]:
    tune, space, base = request.tune, request.space, request.base
    found = [
        f"{p.name} is not searched: it says how a run is carried out, not what comes out of it."
        for p in space.parameters
        if p.name in NOT_SEARCHED or p.name.startswith(("engine.", "tracking."))
    ]
    if not space.parameters:
        found.append("nothing is left to search: every parameter of the space is given on the command line.")
    if tune.searcher == "grid" and (loose := [p.name for p in space.parameters if p.kind in {"uniform", "loguniform"}]):
        found.append(f"tune.searcher=grid cannot list every value of {', '.join(loose)}: use random, or grid(...).")
    if tune.scheduler != "none" and base.eval.every == 0:
        found.append(f"eval.every=0 leaves tune.scheduler={tune.scheduler} nothing to judge by: use eval.every=1.")
    if tune.scheduler == "pbt" and not space.mutable:
        found.append("tune.scheduler=pbt needs parameters with `mutate: true`, and the space has none.")
    if tune.scheduler != "none" and tune.grace_of(base.rounds) >= base.rounds:
        found.append(
            f"tune.grace={tune.grace_of(base.rounds)} leaves tune.scheduler={tune.scheduler} nothing to decide in "
            f"rounds={base.rounds}: lower it, or raise rounds."
        )
    if base.data.val == 0:
        found.append("data.val=0 leaves no validation images to judge a trial by: leave it at its default.")
    spare = sorted((space.baseline or {}).keys() - {p.name for p in space.parameters} - request.words.keys())
    found += [f"baseline names {name}, which is not searched: leave it out or add it." for name in spare]
    return found


def _range_problems(request: Request) -> list[str]:
    """Try the ends of every distribution, with the conditions under which it counts fulfilled."""
    fixed = request.fixed
    known = [p for p in request.space.parameters if p.name in fixed]
    found = [config.unknown("option", p.name, fixed) for p in request.space.parameters if p.name not in fixed]
    for name in {n for p in known for n in p.when if n not in fixed}:
        found.append(config.unknown("option in `when`", name, fixed))
    if found:
        return found
    found = _attempt_point(request, request.baseline() or {})
    for parameter in known:
        for value in parameter.probes():
            found += _attempt_point(request, {**_conditions(request, parameter), parameter.name: value})
    return found


def _conditions(request: Request, parameter: Parameter) -> Point:
    by_name = {p.name: p for p in request.space.parameters}
    held: Point = {}
    for name, values in parameter.when.items():
        if name in by_name:
            held |= {**_conditions(request, by_name[name]), name: values[0]}
    return held


def _attempt_point(request: Request, point: Mapping[str, Any]) -> list[str]:
    try:
        request.options(point)
        return []
    except OptionError as error:
        return str(error).splitlines()
