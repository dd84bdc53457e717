"""Parses the command line of commands that take a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from asyncrl.errors import ConfigError

HELP_ALL = "--help-all"
_YAML = (".yaml", ".yml")


@dataclasses.dataclass(frozen=True)
class ServedModelOptions:
    """Options of the commands that can play with a model behind an endpoint."""

    served_name: Annotated[
        str | None,
        tyro.conf.arg(help="Name of the endpoint's model; default: the one that it lists.", metavar="NAME"),
    ] = None
    api_key_env: Annotated[
        str | None, tyro.conf.arg(help="Environment variable that holds the endpoint's key.", metavar="NAME")
    ] = None


def parse(
    options: type[Any], words: Sequence[str], command: str, description: str | None
) -> tuple[Any, dict[str, Any]]:
    """The command's own options, and the config fields given as flags. A word that belongs to no flag is the config
    file, or the name of a configuration that comes with asyncrl. Raises ConfigError."""
    from asyncrl.config.flags import flags_type, given_flags, option_flags, unknown_flag

    words = _with_config(words)
    prog, about = f"asyncrl {command}", (description or "").strip()
    if "--help" in words or "-h" in words:
        _short_help(options, prog, about)
    words, keys = option_flags(["--help" if word == HELP_ALL else word for word in words])
    both = dataclasses.make_dataclass(command, [], bases=(flags_type(), options), frozen=True)
    parsed: Any
    parsed, unknown = tyro.cli(
        both,
        args=words,
        prog=prog,
        description=about,
        return_unknown_args=True,
        config=(tyro.conf.HelptextFromCommentsOff,),  # searching the source for comments takes a third of the time
    )
    for word in unknown:
        if word.startswith("-"):
            raise unknown_flag(word, command)
    if len(unknown) == 1 and _names_config(unknown[0]) and parsed.config is None:  # after flags that take no value
        return dataclasses.replace(parsed, config=Path(unknown[0])), given_flags(parsed) | keys
    if unknown:
        raise _no_flag(unknown[0], command)
    return parsed, given_flags(parsed) | keys


def check_port(port: int | None) -> None:
    """Raises ConfigError for a number that is no port. None, 0: a free one."""
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}: expected 0 to 65535; 0 takes a free one.")


def _no_flag(word: str, command: str) -> ConfigError:
    from asyncrl.config.flags import unknown_flag
    from asyncrl.config.loading import fields, mapping_above
    from asyncrl.config.tree import Tree

    key, equals, value = word.partition("=")
    if equals:  # as Hydra and OmegaConf take them
        flag = f"--{key.replace('_', '-')}"
        known = any(path == key for path, _ in fields(Tree)) or mapping_above(key)
        return ConfigError(f"{word!r} is not a flag: write {flag} {value}.") if known else unknown_flag(flag, command)
    if _names_config(word):
        return ConfigError(
            f"{word!r} belongs to no flag: a configuration comes first, as in asyncrl {command} {word}, or behind "
            "--config, and only one is taken."
        )
    return ConfigError(f"{word!r} belongs to no flag: `asyncrl {command} {HELP_ALL}` lists them all.")


def _names_config(word: str) -> bool:
    from asyncrl.config import shipped

    return Path(word).suffix in _YAML or word in shipped.names()


def _with_config(words: Sequence[str]) -> list[str]:
    """`words`, with `--config` before a config file, or the name of one, that comes first."""
    first = words[0] if words else "-"
    if not first.startswith("-") and (Path(first).suffix in _YAML or "=" not in first):
        return ["--config", *words]
    return list(words)


def _short_help(options: type[Any], prog: str, about: str) -> None:
    """Prints the command's own options and the sections of the configuration, and exits."""
    from asyncrl.config import Config
    from asyncrl.config.loading import fields, section_of

    with contextlib.suppress(SystemExit):
        tyro.cli(options, args=["--help"], prog=prog, description=about)
    print("Every field of the configuration is a flag, for instance --learner.steps 100 or --env.options.score gsm8k:")
    print()
    for name, field in Config.model_fields.items():
        inner = section_of(field)
        names = [path.partition(".")[0] for path, _ in fields(inner)] if inner is not None else []
        shown = list(dict.fromkeys(names))[:_SHOWN]
        more = f", and {len(set(names)) - len(shown)} more" if len(set(names)) > len(shown) else ""
        print(f"  --{name + '.*':<12} {', '.join(shown)}{more}")
    print()
    print(f"{prog} {HELP_ALL} lists every flag with its meaning and default, as does docs/reference/configuration.md.")
    raise SystemExit(0)


_SHOWN = 6
"""Fields of a section that the short help names."""
