"""Every config field as a flag: `--buffer.max-staleness 2`. The field's docstring and default are its help.

A flag's value stays text or plain YAML here: `loading.load` validates it together with the file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tyro import conf
from tyro.constructors import PrimitiveConstructorSpec

from asyncrl.config import Config
from asyncrl.config.loading import fields, mapping_above, nearest, parse_yaml, section_of
from asyncrl.config.meanings import meaning
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Unset:
    """Stands for a flag that was not given; shown in the help as the default."""

    default: str


@functools.cache
def flags_type() -> type:
    """A dataclass for tyro with every config field as a flag, named by its path, documented by its docstring."""
    return _section(Config, "ConfigFlags")


def _section(model: type[BaseModel], name: str) -> type:
    members: list[Any] = []
    for member, field in model.model_fields.items():
        if (inner := section_of(field)) is not None:
            kind = _section(inner, member)
            members.append((member, kind, dataclasses.field(default_factory=kind)))
        else:
            default = field.get_default(call_default_factory=True)
            kind = _flag(field, meaning(model, member))
            members.append((member, kind, dataclasses.field(default=_Unset(_shown(default)))))
    section = dataclasses.make_dataclass(name, members, frozen=True)
    section.__doc__ = (model.__doc__ or "").strip()
    return section


def given_flags(flags: Any) -> dict[str, Any]:
    """The values that were given, by field path, in a parsed `flags_type()` or a subclass."""
    values = {path: functools.reduce(getattr, path.split("."), flags) for path, _ in fields(Config)}
    return {path: value for path, value in values.items() if not isinstance(value, _Unset)}


def option_flags(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words without flags for single keys of a mapping, and these by path.

    >>> option_flags(["--data.options.path", "train.parquet", "--learner.steps", "3", "--env.options.strict"])
    (['--learner.steps', '3'], {'data.options.path': 'train.parquet', 'env.options.strict': True})
    """
    rest: list[str] = []
    given: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        path = _key_path(flag)
        if path is None:
            rest.append(word)
            continue
        if not equals:
            value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        given[path] = _value(value, {dict})
    return rest, given


def _key_path(flag: str) -> str | None:
    """The path of a key in a mapping; options are Python names, other keys are as they were typed."""
    if not flag.startswith("--"):
        return None
    section, _, rest = flag[2:].partition(".")
    name, _, key = rest.partition(".")
    path = f"{section}.{name.replace('-', '_')}.{key}"
    if not key or mapping_above(path) is None:
        return None
    return path.replace("-", "_") if name.endswith("options") else path


def unknown_flag(flag: str, command: str = "launch") -> ConfigError:
    path = flag.lstrip("-").partition("=")[0].replace("-", "_")
    hint = nearest(path, spell=lambda p: "--" + p.replace("_", "-"))
    return ConfigError(f"{flag} is not a flag{hint}: `asyncrl {command} --help-all` lists them all.")


def _flag(field: FieldInfo, help: str) -> Any:
    """How tyro reads one field: as text, which is validated later together with the file."""
    wanted = _kinds(field.annotation)

    def parse(words: list[str]) -> Any:
        if bool in wanted and not words:
            return True
        if tuple in wanted and not (len(words) == 1 and words[0].lstrip().startswith("[")):
            return [_value(word, wanted - {tuple}) for word in words]
        if len(words) != 1:
            raise ValueError(f"takes one value, got {len(words)}")
        return _value(words[0], wanted)

    spec: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs="*" if wanted & {bool, tuple} else 1,
        metavar=_metavar(field.annotation),
        instance_from_str=parse,
        is_instance=lambda _: True,
        str_from_instance=lambda unset: [unset.default],
    )
    return Annotated[Any, spec, conf.arg(help=help)]


def _value(text: str, wanted: set[Any]) -> Any:
    """A text field takes what was typed; every other kind is written as in the file."""
    if str in wanted and tuple not in wanted and not wanted & {int, float}:
        return None if types.NoneType in wanted and text.lower() in ("none", "null") else text
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text  # validation names it, with what was expected


def _kinds(annotation: Any) -> set[Any]:
    """{int}, {str, NoneType}, {tuple, str}, {dict}: the plain types that an annotation is made of."""
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(a) for a in get_args(annotation)))
    if origin is typing.Annotated:
        return _kinds(get_args(annotation)[0])
    if origin is Literal:
        return {type(a) for a in get_args(annotation)}
    if origin is tuple:
        return {tuple}.union(*(_kinds(a) for a in get_args(annotation) if a is not Ellipsis))
    return {origin or annotation}


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    wanted = _kinds(annotation) - {types.NoneType}
    if bool in wanted:
        return "[{true,false}]"
    one = "YAML" if dict in wanted else "|".join(sorted(k.__name__ for k in wanted - {tuple})).upper()
    return f"[{one} ...]" if tuple in wanted else one


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
