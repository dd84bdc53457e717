"""Commands of `asyncrl` about one run, live or over."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from asyncrl.errors import ConfigError

Arg = tyro.conf.arg


def status(words: list[str]) -> int:
    """Shows the processes of a run and, while it runs, the buffer's status."""

    @dataclass(frozen=True)
    class Status:
        run: Annotated[tyro.conf.Positional[Path], Arg(help="A run folder.", metavar="RUN")]

    options = tyro.cli(Status, args=words, prog="asyncrl status", description=status.__doc__)
    from asyncrl.launch.diagnosis.status import status as status_of
    from asyncrl.run_folder import RunFolder

    report = status_of(RunFolder.existing(options.run))
    print(json.dumps(report, indent=2, default=str))
    return 0


def why(words: list[str]) -> int:
    """Says who waits for whom in a live run, for what, since when."""

    @dataclass(frozen=True)
    class Why:
        run: Annotated[tyro.conf.Positional[Path], Arg(help="A run folder.", metavar="RUN")]

    options = tyro.cli(Why, args=words, prog="asyncrl why", description=why.__doc__)
    from asyncrl.launch.diagnosis import waits
    from asyncrl.run_folder import RunFolder

    print("\n".join(waits.why(RunFolder.existing(options.run))))
    return 0


def audit(words: list[str]) -> int:
    """Proves a run's account from independent records; `--step N` shows the batch of a training step."""

    @dataclass(frozen=True)
    class Audit:
        run: Annotated[tyro.conf.Positional[Path], Arg(help="A run folder; the run may be live.", metavar="RUN")]
        step: Annotated[int | None, Arg(help="Show the trajectories of this training step instead.", metavar="N")] = (
            None
        )
        format: Annotated[
            Literal["text", "json", "parquet"], Arg(help="parquet: one row per trajectory and use; needs pyarrow.")
        ] = "text"
        out: Annotated[
            Path | None, Arg(help="Write to this file; default: print, for parquet RUN/audit.parquet.", metavar="FILE")
        ] = None

    options = tyro.cli(Audit, args=words, prog="asyncrl audit", description=audit.__doc__)
    from asyncrl.audit.command import audit as run_audit
    from asyncrl.run_folder import RunFolder

    return run_audit(RunFolder.existing(options.run), step=options.step, format=options.format, out=options.out)


def report(words: list[str]) -> int:
    """Draws a run's report again from its metrics: report.html and plots/."""

    @dataclass(frozen=True)
    class Report:
        run: Annotated[tyro.conf.Positional[Path], Arg(help="A run folder.", metavar="RUN")]

    options = tyro.cli(Report, args=words, prog="asyncrl report", description=report.__doc__)
    from asyncrl.run_folder import RunFolder
    from asyncrl.tracking.report.chosen import chosen, notes
    from asyncrl.tracking.report.report import write_report

    run = RunFolder.existing(options.run)
    summary = json.loads(run.summary.read_text()) if run.ended else chosen(run, run.load_config())
    write_report(run, notes=notes(summary))
    print(run.report)
    return 0


def replay(words: list[str]) -> int:
    """Trains again on the recorded batches, without actors, and compares the weights bit by bit."""

    @dataclass(frozen=True)
    class Replay:
        run: Annotated[tyro.conf.Positional[Path], Arg(help="A run folder.", metavar="RUN")]
        from_step: Annotated[
            int, Arg(help="Begin at the checkpoint of this training step; 0: the initial model.", metavar="K")
        ] = 0
        to_step: Annotated[int | None, Arg(help="End after this training step; default: the last.", metavar="N")] = None

    options = tyro.cli(Replay, args=words, prog="asyncrl replay", description=replay.__doc__)
    from asyncrl.audit.replay import replay as run_replay
    from asyncrl.run_folder import RunFolder

    return run_replay(RunFolder.existing(options.run), from_step=options.from_step, to_step=options.to_step)


def trace(words: list[str]) -> int:
    """Writes a trace of a run's last steps for Perfetto: who did what when, and which episode was used where."""

    @dataclass(frozen=True)
    class Trace:
        run: Annotated[tyro.conf.Positional[Path], Arg(help="A run folder; the run may be live.", metavar="RUN")]
        steps: Annotated[int, Arg(help="Number of training steps.", metavar="N")] = 50
        to_step: Annotated[int | None, Arg(help="End with this training step; default: the last.", metavar="K")] = None
        out: Annotated[Path | None, Arg(help="File to write; default: RUN/trace.json.gz.", metavar="FILE")] = None

    options = tyro.cli(Trace, args=words, prog="asyncrl trace", description=trace.__doc__)
    if options.steps < 1:
        raise ConfigError(f"--steps is {options.steps}, expected at least 1.")
    from asyncrl.run_folder import RunFolder
    from asyncrl.trace.command import trace as write_trace

    return write_trace(RunFolder.existing(options.run), steps=options.steps, to_step=options.to_step, out=options.out)


def dashboard(words: list[str]) -> int:
    """Opens the local dashboard (trackio) of a run, or creates the workspace at wandb."""

    @dataclass(frozen=True)
    class Dashboard:
        what: Annotated[
            tyro.conf.Positional[str | None],
            Arg(help="A run folder, or `wandb`; default: the newest run.", metavar="[RUN|wandb]"),
        ] = None
        runs_dir: Annotated[Path, Arg(help="Folder of the run folders.", metavar="FOLDER")] = Path("runs")
        port: Annotated[int | None, Arg(help="Port of the local dashboard; default: the first free one.")] = None
        browser: Annotated[bool, Arg(help="Open the local dashboard in the browser.")] = True
        project: Annotated[str, Arg(help="wandb: tracking.project of the runs.")] = "asyncrl"
        entity: Annotated[str | None, Arg(help="wandb: user or team; default: the one logged in.")] = None
        save_to: Annotated[
            Path | None,
            Arg(help="wandb: write the workspace's specification to this file; send nothing.", metavar="FILE"),
        ] = None

    options = tyro.cli(Dashboard, args=words, prog="asyncrl dashboard", description=dashboard.__doc__)
    from asyncrl.tracking.report.dashboards import dashboard as show

    return show(
        options.what, runs_dir=options.runs_dir, project=options.project, entity=options.entity,
        save_to=options.save_to, port=options.port, browser=options.browser,
    )  # fmt: skip


def view(words: list[str]) -> int:
    """Shows a run's rollouts in the browser, live or over; of two runs, side by side."""

    @dataclass(frozen=True)
    class View:
        runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], Arg(help="A run folder, or two.", metavar="RUN [RUN]")]
        port: Annotated[int, Arg(help="Port of the page on 127.0.0.1; 0: a free one.")] = 0
        browser: Annotated[bool, Arg(help="Open the page in the browser.")] = True
        export: Annotated[
            Path | None, Arg(help="Write one page that needs no server to this file, and end.", metavar="FILE.html")
        ] = None

    options = tyro.cli(View, args=words, prog="asyncrl view", description=view.__doc__)
    if not 1 <= len(options.runs) <= 2:
        raise ConfigError(f"view is given {len(options.runs)} run folders: expected one or two.")
    from asyncrl.view.command import view as show

    return show(options.runs, port=options.port, browser=options.browser, export=options.export)


def actors(words: list[str]) -> int:
    """Changes the actors of a live run: `add N --run RUN`, `remove NAME ... --run RUN`."""

    @dataclass(frozen=True)
    class Actors:
        what: Annotated[tyro.conf.Positional[Literal["add", "remove"]], Arg(help="Whether actors join or leave.")]
        which: Annotated[
            tyro.conf.Positional[tuple[str, ...]],
            Arg(help="add: how many; remove: their names, e.g. actor-1.", metavar="N|NAME"),
        ]
        run: Annotated[Path, Arg(help="A run folder.", metavar="RUN")]

    options = tyro.cli(Actors, args=words, prog="asyncrl actors", description=actors.__doc__)
    from asyncrl.launch.elastic import add, remove
    from asyncrl.run_folder import RunFolder

    run = RunFolder.existing(options.run)
    if options.what == "remove":
        remove(run, options.which)
        print(f"{', '.join(options.which)} will leave")
        return 0
    if len(options.which) != 1 or not options.which[0].isdigit():
        raise ConfigError(f"actors add is {' '.join(options.which)!r}: expected how many more, a number.")
    print(f"{', '.join(add(run, int(options.which[0])))} will join")
    return 0
