"""Commands of `asyncrl` for the time before the first run: a skeleton, a look at the machine, a few episodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from asyncrl.cli.parsing import parse
from asyncrl.errors import ConfigError

Arg = tyro.conf.arg


def try_(words: list[str]) -> int:
    """Plays a few training episodes without learner or buffer, and says what would go wrong in training."""

    @dataclass(frozen=True)
    class Try:
        config: Annotated[Path | None, Arg(help="YAML file; flags override it.", metavar="FILE")] = None
        tasks: Annotated[int, Arg(help="Number of tasks: those that a run would draw first.")] = 4
        episodes: Annotated[int, Arg(help="Episodes of each task; the first is printed in full.")] = 4
        all: Annotated[bool, Arg(help="Print every conversation in full.")] = False
        url: Annotated[
            str | None,
            Arg(help="Instead of model.path: an OpenAI-compatible endpoint, with /v1.", metavar="URL"),
        ] = None
        served_name: Annotated[
            str | None, Arg(help="Name of the endpoint's model; default: the one that it lists.", metavar="NAME")
        ] = None
        api_key_env: Annotated[
            str | None, Arg(help="Environment variable that holds the endpoint's key.", metavar="NAME")
        ] = None
        debug: Annotated[bool, Arg(help="Show tracebacks of errors.")] = False

    options, flags = parse(Try, words, "try", try_.__doc__)
    for name, value in (("tasks", options.tasks), ("episodes", options.episodes)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}: expected 1 or more.")
    from asyncrl.config import Config
    from asyncrl.evaluation import Endpoint
    from asyncrl.launch import preflight
    from asyncrl.trial.command import Trial, run

    config = Config.load(options.config, flags)
    if options.url is None:
        preflight.check(config)
    else:
        preflight.check_names(config)
    endpoint = Endpoint(options.url, options.served_name, options.api_key_env, "--url") if options.url else None
    return run(config, Trial(options.tasks, options.episodes, options.all), endpoint)
