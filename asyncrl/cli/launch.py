"""Commands of `asyncrl` that take a configuration: they train, evaluate, or test a run under faults."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from asyncrl.cli.parsing import ServedModelOptions, parse
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.launch.backends.preloaded import Preloaded

Arg = tyro.conf.arg


def launch(words: list[str]) -> int:
    """Trains: starts actors, buffer and learner, and watches them until the run ends."""
    from asyncrl.launch.backends.preloaded import early

    with early(words) as preloaded:
        return _launch(words, preloaded)


def _launch(words: list[str], preloaded: Preloaded | None) -> int:
    @dataclass(frozen=True)
    class Launch:
        config: Annotated[Path | None, Arg(help="YAML file; flags override it.", metavar="FILE")] = None
        resume: Annotated[
            Path | None, Arg(help="Continue the run in this folder, from its last checkpoint.", metavar="RUN")
        ] = None
        fork: Annotated[
            Path | None,
            Arg(help="Begin a new run from a checkpoint of this one; flags override its config.", metavar="RUN"),
        ] = None
        at_step: Annotated[
            int | None,
            Arg(help="With --resume --fresh or --fork: begin at the checkpoint of this step.", metavar="K"),
        ] = None
        fresh: Annotated[
            bool,
            Arg(help="With --resume: do not redo the batches recorded after the checkpoint; begin a new branch."),
        ] = False
        dry_run: Annotated[
            bool, Arg(help="Check everything, print the configuration and the source of each value; start nothing.")
        ] = False
        memory: Annotated[
            bool, Arg(help="With --dry-run: compute the memory of every process on its GPU, and whether it fits.")
        ] = False
        gpu: Annotated[
            str | None,
            Arg(
                help="With --memory: the card to compare with, such as h100-80gb or 48gb, and how many: 8xh100-80gb.",
                metavar="CARD",
            ),
        ] = None
        print_: Annotated[
            Literal["slurm", "k8s"] | None,
            Arg(name="print", help="Print a job script or manifests that run this on a cluster; start nothing."),
        ] = None
        debug: Annotated[bool, Arg(help="Show tracebacks of errors.")] = False

    options, flags = parse(Launch, words, "launch", launch.__doc__)
    from asyncrl.launch import api
    from asyncrl.launch.origins import Origin
    from asyncrl.process import lifeline

    lifeline.bind_to_launcher()
    if options.memory and not options.dry_run:
        raise ConfigError("--memory goes with --dry-run; a launch checks the memory by itself (launch.memory_check).")
    origin = Origin(options.resume, options.fork, options.fresh, options.at_step)
    if not flags and options.config is None and options.resume is None and options.fork is None:
        raise ConfigError(
            "launch needs a configuration: asyncrl launch FILE.yaml, or flags. The quickstart, a first run on a "
            "CPU in minutes, comes with asyncrl: asyncrl launch quickstart."
        )
    sourced = origin.load(options.config, flags)
    stem = options.config.stem if options.config else "run"
    if options.dry_run:
        prepared = api.prepare(sourced.config, origin, stem=stem, checks="all")
        from asyncrl.config.loading import show
        from asyncrl.launch.placement.report import planned

        for warning in prepared.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(show(sourced))
        print(*(f"# {line}" for line in planned(sourced.config, memory=options.memory, gpu=options.gpu)), sep="\n")
        return 0
    if options.print_:
        api.prepare(sourced.config, origin, stem=stem, checks="names")
        from asyncrl.launch.placement.manifests import PRINTERS

        print(PRINTERS[options.print_](sourced.config, sourced.config.launch.name or stem))
        return 0
    outcome = api.check_and_launch(sourced.config, origin, stem=stem, started=preloaded)
    if outcome.exit_code:
        print(f"asyncrl: {outcome.why}", file=sys.stderr)
    return outcome.exit_code


def evaluate(words: list[str]) -> int:
    """Plays the held-out tasks with a checkpoint or a served model: success and reward with intervals, pass@k."""

    @dataclass(frozen=True)
    class Eval(ServedModelOptions):
        checkpoint: Annotated[
            Path | None, Arg(help="A checkpoint of a run, or a Hugging Face folder.", metavar="FOLDER")
        ] = None
        endpoint: Annotated[
            str | None,
            Arg(help="Instead of a checkpoint: the URL of an OpenAI-compatible endpoint, with /v1.", metavar="URL"),
        ] = None
        set: Annotated[
            str | None, Arg(help="Play this held-out set only; default: all of the configuration.", metavar="NAME")
        ] = None
        out: Annotated[Path | None, Arg(help="Also write the figures to this file, as JSON.", metavar="FILE")] = None
        config: Annotated[Path | None, Arg(help="YAML file; flags override it.", metavar="FILE")] = None
        debug: Annotated[bool, Arg(help="Show tracebacks of errors.")] = False

    options, flags = parse(Eval, words, "eval", evaluate.__doc__)
    from asyncrl.config import Config
    from asyncrl.evaluation import Endpoint, with_model
    from asyncrl.evaluation import evaluate as play
    from asyncrl.launch import preflight

    config = Config.load(options.config, flags)
    if (options.checkpoint is None) == (options.endpoint is None):
        raise ConfigError("eval takes either --checkpoint FOLDER or --endpoint URL.")
    if options.checkpoint is not None:
        preflight.check(with_model(config, options.checkpoint))
        return play(config, options.checkpoint, options.out, options.set)
    preflight.check_names(config)
    endpoint = Endpoint(options.endpoint, options.served_name, options.api_key_env)
    return play(config, endpoint, options.out, options.set)


def chaos(words: list[str]) -> int:
    """Runs a job twice, undisturbed and under seeded faults, and checks that nothing but time was lost."""

    @dataclass(frozen=True)
    class Chaos:
        config: Annotated[Path | None, Arg(help="YAML file; flags override it.", metavar="FILE")] = None
        kill: Annotated[
            str,
            Arg(
                help="Kinds of faults: actor, learner, buffer, weights kill such a process; stop halts one of them for "
                "a while; env, node, net, disk-full, disk-slow, clock: see docs/how-to/operations.md."
            ),
        ] = "actor,learner,buffer,stop"
        every: Annotated[float, Arg(help="Seconds between two faults.", metavar="SECONDS")] = 20.0
        for_: Annotated[
            float, Arg(name="for", help="Seconds of faults, from the first training step on.", metavar="SECONDS")
        ] = 600.0
        seed: Annotated[int, Arg(help="Seed of the faults: the same seed gives the same faults.")] = 0
        within: Annotated[
            float,
            Arg(help="Seconds that the run may take after its last fault, or undisturbed.", metavar="SECONDS"),
        ] = 3600.0
        undisturbed: Annotated[
            Path | None, Arg(help="Compare with this finished run instead of making one.", metavar="RUN")
        ] = None
        compare: Annotated[bool, Arg(help="Compare the final success with that of an undisturbed run.")] = True
        debug: Annotated[bool, Arg(help="Show tracebacks of errors.")] = False

    options, flags = parse(Chaos, words, "chaos", chaos.__doc__)
    from asyncrl.config import Config
    from asyncrl.launch import preflight

    config = Config.load(options.config, flags)
    preflight.check(config)
    from asyncrl.chaos.command import chaos as run

    return run(
        config, kill=options.kill.split(","), every_s=options.every, for_s=options.for_, seed=options.seed,
        within_s=options.within, undisturbed=options.undisturbed, compare=options.compare,
    )  # fmt: skip
