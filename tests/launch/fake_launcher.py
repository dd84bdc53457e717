"""Runs the launcher's loop over fake roles: python fake_launcher.py RUN name=behaviour ..."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.launch.backends.local import backend
from asyncrl.launch.loop import Launcher
from asyncrl.launch.processes import this_process
from asyncrl.launch.supervision.interrupts import Interrupts
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.collector import Collector

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.launch.fakes import fake

if __name__ == "__main__":
    run = RunFolder.existing(Path(sys.argv[1]))
    interrupts = Interrupts()
    with run.locked(), interrupts.counted():
        run.note(processes={"launcher": this_process()})
        config = run.load_config()
        roles = [fake(run, *word.split("=")) for word in sys.argv[2:]]
        collector = Collector(run, config)
        outcome = Launcher(run, config, roles, collector, interrupts, backend(run, config)).supervise()
        print(outcome.kind, outcome.exit_code, outcome.why)
        sys.exit(outcome.exit_code)
