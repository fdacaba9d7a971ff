"""From the words of a command line to typed options; every mistake is reported at once, before anything heavy loads.

Layers, weakest first: field defaults, the data set's defaults, the profile, a config file, the command line.
"""

from __future__ import annotations

import difflib
import importlib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rayfed.conf.options import GROUPS, BackboneOptions, MethodOptions, RunOptions
from rayfed.errors import BackboneError, OptionError
from rayfed.methods import METHODS

DATA_DEFAULTS: dict[str, dict[str, Any]] = {
    "shapes": {"data.proxy": 128},
    "fashion_mnist": {"data.shots": 64, "data.test_shots": 100, "data.proxy": 128},
    "digits": {"data.proxy": 64},
    "cifar10": {},
    "cifar100": {},
    "folder": {},
}
"""Data sets by name, with the option defaults that suit them."""

Values = dict[str, Any]


def parse_options(words: Sequence[str]) -> RunOptions:
    """Return the typed options that ``words`` (``key=value`` each) ask for.

    ``config=FILE`` takes a saved ``config.yaml``; the command line wins over it.

    Raises:
        OptionError: with one sentence per mistake: unknown names (with a suggestion), wrong types, values out of
            range, contradictions.
    """
    typed = split(words)
    saved = _read_file(typed.pop("config")) if "config" in typed else {}
    chosen = {**saved, **typed}
    schema = method_schema(str(chosen.get("method.name", "fedglad")))
    _known(chosen, fields(schema))
    layers = [_data_defaults(chosen), _profile(schema, chosen), _partition_file(chosen), saved, typed]
    merged: Values = {key: value for layer in layers for key, value in layer.items()}
    options = _validate(schema, merged)
    method = options.method
    if problems := [*method.problems(), *method.run_problems(options.rounds), *contradictions(options)]:
        raise OptionError("\n".join(problems))
    return options


def method_schema(name: str) -> type[MethodOptions]:
    """Return the options class of method ``name``. Raises OptionError for an unknown name."""
    schema: type[MethodOptions] = _method_module(name).Options
    return schema


def _method_module(name: str) -> types.ModuleType:
    """The module with ``Options`` and ``PROFILES`` of a method: rayfed's own, or that of ``module:Class``."""
    if ":" in name:
        return _outside_module(*name.split(":", 1))
    if name not in METHODS:
        raise OptionError(unknown("method", name, METHODS))
    return importlib.import_module(f"rayfed.conf.method.{name}")


def _outside_module(name: str, cls: str) -> types.ModuleType:
    """Import the module of a method outside the package; it must hold the class, ``Options`` and ``PROFILES``."""
    where = f"method={name}:{cls}"
    try:
        module = importlib.import_module(name)
    except (ImportError, ValueError) as error:
        raise OptionError(f"{where}: module {name!r} cannot be imported ({error}).") from error
    missing = [wanted for wanted in (cls, "Options", "PROFILES") if not hasattr(module, wanted)]
    if missing:
        raise OptionError(f"{where}: module {name!r} has no {' and no '.join(map(repr, missing))}.")
    field = module.Options.model_fields.get("name")
    if field is None or field.default != f"{name}:{cls}":
        raise OptionError(f"{where}: Options.name in {name!r} must default to '{name}:{cls}'.")
    return module


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence for an unknown ``name``, with the nearest known ones or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names[:30])}."
    return f"unknown {what} {name!r}; {hint}"


def fields(schema: type[MethodOptions]) -> dict[str, Any]:
    """Return every dotted option name with its pydantic field, in the order of the declarations."""
    found: dict[str, Any] = {}
    for name, field in RunOptions.model_fields.items():
        group = schema if name == "method" else field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            found.update({f"{name}.{leaf}": value for leaf, value in group.model_fields.items()})
        else:
            found[name] = field
    return found


def flatten(options: RunOptions) -> dict[str, Any]:
    """Return the options as ``{dotted name: plain value}``, in the order of the declarations."""
    flat: dict[str, Any] = {}
    for name, value in options.model_dump(mode="json").items():
        flat.update({f"{name}.{leaf}": v for leaf, v in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def to_yaml(options: RunOptions) -> str:
    """Return the options as the text of a ``config.yaml`` that ``config=FILE`` reads back."""
    text: str = yaml.safe_dump(options.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def split(words: Sequence[str]) -> Values:
    """Return ``{dotted name: text}`` of ``key=value`` words. Raises OptionError for other words and for doubles."""
    typed: Values = {}
    problems = []
    for word in words:
        key, equals, value = word.partition("=")
        key = f"{key}.name" if key in GROUPS else key
        if not equals or not key:
            problems.append(f"{word!r} is not an option: write name=value, for instance method=fedglad.")
        elif key in typed:
            problems.append(f"{key} is given twice ({typed[key]!r} and {value!r}): keep one.")
        else:
            typed[key] = value
    if problems:
        raise OptionError("\n".join(problems))
    return typed


def _read_file(path: str) -> Values:
    file = Path(path).expanduser()
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"config={path} cannot be read ({error.strerror}): give the path of a config.yaml."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"config={path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise OptionError(f"config={path} holds no options: it must be a mapping such as 'rounds: 5'.")
    flat: Values = {}
    for name, value in content.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{leaf}": v for leaf, v in value.items()})
        else:
            flat[f"{name}.name" if name in GROUPS else str(name)] = value
    return flat


def _known(chosen: Values, known: Mapping[str, Any]) -> None:
    groups = {name.partition(".")[0] for name in known if "." in name}
    problems = []
    for key in chosen:
        if key in groups:
            members = ", ".join(n for n in known if n.startswith(f"{key}."))
            problems.append(f"{key} is a group and takes no value itself; its options: {members}.")
        elif key not in known:
            method = chosen.get("method.name", "fedglad")
            scope = f"option of method={method}" if key.startswith("method.") else "option"
            names = [n.removesuffix(".name") for n in known]
            problems.append(unknown(scope, key, names))
    if problems:
        raise OptionError("\n".join(problems))


def _data_defaults(chosen: Values) -> Values:
    name = str(chosen.get("data.name", "shapes"))
    if name not in DATA_DEFAULTS:
        raise OptionError(unknown("data set", name, DATA_DEFAULTS))
    return DATA_DEFAULTS[name]


def _partition_file(chosen: Values) -> Values:
    """A partition file says how many clients there are; reading it reports what is wrong with it."""
    path = chosen.get("partition.file")
    if chosen.get("partition.name") != "file" or path is None or "clients.n" in chosen:
        return {}
    try:
        return {"clients.n": len(json.loads(Path(str(path)).expanduser().read_text(encoding="utf-8"))["clients"])}
    except OSError as error:
        raise OptionError(
            f"partition.file={path} cannot be read ({error.strerror}): give the path of a JSON file."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"partition.file={path} is not a partition: it must be JSON of the form "
            '{"clients": [{"train": [0, 5]}]}.'
        ) from error


def _profile(schema: type[MethodOptions], chosen: Values) -> Values:
    name = schema.model_fields["name"].default
    profiles: dict[str, Values] = _method_module(name).PROFILES
    asked = str(chosen.get("profile", "auto"))
    if asked == "auto":
        return profiles.get("embedded" if chosen.get("backbone.name", "tiny") == "tiny" else "paper", {})
    if asked not in profiles:
        raise OptionError(f"method={name} has no profile {asked!r}: choose {' or '.join(sorted(profiles))}.")
    return profiles[asked]


def _validate(schema: type[MethodOptions], merged: Values) -> RunOptions:
    annotations = fields(schema)
    nested: Values = {}
    for key, value in merged.items():
        group, dot, leaf = key.partition(".")
        plain = _from_text(value, annotations[key].annotation)
        if dot:
            nested.setdefault(group, {})[leaf] = plain
        else:
            nested[key] = plain
    method, problems = _construct(
        schema, {"name": schema.model_fields["name"].default, **nested.pop("method", {})}, "method."
    )
    options, more = _construct(RunOptions, {**nested, "method": method or MethodOptions(name="")}, "")
    if options is None or problems:
        raise OptionError("\n".join([*problems, *more]))
    assert isinstance(options, RunOptions)
    return options


def parse_group(model: type[BaseModel], typed: Values, prefix: str) -> tuple[Any, list[str]]:
    """Return the group ``model`` of the ``{field: text}`` in ``typed`` (None if it cannot be), and its mistakes."""
    known = [f"{prefix}{name}" for name in model.model_fields]
    wrong = [unknown("option", prefix + name, known) for name in typed if name not in model.model_fields]
    given = {n: v for n, v in typed.items() if n in model.model_fields}
    plain = {name: _from_text(value, model.model_fields[name].annotation) for name, value in given.items()}
    group, problems = _construct(model, plain, prefix)
    return group, [*wrong, *problems]


def _construct(model: type[BaseModel], values: Values, prefix: str) -> tuple[Any, list[str]]:
    try:
        return model(**values), []
    except ValidationError as error:
        return None, _sentences(error, prefix)


def _from_text(value: Any, annotation: Any) -> Any:
    """Read a word of the command line by the field's type: only lists are split, only optional fields know none."""
    if not isinstance(value, str):
        return value
    union = typing.get_origin(annotation) in {types.UnionType, typing.Union}
    choices = typing.get_args(annotation) if union else (annotation,)
    if type(None) in choices and value.lower() in {"none", "null", ""}:
        return None
    if any(typing.get_origin(choice) is tuple for choice in choices):
        inner = value.strip()
        inner = inner[1:-1] if inner.startswith("[") and inner.endswith("]") else inner
        return tuple(part.strip() for part in inner.split(",") if part.strip())
    return value


WHY_NOT = {
    "engine.precision=fp16": "half precision ends at 65,504 and needs scaled gradients, at the cost of steps",
}
"""Why a value is refused that users of other programs expect."""


def _sentences(error: ValidationError, prefix: str) -> list[str]:
    by_option: dict[str, list[str]] = {}
    values: Values = {}
    for item in error.errors():
        where = [str(part) for part in item["loc"] if isinstance(part, int) or "[" not in str(part)]
        name = prefix + ".".join(
            [p for p in where if p not in {"int", "float", "str", "literal"} and not p.startswith("constrained")][:2]
        )
        message = item["msg"][0].lower() + item["msg"][1:]
        if message not in by_option.setdefault(name, []):
            by_option[name].append(message.removeprefix("input should be "))
        values[name] = item["input"]
    sentences = []
    for name, rules in by_option.items():
        shown = json.dumps(values[name], ensure_ascii=False, default=str)
        said = f"{name.removesuffix('.name')}={shown.strip(chr(34))}"
        reason = f" ({WHY_NOT[said]})" if said in WHY_NOT else ""
        sentences.append(f"{said}: must be {' or '.join(rules)}{reason}.")
    return sentences


def contradictions(options: RunOptions) -> list[str]:
    """Return one sentence per pair of options that cannot hold together (all that needs no torch, Ray or data)."""
    from rayfed.backbones import names

    found = [*_client_problems(options), *_data_problems(options)]
    backbone = options.backbone.name
    if names.kind(backbone) is None:
        every = [name for group in names.known_names().values() for name in group]
        return [*found, unknown("backbone", backbone, every)]
    try:
        has_text = names.has_text(backbone)
    except BackboneError as error:
        return [*found, str(error)]
    found += _weights_problems(options.backbone, names.kind(backbone))
    if options.task.split == "base_novel":
        found += options.method.novel_problems()
    if not has_text:
        found += _text_problems(options)
    width = names.width(backbone)
    for name, rank in options.method.ranks().items():
        if width is not None and rank > width:
            found.append(
                f"method.{name}={rank} is above the width {width} of backbone={backbone}: use at most {width}."
            )
    return found


def _weights_problems(backbone: BackboneOptions, kind: str | None) -> list[str]:
    found = []
    if kind == "tiny" and backbone.pretrained not in {"auto", "none"}:
        found.append(f"backbone=tiny has no pretrained tag {backbone.pretrained!r}: leave backbone.pretrained out.")
    if backbone.pretrained != "auto" and backbone.checkpoint:
        found.append("backbone.pretrained and backbone.checkpoint both name weights: keep one.")
    if kind in {"clip", "vit"} and backbone.pretrained == "auto" and backbone.checkpoint is None:
        found.append(
            f"backbone={backbone.name} needs weights: set backbone.pretrained to a tag, backbone.checkpoint to a local "
            "file, or backbone.pretrained=none for random ones."
        )
    return found


def _text_problems(options: RunOptions) -> list[str]:
    """What needs class texts, for a backbone that has no text tower."""
    lacks, found = f"backbone={options.backbone.name} has no text tower", []
    remedy = "use a CLIP backbone (such as tiny or ViT-B-16)"
    if options.method.needs_text:
        found.append(
            f"method={options.method.name} classifies by class texts but {lacks}: {remedy}, or method=fedlora or local."
        )
    if options.task.split == "base_novel":
        found.append(f"task.split=base_novel names novel classes by text but {lacks}: {remedy}, or task.split=all.")
    towers = getattr(options.method, "towers", "vision")
    if towers != "vision":
        found.append(f"method.towers={towers} but {lacks}.")
    return found


def _client_problems(options: RunOptions) -> list[str]:
    clients, found = options.clients, []
    if options.cohort_size > clients.n:
        found.append(
            f"clients.per_round={clients.per_round} is above clients.n={clients.n}: lower it or raise clients.n."
        )
    if clients.over_select > 0 and options.engine.pool == "local":
        found.append("clients.over_select needs clients that work side by side: use engine.pool=ray, or leave it out.")
    if clients.min_updates > options.cohort_size:
        found.append(
            f"clients.min_updates={clients.min_updates} can never be met by "
            f"{options.cohort_size} clients a round: lower it."
        )
    for name, share in (("clients.gpu", clients.gpu), ("server.gpu", options.server.gpu)):
        if share > 1 and share != int(share):
            found.append(
                f"{name}={share} is refused by Ray: above 1 it must be whole; use {int(share)} or {int(share) + 1}."
            )
    if options.tracking.register_as is not None and options.tracking.model == "none":
        found.append(
            f"tracking.register_as={options.tracking.register_as} but tracking.model=none logs no model: "
            "set tracking.model=global."
        )
    if options.tracking.uri is not None and (problem := tracking_uri_problem(options.tracking.uri)):
        found.append(problem)
    return found


def _data_problems(options: RunOptions) -> list[str]:
    data, partition, found = options.data, options.partition, []
    if data.template.count("{}") != 1:
        found.append(f"data.template={data.template!r} must contain {{}} once, where the class name goes.")
    if data.name in {"cifar10", "cifar100", "folder"} and data.root is None:
        found.append(f"data={data.name} needs data.root, the folder that holds the files.")
    if partition.name == "file" and partition.file is None:
        found.append("partition=file needs partition.file, a JSON file with the indices of every client.")
    if partition.name != "file" and partition.file is not None:
        found.append(f"partition.file is not used by partition={partition.name}: leave it out or set partition=file.")
    if partition.name == "file" and partition.long_tail is not None:
        found.append("partition.long_tail is not used by partition=file: the file says who has which images.")
    if options.method.uses_proxy() and data.proxy == 0:
        found.append(
            f"method={options.method.name} distils on proxy images but data.proxy=0: "
            "set data.proxy=128 or method.distill=none."
        )
    if data.proxy_from is not None and data.proxy_from.partition(":")[0] not in DATA_DEFAULTS:
        found.append(unknown("data set in data.proxy_from", data.proxy_from, DATA_DEFAULTS))
    return found


def tracking_uri_problem(uri: str) -> str | None:
    """Return why MLflow would refuse or misuse ``uri``, or None."""
    scheme, divided, rest = uri.partition("://")
    if (divided and scheme in {"http", "https"}) or scheme.startswith(("postgresql", "mysql", "mssql")):
        return None if rest.strip("/") else f"tracking.uri={uri} names no host: write {scheme}://host:port."
    if uri.startswith("sqlite:///") and rest.strip("/"):
        return None
    folder = uri.removeprefix("file://").removeprefix("sqlite:").rstrip("/") or "/path/to"
    return (
        f"tracking.uri={uri} is a plain folder or unknown store, which MLflow no longer takes: "
        f"use a database file, tracking.uri=sqlite:///{folder}/mlflow.db, or http://host:port."
    )
