"""What a sweep searches: parameters with distributions, conditions between them, and the point tried first.

    method: fedsdg
    fixed: {train.batch: 16}
    parameters:
      train.lr: {loguniform: [1e-4, 1e-2], mutate: true}
      method.align: {choice: [base, floor]}
      method.floor: {uniform: [0.01, 0.5], when: {method.align: floor}}
    baseline: {}          # tried first; what it does not name has the value a run without a sweep would have

``uniform``, ``loguniform`` [low, high]; ``quniform`` [low, high, step]; ``randint`` [low, high], both ends included;
``choice`` and ``grid`` list values (a grid's are all tried). ``mutate``: may change in training (tune.scheduler=pbt).
``when``: the parameter counts only if another one, listed before it or fixed, has (one of) the value(s).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import yaml

from rayfed import config, rng
from rayfed.errors import OptionError

if TYPE_CHECKING:
    import numpy as np

Value = int | float | bool | str | None | list[Any]
Point = dict[str, Value]
LISTS = ("choice", "grid")
SIZES = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2}
INLINE = re.compile(rf"({'|'.join((*SIZES, *LISTS))})\((.*)\)", re.DOTALL)
PERTURBATION = (0.8, 1.25)
RESAMPLE = 0.25
"""Share of mutations that draw anew instead of scaling, as in population-based training (Jaderberg et al. 2017)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One searched option: its distribution (``kind``, ``values``), and when it counts."""

    name: str
    kind: str
    values: tuple[Value, ...]
    mutate: bool = False
    when: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What is wrong with the distribution, one sentence each."""
        if self.kind in LISTS:
            return [] if self.values else [f"{self.name}: {self.kind} has no values: list at least one."]
        numbers = [v for v in self.values if is_number(v)]
        if len(numbers) != SIZES[self.kind] or len(self.values) != len(numbers):
            wanted = "[low, high, step]" if self.kind == "quniform" else "[low, high]"
            return [f"{self.name}: {self.kind} needs {wanted} as numbers, not {list(self.values)}."]
        low, high, *step = numbers
        found = []
        if low >= high:
            found.append(f"{self.name}: {self.kind} from {low:g} to {high:g} is empty: put the lower first.")
        if self.kind == "loguniform" and low <= 0:
            found.append(f"{self.name}: loguniform from {low:g} has no logarithm: start above 0, or use uniform.")
        if step and not 0 < step[0] <= high - low:
            found.append(f"{self.name}: step {step[0]:g} must be above 0 and at most {high - low:g}.")
        if self.kind == "randint" and not all(float(v).is_integer() for v in numbers):
            found.append(f"{self.name}: randint needs whole numbers, not {list(self.values)}.")
        return found

    def probes(self) -> tuple[Value, ...]:
        """The values whose range is worth checking: the ends, or all."""
        return self.values if self.kind in LISTS else self.values[:2]

    def value_of(self, value: Any) -> Value:
        """The listed value that reads as ``value`` does, or the number as a person would type it."""
        if self.kind in LISTS:
            return next((v for v in self.values if as_text(v) == as_text(value)), value)
        return value if isinstance(value, int) else _rounded(value, float(self.values[0]), float(self.values[1]))  # type: ignore[arg-type]

    def nearest(self, value: Any) -> Value:
        """The value nearest to ``value`` that can be drawn; of listed ones that value itself, else the first."""
        if self.kind in LISTS:
            found = self.value_of(value)
            return found if found in self.values else self.values[0]
        low, high, *step = (float(v) for v in self.values)  # type: ignore[arg-type]
        inside = min(max(low if value is None else float(value), low), high)
        if step:
            inside = low + step[0] * round((inside - low) / step[0])
        return round(inside) if self.kind == "randint" else inside

    def draw(self, generator: np.random.Generator) -> Value:
        """Draw a value."""
        if self.kind in LISTS:
            return self.values[int(generator.integers(len(self.values)))]
        low, high, *step = (float(v) for v in self.values)  # type: ignore[arg-type]
        if self.kind == "loguniform":
            return _rounded(math.exp(generator.uniform(math.log(low), math.log(high))), low, high)
        if self.kind == "quniform":
            return _rounded(low + step[0] * int(generator.integers(int((high - low) / step[0] + 1e-9) + 1)), low, high)
        if self.kind == "randint":
            return int(generator.integers(int(low), int(high) + 1))
        return _rounded(generator.uniform(low, high), low, high)

    def mutated(self, value: Value, generator: np.random.Generator) -> Value:
        """Scale a number down or up inside its range, or draw anew; a listed value moves to a neighbour."""
        if generator.random() < RESAMPLE:
            return self.draw(generator)
        up = bool(generator.integers(2))
        if self.kind in LISTS:
            place = self.values.index(value) + (1 if up else -1)
            return self.values[min(max(place, 0), len(self.values) - 1)]
        low, high = (float(v) for v in self.values[:2])  # type: ignore[arg-type]
        scaled = min(max(float(value) * PERTURBATION[up], low), high)  # type: ignore[arg-type]
        return round(scaled) if self.kind == "randint" else _rounded(scaled, low, high)


@dataclass(frozen=True, slots=True)
class Space:
    """The parameters of a sweep, in the order of the file; ``fixed`` options of every trial."""

    method: str | None = None
    fixed: Mapping[str, Value] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()
    baseline: Mapping[str, Value] | None = None

    @property
    def is_grid(self) -> bool:
        """Whether every parameter is a grid."""
        return all(p.kind == "grid" for p in self.parameters)

    @property
    def mutable(self) -> frozenset[str]:
        """Names of the parameters that may change while training."""
        return frozenset(p.name for p in self.parameters if p.mutate)

    def active(self, drawn: Mapping[str, Value], fixed: Mapping[str, Any]) -> Point:
        """Keep what counts of ``drawn``, given its conditions; ``fixed`` holds the options that are not searched."""
        kept: Point = {}
        for parameter in self.parameters:
            held = {name: kept.get(name, fixed.get(name)) for name in parameter.when}
            holds = all(as_text(held[n]) in {as_text(v) for v in values} for n, values in parameter.when.items())
            if parameter.name in drawn and holds:
                kept[parameter.name] = drawn[parameter.name]
        return kept

    def draw(self, seed: int, index: int, fixed: Mapping[str, Any]) -> Point:
        """The point of trial ``index``: independent of how many there are; grids are gone through in turn."""
        generator = rng.numpy_generator(seed, "trial", index)
        grids = [p for p in self.parameters if p.kind == "grid"]
        turns = list(itertools.product(*(p.values for p in grids)))
        drawn = dict(zip((p.name for p in grids), turns[index % len(turns)], strict=True))
        drawn |= {p.name: p.draw(generator) for p in self.parameters if p.kind != "grid"}
        return self.active(drawn, fixed)

    def combinations(self, fixed: Mapping[str, Any]) -> Iterator[Point]:
        """Every combination of listed values, each once."""
        seen = set()
        for values in itertools.product(*(p.values for p in self.parameters)):
            point = self.active(dict(zip((p.name for p in self.parameters), values, strict=True)), fixed)
            if (key := as_text(sorted(point.items()))) not in seen:
                seen.add(key)
                yield point

    def without(self, names: Mapping[str, Any]) -> Space:
        """The space in which the options ``names`` are given and no longer searched."""
        left = tuple(p for p in self.parameters if p.name not in names)
        fixed = {name: value for name, value in self.fixed.items() if name not in names}
        baseline = None if self.baseline is None else {n: v for n, v in self.baseline.items() if n not in names}
        return replace(self, parameters=left, fixed=fixed, baseline=baseline)

    def joined(self, typed: Sequence[Parameter]) -> Space:
        """The space with distributions from the command line, which win over the file's."""
        fixed = self.without({p.name: None for p in typed})
        baseline = self.baseline if self.baseline is None else {**self.baseline}
        return replace(fixed, parameters=(*typed, *fixed.parameters), baseline=baseline)


def read_inline(name: str, text: str) -> Parameter | None:
    """``grid(1e-3, 1e-2)`` and the like as the distribution of option ``name``; None for an ordinary value."""
    match = INLINE.fullmatch(text.strip())
    if match is None:
        return None
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", match[2])]
    return Parameter(name, match[1], tuple(plain(part) for part in parts if part))


def folder() -> Path:
    """Where the spaces that come with rayfed lie: beside the package in a checkout, inside it where it is installed."""
    package = Path(__file__).parents[1]
    installed = package / "tune_spaces"
    return installed if installed.is_dir() else package.parent / "tune_spaces"


def names() -> list[str]:
    """Spaces that come with rayfed."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def read_space(name: str) -> Space:
    """Return the space of that name, or the one in the YAML file of that path.

    Raises:
        OptionError: there is none, or it is not one; every mistake in one sentence.
    """
    is_path = name.endswith((".yaml", ".yml")) or "/" in name
    path = Path(name).expanduser() if is_path else folder() / f"{name}.yaml"
    if not is_path and name not in names():
        raise OptionError(config.unknown("search space", name, names()) + " Or give the path of a YAML file.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"space={name} cannot be read ({error.strerror}): give the path of a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"space={name} is not YAML: {' '.join(str(error).split())}.") from error
    return _space(f"space={name}", content)


def _space(where: str, content: Any) -> Space:
    known = {"method", "fixed", "parameters", "baseline"}
    if not isinstance(content, dict) or not isinstance(content.get("parameters"), dict):
        raise OptionError(f"{where} is no search space: it must be a mapping with `parameters:`.")
    problems = [f"{where}: {config.unknown('key', str(key), known)}" for key in content if key not in known]
    parameters = []
    for name, spec in content["parameters"].items():
        parameter, wrong = _parameter(str(name), spec)
        problems += [f"{where}: {sentence}" for sentence in wrong]
        parameters += [parameter] if parameter is not None else []
    for key in ("fixed", "baseline"):
        if not isinstance(content.get(key) or {}, dict):
            problems.append(f"{where}: {key} must be a mapping of options to values.")
    if problems:
        raise OptionError("\n".join(problems))
    fixed = {str(k): plain(v) for k, v in (content.get("fixed") or {}).items()}
    baseline = {str(k): plain(v) for k, v in (content.get("baseline") or {}).items()}
    return Space(content.get("method"), fixed, tuple(parameters), baseline if "baseline" in content else None)


def _parameter(name: str, spec: Any) -> tuple[Parameter | None, list[str]]:
    spec = dict(spec) if isinstance(spec, dict) else {}
    mutate, when = spec.pop("mutate", False), spec.pop("when", None) or {}
    if len(spec) != 1 or next(iter(spec)) not in (*SIZES, *LISTS):
        known = ", ".join((*SIZES, *LISTS))
        return None, [f"{name} needs one distribution ({known}), such as {{loguniform: [1e-4, 1e-2]}}."]
    ((kind, values),) = spec.items()
    if not isinstance(values, list) or not isinstance(mutate, bool) or not isinstance(when, dict):
        return None, [f"{name}: {kind} needs a list, `mutate` true or false, `when` a mapping."]
    conditions = {str(n): tuple(map(plain, v if isinstance(v, list) else [v])) for n, v in when.items()}
    parameter = Parameter(name, str(kind), tuple(map(plain, values)), mutate, conditions)
    both = [f"{name} has `when` and `mutate`: what counts only sometimes cannot change while training."]
    return parameter, [*parameter.problems(), *(both if mutate and when else [])]


def plain(value: Any) -> Value:
    """A YAML value or a word of the command line as the number, switch or text it stands for."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    if not isinstance(value, str):
        return value  # type: ignore[no-any-return]
    if value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if value.lower() in {"none", "null"}:
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether ``value`` is a finite number (a switch is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_text, value))}]"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _rounded(value: float, low: float, high: float) -> float:
    """Four significant digits, as a person would type it, inside [low, high]."""
    return min(max(float(f"{value:.4g}"), low), high)
