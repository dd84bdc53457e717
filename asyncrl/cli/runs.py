"""Commands of `asyncrl` that look at a run folder: of a run that goes on, or of one that is over."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

Arg = tyro.conf.arg


def status(words: list[str]) -> int:
    """What a run is doing: its processes, and, while it runs, the buffer's account."""

    @dataclass(frozen=True)
    class Status:
        run: Annotated[tyro.conf.Positional[Path], Arg(help="A run folder.", metavar="RUN")]

    options = tyro.cli(Status, args=words, prog="asyncrl status", description=status.__doc__)
    from asyncrl.launch.preflight import living
    from asyncrl.run_folder import RunFolder

    run = RunFolder.existing(options.run)
    processes = living(run)
    report: dict[str, Any] = {"run": str(run.path), "processes": {str(pid): name for pid, name in processes.items()}}
    if "buffer" in processes.values():
        from asyncrl.buffer.client import BufferClient

        report["buffer"] = BufferClient(run.address("buffer"), identity="status", deadline_s=10.0).status()
    elif run.summary.is_file():
        report["summary"] = json.loads(run.summary.read_text())
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
    """Proves a run's account from independent witnesses; `--step N` shows what fed a training step."""

    @dataclass(frozen=True)
    class Audit:
        run: Annotated[
            tyro.conf.Positional[Path], Arg(help="A run folder: of a run that is over, or not.", metavar="RUN")
        ]
        step: Annotated[int | None, Arg(help="Show the trajectories of this training step instead.", metavar="N")] = (
            None
        )
        format: Annotated[
            Literal["text", "json", "parquet"], Arg(help="parquet: one row per trajectory and use; needs pyarrow.")
        ] = "text"
        out: Annotated[
            Path | None, Arg(help="Write here; default: the screen, for parquet RUN/audit.parquet.", metavar="FILE")
        ] = None

    options = tyro.cli(Audit, args=words, prog="asyncrl audit", description=audit.__doc__)
    from asyncrl.audit.command import audit as run_audit
    from asyncrl.run_folder import RunFolder

    return run_audit(RunFolder.existing(options.run), step=options.step, format=options.format, out=options.out)


def replay(words: list[str]) -> int:
    """Trains again on the recorded batches, without actors, and compares the weights bit by bit."""

    @dataclass(frozen=True)
    class Replay:
        run: Annotated[tyro.conf.Positional[Path], Arg(help="A run folder.", metavar="RUN")]
        from_step: Annotated[
            int, Arg(help="Begin at the checkpoint of this training step; 0: at the initial model.", metavar="K")
        ] = 0
        to_step: Annotated[int | None, Arg(help="End after this training step; default: the last.", metavar="N")] = None

    options = tyro.cli(Replay, args=words, prog="asyncrl replay", description=replay.__doc__)
    from asyncrl.audit.replay import replay as run_replay
    from asyncrl.run_folder import RunFolder

    return run_replay(RunFolder.existing(options.run), from_step=options.from_step, to_step=options.to_step)
