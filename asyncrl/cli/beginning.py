"""Commands of `asyncrl` for the time before the first run: a skeleton, a look at the machine, a few episodes."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from asyncrl.cli.parsing import ServedModelOptions, parse
from asyncrl.errors import ConfigError, RunError

Arg = tyro.conf.arg
SKELETONS = Path(__file__).parents[1] / "skeletons"


def try_(words: list[str]) -> int:
    """Plays a few training episodes without learner or buffer, and says what would go wrong in training."""

    @dataclass(frozen=True)
    class Try(ServedModelOptions):
        config: Annotated[Path | None, Arg(help="YAML file; flags override it.", metavar="FILE")] = None
        tasks: Annotated[int, Arg(help="Number of tasks: those that a run would draw first.")] = 4
        episodes: Annotated[int, Arg(help="Episodes of each task; the first is printed in full.")] = 4
        all: Annotated[bool, Arg(help="Print every conversation in full.")] = False
        url: Annotated[
            str | None,
            Arg(help="Instead of model.path: an OpenAI-compatible endpoint, with /v1.", metavar="URL"),
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


def init(words: list[str]) -> int:
    """Writes a skeleton into a folder: environment, tasks, score, configuration, a test; it trains in a minute."""

    @dataclass(frozen=True)
    class Init:
        folder: Annotated[tyro.conf.Positional[Path], Arg(help="Folder to write into; made if need be.", metavar="DIR")]
        kind: Annotated[
            Literal["tools", "single-turn", "agent"],
            Arg(
                help="tools: an environment with tools; single-turn: one answer, scored; agent: your own loop over the "
                "openai client."
            ),
        ] = "tools"

    options = tyro.cli(Init, args=words, prog="asyncrl init", description=init.__doc__)
    folder = options.folder
    files = sorted(file for file in (SKELETONS / options.kind).iterdir() if file.is_file())
    if present := [file.name for file in files if (folder / file.name).exists()]:
        raise RunError(f"{folder} already holds {', '.join(present)}: give another folder; nothing was written.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        taken = next(path for path in (folder, *folder.parents) if path.is_file())
        raise RunError(f"{taken} is a file: give another folder; nothing was written.") from None
    except OSError as error:
        raise RunError(f"{folder} cannot be made ({error.strerror}): give a folder that you may write.") from error
    for file in files:
        shutil.copyfile(file, folder / file.name)
    (test,) = (file.name for file in files if file.name.startswith("test_"))
    print(f"{folder} holds {', '.join(file.name for file in files)}. Next:")
    for line in (
        f"cd {shlex.quote(str(folder))}",
        f"python {test}",
        "asyncrl try --config train.yaml",
        "asyncrl launch --config train.yaml",
    ):
        print(f"  {line}")
    if options.kind == "agent" and importlib.util.find_spec("openai") is None:
        print("The agent needs the openai client, which is not installed here: pip install openai.")
    return 0


def doctor(words: list[str]) -> int:
    """Looks at Python, packages, GPUs, memory, disk, sockets, clock and chat template, and says what to mend."""

    @dataclass(frozen=True)
    class Doctor:
        config: Annotated[Path | None, Arg(help="YAML file; flags override it.", metavar="FILE")] = None
        debug: Annotated[bool, Arg(help="Show tracebacks of errors.")] = False

    options, flags = parse(Doctor, words, "doctor", doctor.__doc__)
    from asyncrl.config import Config
    from asyncrl.doctor.command import run

    return run(Config.load(options.config, flags))
