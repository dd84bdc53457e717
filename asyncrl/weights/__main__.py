"""The weights process: `python -m asyncrl.weights RUN` serves the learner's versions to other hosts."""

from __future__ import annotations

from asyncrl.process import lifeline

if __name__ == "__main__":
    lifeline.bind_to_launcher()  # first: the imports below may take seconds, and the launcher may end meanwhile

import signal
import sys
import threading
from pathlib import Path

from asyncrl.process.role import play, settle
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.reporter import Reporter
from asyncrl.weights.channels import ON_DEVICE, PINNED
from asyncrl.weights.network.server import WeightsServer


def main(path: Path) -> None:
    run = RunFolder.existing(path)
    config = run.load_config()
    where = run.address(PINNED if config.weights.channel in ON_DEVICE else "weights")
    server = WeightsServer(run.shm, where, config.weights.full_every, config.weights.fanout)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    reporter = Reporter(run.address("launcher"), "weights")
    settle()
    reporter.ready()

    def report() -> None:
        reporter.metrics(
            {
                "weights/sent_bytes": server.counts["sent_bytes"],
                "weights/delta_bytes": server.delta_bytes,
                "weights/deltas_offered": server.counts["delta"],
                "weights/fulls_offered": server.counts["full"],
                "weights/requests_refused": server.counts["refused"],
            }
        )

    try:
        server.run(stop.is_set, config.tracking.system_s, report)
        report()
    finally:
        server.close()
        reporter.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m asyncrl.weights RUN")
    play("weights", lambda: main(Path(sys.argv[1])))
