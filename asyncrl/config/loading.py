"""Reads a configuration from its three sources: defaults, a YAML file over them, flags (flags.py) over both.

File and flags are merged into one mapping and validated together, strictly and once, so that an error reads the same
for every source: the field with its full path, the value, what was expected.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from asyncrl.config.other_systems import field_for, is_theirs
from asyncrl.config.shipped import located
from asyncrl.config.tree import Tree
from asyncrl.errors import ConfigError, expected
from asyncrl.redaction import masked

SEEDS = ("data.seed", "actors.seed", "learner.seed")
"""`launch.seed` sets these seeds. Given in the file, it sets the seeds that the file does not set. Given as a flag, it
sets every seed that has no flag of its own, also those in the file."""
TUNED = ("buffer.max_staleness", "actors.slots")
"""`launch.tuning: auto` sets these fields to auto, in the same way."""

REPLACED: Mapping[str, str] = {"actors.resume_episodes": "buffer.turns"}
"""Fields of earlier states of the code, and what does the same now."""

_CODE = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_][\w.]*)")
_PATH_KEY = re.compile(r"(?:.*_)?paths?|demonstrations")

C = TypeVar("C", bound=Tree)


@dataclass(frozen=True, slots=True)
class Sourced(Generic[C]):
    config: C
    sources: Mapping[str, str]
    """By field path (`buffer.capacity`): default, file or flag."""


def load(kind: type[C], file: Path | None, flags: Mapping[str, Any]) -> Sourced[C]:
    """Build a configuration of class `kind` from `file` (None: the defaults; a bare name: one that comes with asyncrl),
    then apply `flags`, which maps field paths to values. Raises ConfigError.

    The class is passed in so that this module need not import `Config`, which would be a circular import.
    """
    file = located(file) if file else None
    values = read(file) if file else {}
    in_file = set(_given(values, Tree, file))
    if file:
        values = _with_files(values, (file.parent, Path.cwd()))
    _merge(values, flags)
    try:
        config = kind.model_validate(_with_tuples(values, Tree), strict=True)
    except ValidationError as error:
        raise ConfigError(sentence(error, values, set(flags), file)) from error
    tuned = config.launch.tuning == "auto"
    sources = {path: _source(path, flags, in_file, tuned) for path, _ in fields(Tree)}
    return Sourced(config, sources)


def _merge(values: dict[str, Any], flags: Mapping[str, Any]) -> None:
    """Set each flag at its field path in `values`, or below it in a mapping (`env.options.score`); a file that it names
    is looked up in the current folder."""
    known = {path for path, _ in fields(Tree)}
    if unknown := [path for path in flags if path not in known and mapping_above(path) is None]:
        raise ConfigError(
            f"{unknown[0]} is not a field{nearest(unknown[0])}: `asyncrl launch --help-all` lists them all."
        )
    freed: tuple[str, ...] = SEEDS if flags.get("launch.seed") is not None else ()
    freed += TUNED if flags.get("launch.tuning") == "auto" else ()
    for section, _, name in (path.partition(".") for path in freed if path not in flags):
        values[section] = {k: v for k, v in (values.get(section) or {}).items() if k != name}
    # A whole mapping comes before single keys of it.
    for path, value in sorted(flags.items(), key=lambda flag: flag[0].count(".")):
        _set(values, path, value)


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    given = _with_files({sections[0]: {name: value}}, (Path.cwd(),))[sections[0]]
    place = values
    for section in sections:
        if not isinstance(inner := place.get(section) or {}, dict):
            raise ConfigError(f"--{path} sets a key of {section}, which is {inner!r}: give {section} as a mapping.")
        place[section] = dict(inner)
        place = place[section]
    place |= given


def mapping_above(path: str) -> str | None:
    """The field that holds a mapping of which `path` is a key.

    >>> mapping_above("env.options.score.name"), mapping_above("env.nam")
    ('env.options', None)
    """
    for field_path, field in fields(Tree):
        if path.startswith(f"{field_path}.") and get_origin(field.annotation) is dict:
            return field_path
    return None


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields every field that is not itself a section, with its full path."""
    for name, field in model.model_fields.items():
        if (section := section_of(field)) is not None:
            yield from fields(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def show(sourced: Sourced[C]) -> str:
    """The resolved configuration as YAML, each value with its source as a comment."""

    def lines(members: Mapping[str, Any], prefix: str, margin: str) -> Iterator[str]:
        for name, value in members.items():
            path = f"{prefix}{name}"
            if path not in sourced.sources:
                yield f"{margin}{name}:"
                yield from lines(value, f"{path}.", f"{margin}  ")
                continue
            text = yaml.safe_dump(
                {name: value}, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
            ).strip()[1:-1]
            yield f"{margin + text:<46}  # {sourced.sources[path]}"

    return "\n".join(lines(masked(sourced.config.model_dump(mode="json")), "", ""))


# --- the file ---------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Reads scalars as in YAML 1.2: `1e-6` is a number, `off` and `2026-01-01` are texts. Repeated keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", node.value[i][0].start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("float", r"^[-+]?\.(?:inf|Inf|INF|nan|NaN|NAN)$", list("-+.")),
    ("merge", r"^<<$", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def parse_yaml(text: str) -> Any:
    """Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def read(file: Path) -> dict[str, Any]:
    """The mapping in the file; `env: X` stands for `env.name: X`. Raises ConfigError for a file without a mapping."""
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--config {file}: {error.strerror}: give a YAML file, or `quickstart`, which comes with asyncrl."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {file} is not UTF-8 text: give a YAML file.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"--config {file}{where}: not valid YAML: {getattr(error, 'problem', None) or error}."
        ) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file} holds a {type(values).__name__}, expected a mapping of sections.")
    if isinstance(values.get("env"), str):
        values["env"] = {"name": values["env"]}
    return values


def _given(values: Any, model: type[BaseModel], file: Path | None, prefix: str = "") -> Iterator[str]:
    """Yields the paths of the fields that the file sets. Raises ConfigError for an unknown key."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        field = model.model_fields.get(name) if isinstance(name, str) else None
        if field is None:
            raise ConfigError(
                f"{path} in {file} is not a field{nearest(path)}: `asyncrl launch --help-all` lists them all."
            )
        section = section_of(field)
        if section is None:
            yield path
        elif isinstance(value, dict):
            yield from _given(value, section, file, f"{path}.")
        elif value is not None:
            raise ConfigError(
                f"{path} in {file} is {value!r}: expected a section with fields, as in `{path}: {{...}}`."
            )


# --- files that it names ----------------------------------------------------------------------------------------------


def _with_files(values: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """`values` with every file that they name made absolute, so that a run resumes from any folder.

    A relative path in a config file is looked up beside that file, then in the current folder; one in a flag in the
    current folder only. `model.path` may be a hub name or `quickstart`: only an explicit ./ or ../ is made absolute.
    """
    absolute: dict[str, Any] = _absolute({name: value for name, value in values.items() if name != "model"}, folders)
    model = values.get("model")
    if isinstance(model, dict) and str(model.get("path", "")).startswith("."):
        model = _absolute(model, folders)
    return absolute | ({"model": model} if "model" in values else {})


def _absolute(values: Any, folders: Sequence[Path], key: str = "") -> Any:
    """`values` with every file that is in one of `folders` made absolute.

    A file is a text `path/to/file.py:name`, anywhere, and the value (or each item) of an option called `path` or
    `paths` or ending in `_path` or `_paths`, and of `data.demonstrations`; `*` in it is a pattern. A text that names no
    file there is left as it is: it may be a hub name, and its reader reports what is missing.
    """
    if isinstance(values, dict):
        return {name: _absolute(value, folders, str(name)) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_absolute(value, folders, key) for value in values)
    if not isinstance(values, str):
        return values
    if code := _CODE.fullmatch(values):
        return f"{_located(code['file'], folders)}:{code['name']}"
    return _located(values, folders) if _PATH_KEY.fullmatch(key) else values


def _located(path: str, folders: Sequence[Path]) -> str:
    if not path:
        return path
    relative = Path(path).expanduser()
    if relative.is_absolute():
        return str(relative)
    for folder in folders:
        if (folder / relative).exists() or ("*" in path and any(folder.glob(path))):
            return str((folder / relative).resolve())
    return path


# --- the tree ---------------------------------------------------------------------------------------------------------


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _with_tuples(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """`values` with tuples where fields have them: YAML has lists only, which strict validation refuses.

    An empty section keeps its defaults.
    """
    converted: dict[str, Any] = {}
    for name, value in values.items():
        field = model.model_fields[name]
        section = section_of(field)
        converted[name] = _with_tuples(value or {}, section) if section else _tuples(value, field.annotation)
    return converted


def _tuples(value: Any, annotation: Any) -> Any:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is tuple and isinstance(value, list):
        of = inner[0] if len(inner) == 2 and inner[1] is Ellipsis else None
        return tuple(_tuples(v, of) for v in value)
    if origin is dict and isinstance(value, dict):
        return {k: _tuples(v, inner[1]) for k, v in value.items()}
    return value


def _source(path: str, flags: Mapping[str, Any], in_file: set[str], tuned: bool) -> str:
    """`tuned`: `launch.tuning` is auto."""
    if path in flags:
        return "flag"
    if any(flag.startswith(f"{path}.") for flag in flags):
        return "file and flags" if path in in_file else "flag"
    setter = "launch.seed" if path in SEEDS else "launch.tuning" if tuned and path in TUNED else None
    if setter is not None and flags.get(setter) is not None:
        return f"flag ({setter})"
    if path in in_file:
        return "file"
    if setter is not None and (given := _source(setter, flags, in_file, tuned)) != "default":
        return f"{given} ({setter})"
    return "default"


def sentence(error: ValidationError, values: Mapping[str, Any], flags: set[str], file: Path | None) -> str:
    """The first error, as one sentence. `values`: what was validated."""
    errors = error.errors(include_url=False)
    first = errors[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    path = _path_of(first["loc"], values)
    flag = next((f for f in flags if f"{path}.".startswith(f"{f}.") or f.startswith(f"{path}.")), None)
    where = f"--{flag.replace('_', '-')}" if flag else f"{path} in {file}" if file else path
    if first["type"] == "extra_forbidden":
        wanted = f"no such field{_near_member(path)}"
    else:
        wanted = expected(e["msg"] for e in errors if _path_of(e["loc"], values) == path)
    return f"{where} is {_short(first['input'])}: {wanted}."


def _path_of(loc: Sequence[int | str], values: Any) -> str:
    """The path of a value as the user gave it: without pydantic's names for the kinds that the value could have been.

    >>> _path_of(("buffer", "max_staleness", "constrained-int"), {"buffer": {"max_staleness": -1}})
    'buffer.max_staleness'
    """
    if (whole := ".".join(map(str, loc))) in SEEDS and loc[1] not in (values.get(loc[0]) or {}):
        return "launch.seed"
    found: list[str] = []
    for part in loc:
        within = isinstance(values, Mapping) and part in values
        if within or (isinstance(values, Sequence) and not isinstance(values, str) and isinstance(part, int)):
            found.append(str(part))
            values = values[part]
    return ".".join(found) or whole


def _near_member(path: str) -> str:
    """As `nearest`, also for a field of one of several sections by name (`eval.sets.NAME.tasks`)."""
    for above, field in fields(Tree):
        kinds = get_args(field.annotation)[1:] if get_origin(field.annotation) is dict else ()
        if path.startswith(f"{above}.") and kinds and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
            return f", it takes {', '.join(kinds[0].model_fields)}"
    return nearest(path)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(path: str, spell: Callable[[str], str] = str) -> str:
    """' (did you mean buffer.capacity?)', or nothing when no field resembles `path`. A key of another system is told by
    what sets the same here, a field that was replaced by its successor."""
    if path in REPLACED:
        return f" (it was replaced by {spell(REPLACED[path])})"
    if theirs := field_for(path):
        return f" (here it is {spell(theirs)}; docs/reference/other-systems.md compares the keys)"
    if is_theirs(path):
        return " (another system's key; docs/reference/other-systems.md says what sets the same here)"
    known = [p for p, _ in fields(Tree)] + list(Tree.model_fields)
    same_name = [p for p in known if p.rpartition(".")[2] == path.rpartition(".")[2]]
    close: Sequence[str] = same_name or difflib.get_close_matches(path, known, n=1, cutoff=0.5)
    return f" (did you mean {spell(close[0])}?)" if close else ""
