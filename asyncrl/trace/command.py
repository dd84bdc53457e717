"""`asyncrl trace`: reads the record of a run, and writes the trace file."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from asyncrl.audit.ledger import BatchRow, LedgerRows
from asyncrl.audit.payloads import PayloadDiffers, PayloadFiles, decoded
from asyncrl.audit.reading import read_ledger
from asyncrl.errors import RunError
from asyncrl.run_folder import RunFolder
from asyncrl.trace.chrome import events
from asyncrl.trace.timeline import Place, Timeline, build, window
from asyncrl.tracking import spans
from asyncrl.trajectory import TurnRecord


def trace(run: RunFolder, *, steps: int, to_step: int | None, out: Path | None) -> int:
    """Writes the trace of the last `steps` training steps, up to `to_step` if given, of a live or finished run. Raises
    RunError if nothing can be shown."""
    ledger = read_ledger(run.buffer)
    timeline, known = read(run, ledger, chosen(ledger, steps, to_step))
    path = run.path / "trace.json.gz" if out is None else out
    write(path, timeline)
    episodes = sum(s.name.startswith("episode ") for s in timeline.slices)
    batches = [s.name for s in timeline.slices if s.lane == "batches"]
    print(f"{path}: {batches[0]} to {batches[-1]}, {episodes} episodes, the turns of {known} of them")
    if not any(s.lane == "step" for s in timeline.slices):
        print(
            "What the processes did in these steps is not kept: spans.jsonl has 50 to 100 steps, or one in "
            "tracking.trace_every."
        )
    print("Open it at ui.perfetto.dev, which reads it in the browser, or at chrome://tracing.")
    return 0


def chosen(ledger: LedgerRows, steps: int, to_step: int | None) -> list[BatchRow]:
    """The last `steps` finished batches of the line whose step is at most `to_step`. Raises RunError without any."""
    finished = [batch for batch in ledger.line if batch.finished_at is not None]
    upto = [batch for batch in finished if to_step is None or batch.version_after <= to_step]
    if not finished:
        raise RunError("the run has finished no batch yet: a trace begins with the first one.")
    if not upto:
        raise RunError(f"--to-step is {to_step}, and the first batch led to step {finished[0].version_after}.")
    return upto[-steps:]


def read(run: RunFolder, ledger: LedgerRows, batches: Sequence[BatchRow]) -> tuple[Timeline, int]:
    """The timeline, and the number of episodes whose turns are known. Raises RunError for a damaged record."""
    begin, end = window(ledger, batches)
    turns = _turns(run, ledger, begin, end)
    try:
        of_processes = list(spans.read(run.spans))
    except (OSError, ValueError) as error:
        raise RunError(f"the spans of this run cannot be read: {error}") from error
    return build(ledger, turns, of_processes, batches), len(turns)


def write(path: Path, timeline: Timeline) -> None:
    """A name that ends in .gz is compressed. Raises OSError."""
    with gzip.open(path, "wt", compresslevel=3) if path.suffix == ".gz" else path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for separator, event in zip(itertools.chain([""], itertools.repeat(",\n")), events(timeline), strict=False):
            file.write(separator + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def _turns(run: RunFolder, ledger: LedgerRows, begin: float, end: float) -> dict[Place, Sequence[TurnRecord]]:
    """The timing records of the trajectories that were stored in this time and whose payloads are still there."""
    turns: dict[Place, Sequence[TurnRecord]] = {}
    with closing(PayloadFiles(run.buffer / "payloads")) as files:
        for place, row in ledger.trajectories.items():
            group = ledger.groups[place[0]]
            if group.payload and begin < row.received_at <= end:
                try:
                    turns[place] = decoded(group, row, files.read).turn_records
                except PayloadDiffers:  # reclaimed since the ledger was read; `asyncrl audit` tells damage apart
                    continue
    return turns
