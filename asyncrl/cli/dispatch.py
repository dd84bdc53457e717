"""The `asyncrl` command. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from asyncrl.cli.parts import envs, rewards, sandbox
from asyncrl.cli.runs import audit, replay, status, why
from asyncrl.errors import AsyncRLError, ConfigError

Arg = tyro.conf.arg


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends the process: 0 done, 1 the run failed, 2 the configuration or the command line is wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        from asyncrl import __version__

        print(__version__)
        sys.exit(0)
    # As for `python -m`: the user's own modules are found from the folder where the command is given.
    sys.path.insert(0, os.getcwd())
    try:
        if words[0] not in COMMANDS:
            raise ConfigError(f"{words[0]!r} is no command: expected one of {', '.join(COMMANDS)}.")
        code = COMMANDS[words[0]]([word for word in words[1:] if word != "--debug"])
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:  # whoever reads, `head` perhaps, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except (AsyncRLError, OSError, KeyboardInterrupt) as error:
        if "--debug" in words:
            traceback.print_exc()
        code, sentence = _ending(error)
        print(f"asyncrl: {sentence}", file=sys.stderr)
        sys.exit(code)


def _ending(error: AsyncRLError | OSError | KeyboardInterrupt) -> tuple[int, str]:
    """Exit code and sentence."""
    if isinstance(error, AsyncRLError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped by the user."
    remedy = " Free some space, or choose another launch.runs_dir." if error.errno == errno.ENOSPC else ""
    return 1, f"{error.filename or 'system'}: {error.strerror or error}.{remedy}"


def launch(words: list[str]) -> int:
    """Trains: starts actors, buffer and learner, and watches them until the run ends."""
    from asyncrl.config import Config
    from asyncrl.config.loading import load, show
    from asyncrl.run_folder import RunFolder

    @dataclass(frozen=True)
    class Launch:
        config: Annotated[Path | None, Arg(help="YAML file; flags come on top of it.", metavar="FILE")] = None
        resume: Annotated[
            Path | None, Arg(help="Go on with this run folder, from its last checkpoint.", metavar="RUN")
        ] = None
        fork: Annotated[
            Path | None, Arg(help="A new run from a checkpoint of this one; flags come on its config.", metavar="RUN")
        ] = None
        at_step: Annotated[
            int | None, Arg(help="With --resume --fresh or --fork: at the checkpoint of this step.", metavar="K")
        ] = None
        fresh: Annotated[
            bool, Arg(help="With --resume: do not redo what was recorded after the checkpoint; a new branch begins.")
        ] = False
        dry_run: Annotated[
            bool, Arg(help="Check the names, print the configuration and where each value comes from.")
        ] = False
        print_: Annotated[
            Literal["slurm", "k8s"] | None,
            Arg(name="print", help="Print a job script or manifests that run this on a cluster; start nothing."),
        ] = None
        debug: Annotated[bool, Arg(help="Show tracebacks of errors.")] = False

    options, given = _parse(Launch, words, "launch")
    _check_origin(options)
    before = options.resume or options.fork
    run = RunFolder.existing(before) if before else None
    if options.fork is not None:
        given = {"launch.name": None} | given  # the old run's is taken
    sourced = load(Config, run.config if run else options.config, given)
    from asyncrl.launch import start
    from asyncrl.tracking import sinks

    if run is not None and options.resume is not None:
        start.check_resume(run, sourced.config)
    start.check(sourced.config)
    sinks.check(sourced.config.tracking.sinks)
    if options.dry_run:
        from asyncrl.learner.build import builder_of, objective_of  # torch: seconds, which a launch has not

        builder_of(sourced.config), objective_of(sourced.config)
        print(show(sourced))
        return 0
    if options.print_:
        from asyncrl.launch.manifests import PRINTERS

        name = sourced.config.launch.name or (options.config.stem if options.config else "run")
        print(PRINTERS[options.print_](sourced.config, name))
        return 0
    # Opened once here: what is wrong with the data is said before anything starts, and to somebody who looks.
    from asyncrl.buffer.tasks.sources import open_curriculum, open_source
    from asyncrl.data.added_tasks import open_on_step_end
    from asyncrl.rewards.group_score import open_group_score

    source = open_source(sourced.config)
    open_curriculum(sourced.config, source)
    open_on_step_end(sourced.config)
    open_group_score(sourced.config)
    from asyncrl.tracking.terminal.live import Screen

    if (tasks := sourced.config.eval.tasks) and not source.held_out_size:
        print(
            f"warning: eval.tasks is {tasks}, and data.source {sourced.config.data.source} holds no task out: nothing "
            "is evaluated. data.options.held_out_size holds some out, eval.tasks 0 says that none is meant."
        )
    fresh = None
    if run is None:
        run = start.new_run(sourced.config, options.config.stem if options.config else "run")
    elif options.fork is not None:
        run = start.fork_run(run, sourced.config, options.at_step)
    elif options.fresh:
        fresh = start.checkpoint_at(run, options.at_step)
    outcome = start.play(
        run, sourced.config, Screen(), resume=before is not None, again=options.resume is not None, fresh=fresh
    )
    if outcome.exit_code:
        print(f"asyncrl: {outcome.why}", file=sys.stderr)
    return outcome.exit_code


def evaluate(words: list[str]) -> int:
    """Plays the held-out tasks with a checkpoint or a served model: success and reward with intervals, pass@k."""
    from asyncrl.config import Config

    @dataclass(frozen=True)
    class Eval:
        checkpoint: Annotated[
            Path | None, Arg(help="A checkpoint of a run, or a Hugging Face folder.", metavar="FOLDER")
        ] = None
        endpoint: Annotated[
            str | None, Arg(help="Instead: an OpenAI-compatible endpoint, up to and with /v1.", metavar="URL")
        ] = None
        served_name: Annotated[
            str | None, Arg(help="Of the model there; default: the one that it lists.", metavar="NAME")
        ] = None
        api_key_env: Annotated[
            str | None, Arg(help="Environment variable that holds the endpoint's key.", metavar="NAME")
        ] = None
        out: Annotated[Path | None, Arg(help="Write the figures here as JSON, too.", metavar="FILE")] = None
        config: Annotated[Path | None, Arg(help="YAML file; flags come on top of it.", metavar="FILE")] = None
        debug: Annotated[bool, Arg(help="Show tracebacks of errors.")] = False

    options, given = _parse(Eval, words, "eval")
    config = Config.load(options.config, given)
    from asyncrl.evaluation import Endpoint, with_model
    from asyncrl.evaluation import evaluate as play
    from asyncrl.launch import preflight, start

    if (options.checkpoint is None) == (options.endpoint is None):
        raise ConfigError("eval takes --checkpoint FOLDER or --endpoint URL, one of them.")
    if options.checkpoint is not None:
        start.check(with_model(config, options.checkpoint))
        return play(config, options.checkpoint, options.out)
    preflight.check_names(config)
    return play(config, Endpoint(options.endpoint, options.served_name, options.api_key_env), options.out)


def dashboard(words: list[str]) -> int:
    """Opens the local dashboard (trackio) of a run, or makes the workspace at wandb."""

    @dataclass(frozen=True)
    class Dashboard:
        what: Annotated[
            tyro.conf.Positional[str | None],
            Arg(help="A run folder, or `wandb`; default: the newest run.", metavar="[RUN|wandb]"),
        ] = None
        runs_dir: Annotated[Path, Arg(help="Folder of the run folders.", metavar="FOLDER")] = Path("runs")
        port: Annotated[int | None, Arg(help="Of the local dashboard; default: the first free one.")] = None
        browser: Annotated[bool, Arg(help="Open the local dashboard in the browser.")] = True
        project: Annotated[str, Arg(help="wandb: tracking.project of the runs.")] = "asyncrl"
        entity: Annotated[str | None, Arg(help="wandb: user or team; default: the one that is logged in.")] = None
        save_to: Annotated[
            Path | None, Arg(help="wandb: write the workspace's specification here; send nothing.", metavar="FILE")
        ] = None

    options = tyro.cli(Dashboard, args=words, prog="asyncrl dashboard", description=dashboard.__doc__)
    from asyncrl.tracking.report.dashboards import dashboard as show

    return show(
        options.what, runs_dir=options.runs_dir, project=options.project, entity=options.entity,
        save_to=options.save_to, port=options.port, browser=options.browser,
    )  # fmt: skip


def chaos(words: list[str]) -> int:
    """Runs a job twice, undisturbed and under seeded faults, and checks that nothing but time was lost."""
    from asyncrl.config import Config

    @dataclass(frozen=True)
    class Chaos:
        config: Annotated[Path | None, Arg(help="YAML file; flags come on top of it.", metavar="FILE")] = None
        kill: Annotated[
            str,
            Arg(
                help="What befalls the run: kills of actor, learner, buffer, weights; stop: any of them halted for a "
                "while; env, node, net, disk-full, disk-slow, clock. docs/operations.md."
            ),
        ] = "actor,learner,buffer,stop"
        every: Annotated[float, Arg(help="Seconds between two faults.", metavar="SECONDS")] = 20.0
        for_: Annotated[
            float, Arg(name="for", help="Seconds of faults, from the first training step on.", metavar="SECONDS")
        ] = 600.0
        seed: Annotated[int, Arg(help="Of the faults: the same seed, the same faults.")] = 0
        within: Annotated[
            float, Arg(help="Seconds that the run may take after its last fault, or undisturbed.", metavar="SECONDS")
        ] = 3600.0
        undisturbed: Annotated[
            Path | None, Arg(help="Compare with this finished run instead of making one.", metavar="RUN")
        ] = None
        compare: Annotated[bool, Arg(help="Compare the final success with an undisturbed run's.")] = True
        debug: Annotated[bool, Arg(help="Show tracebacks of errors.")] = False

    options, given = _parse(Chaos, words, "chaos")
    config = Config.load(options.config, given)
    from asyncrl.launch import start

    start.check(config)
    from asyncrl.chaos.command import chaos as run

    return run(
        config, kill=options.kill.split(","), every_s=options.every, for_s=options.for_, seed=options.seed,
        within_s=options.within, undisturbed=options.undisturbed, compare=options.compare,
    )  # fmt: skip


def actors(words: list[str]) -> int:
    """`add N --run RUN`: more actors for a live run. `remove NAME ... --run RUN`: these leave it."""

    @dataclass(frozen=True)
    class Actors:
        what: Annotated[tyro.conf.Positional[Literal["add", "remove"]], Arg(help="What to do.")]
        which: Annotated[
            tyro.conf.Positional[tuple[str, ...]],
            Arg(help="add: how many. remove: names, as actor-1.", metavar="N|NAME"),
        ]
        run: Annotated[Path, Arg(help="A run folder.", metavar="RUN")]

    options = tyro.cli(Actors, args=words, prog="asyncrl actors", description=actors.__doc__)
    from asyncrl.launch.elastic import add, remove
    from asyncrl.run_folder import RunFolder

    run = RunFolder.existing(options.run)
    if options.what == "remove":
        remove(run, options.which)
        print(f"{', '.join(options.which)}: to leave")
        return 0
    if len(options.which) != 1 or not options.which[0].isdigit():
        raise ConfigError(f"actors add is {' '.join(options.which)!r}: expected how many more, a number.")
    print(f"{', '.join(add(run, int(options.which[0])))}: to join")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "launch": launch,
    "eval": evaluate,
    "dashboard": dashboard,
    "status": status,
    "why": why,
    "chaos": chaos,
    "audit": audit,
    "replay": replay,
    "actors": actors,
    "envs": envs,
    "rewards": rewards,
    "sandbox": sandbox,
}


def _parse(options: type[Any], words: list[str], command: str) -> tuple[Any, dict[str, Any]]:
    """The command's own options, and the config fields that were given as flags. Raises ConfigError."""
    from asyncrl.config.flags import flags_type, given_flags, unknown_flag

    both = dataclasses.make_dataclass(command, [], bases=(flags_type(), options), frozen=True)
    description = (COMMANDS[command].__doc__ or "").strip()
    parsed: Any
    parsed, unknown = tyro.cli(
        both, args=words, prog=f"asyncrl {command}", description=description, return_unknown_args=True
    )
    for word in unknown:
        if word.startswith("-"):
            raise unknown_flag(word, command)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} belongs to no flag: `asyncrl {command} --help` lists them all.")
    return parsed, given_flags(parsed)


def _check_origin(options: Any) -> None:
    """Raises ConfigError for options of `launch` that do not go together."""
    if options.resume is not None and options.fork is not None:
        raise ConfigError("--resume and --fork cannot go together: go on with the run, or begin a new one from it.")
    if options.config is not None and (options.resume or options.fork):
        raise ConfigError(
            "--config cannot go with --resume or --fork: a run goes on with the config in its folder. Flags change it."
        )
    if options.fresh and options.resume is None:
        raise ConfigError("--fresh goes with --resume RUN: it begins a new branch of that run's history.")
    if options.at_step is not None and not (options.fresh or options.fork):
        raise ConfigError(
            "--at-step goes with --resume RUN --fresh, or with --fork RUN: what came after that step is not redone."
        )


def _usage() -> str:
    lines = [f"  {name:<10} {(run.__doc__ or '').strip().splitlines()[0]}" for name, run in COMMANDS.items()]
    return "\n".join(
        ["usage: asyncrl COMMAND [--help]", "", "Asynchronous reinforcement learning for language-model agents.", "",
         *lines]
    )  # fmt: skip
