"""The buffer process: `python -m asyncrl.buffer RUN`."""

from __future__ import annotations

from asyncrl.process import lifeline

if __name__ == "__main__":
    lifeline.bind_to_launcher()  # first: the imports below may take seconds, and the launcher may end meanwhile

import contextlib
import ctypes
import logging
import signal
import sys
import time
from pathlib import Path

from asyncrl.buffer.bounds.changes import Changes
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.ledger.storage.snapshot import restore
from asyncrl.buffer.loop import Service
from asyncrl.buffer.metrics import series
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.tasks.sources import open_curriculum, open_held_out, open_source
from asyncrl.data.added_tasks import open_on_step_end
from asyncrl.data.demonstrations import open_demonstrations
from asyncrl.process.role import play, settle
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.bound_events import CHANGED
from asyncrl.tracking.reporter import Reporter
from asyncrl.tracking.rollouts.held_out import Answers

log = logging.getLogger("asyncrl.buffer")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def main(path: Path) -> None:
    run = RunFolder.existing(path)
    config = run.load_config()
    rules = Rules.of(config)
    source = open_source(config)
    folder = run.ledger(config)
    restored = restore(run.checkpoints, folder)
    if restored is not None:
        log.warning(
            "no ledger in %s: restored from checkpoint %s; prompts issued after it are drawn again", folder, restored
        )
    database = Database(folder, config.buffer.fsync, config.buffer.fsync_interval_s)
    curriculum, on_step_end = open_curriculum(config, source), open_on_step_end(config)
    held_out, shown = open_held_out(config), open_demonstrations(config)
    answers = Answers(run.held_out, config.tracking.held_out, config.tracking.rollouts_mb)
    beside = curriculum, on_step_end, held_out, answers, shown, run.checkpoints
    buffer = Buffer(database, rules, source, time.monotonic(), *beside)
    buffer.commit(time.monotonic())
    if buffer.losses.pending:
        missing = len(buffer.losses.pending), buffer.lost_to_disk
        log.warning("%d trajectories are missing on the disk; %d are generated again once the learner starts", *missing)
    service = Service(buffer, run.address("buffer"), config.buffer.commit_ms / 1000, checkpoints=run.checkpoints)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    reporter = Reporter(run.address("launcher"), "buffer")
    service.outbox.on_commit = lambda seconds: reporter.span("commit", seconds)
    settle()
    keep_freed_memory()
    reporter.ready()
    history = buffer.ledger.history
    log.info("%s: branch %d, version %d, %d batches", folder, history.branch, history.version, len(history.line))

    reported, changes = "", Changes(buffer.ledger)

    def report() -> None:
        nonlocal reported
        failing = buffer.tickets.failures.budget.exceeded
        if failing and not reported:
            log.error("%s", failing)
            reporter.event("failing", why=failing)
        reported = failing
        for kind, step, number, why in changes.news():
            log.info("%s is %d from step %d on: %s", CHANGED[kind], number, step, why)
            reporter.event(kind, **{kind: number}, step=step, why=why)
        reporter.metrics(series(buffer, service.counts, service.outbox.commit_seconds))

    try:
        service.run(config.tracking.system_s, report)
        report()
    finally:
        service.close()
        database.close()
        reporter.close()


def keep_freed_memory() -> None:
    """Lets glibc keep up to 64 MiB that a commit has freed. Otherwise it returns the memory to the kernel, and the next
    messages fault it in page by page: about a sixth of the CPU of a put. Does nothing under another libc."""
    with contextlib.suppress(AttributeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        allocator.mallopt(_M_MMAP_THRESHOLD, 32 << 20)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m asyncrl.buffer RUN")
    play("buffer", lambda: main(Path(sys.argv[1])))
