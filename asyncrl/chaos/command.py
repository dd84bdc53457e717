"""`asyncrl chaos`: an undisturbed run, the same run under faults, and their comparison.

These must hold: the disturbed run finishes; `asyncrl audit` finds no contradiction; no trained token was older than
the bound; the held-out success equals the undisturbed run's within the intervals; no process is left.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.audit.command import audit
from asyncrl.chaos.faults import INJECTORS
from asyncrl.chaos.injector import Injector
from asyncrl.chaos.job import Job
from asyncrl.chaos.plan import Fault, differs, plan
from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.roles import roles
from asyncrl.plugins import build
from asyncrl.run_folder import RunFolder

SPARE_RESTARTS = 3
RESTARTS_EACH = 3
"""Roles that one fault may end: a lost host ends all of them, a full disk those that write."""


def chaos(
    config: Config,
    *,
    kill: Sequence[str],
    every_s: float,
    for_s: float,
    seed: int,
    within_s: float,
    undisturbed: Path | None,
    compare: bool = True,
) -> int:
    """Gives exit code 1 when something does not hold. Raises ConfigError; RunError when the undisturbed run fails."""
    if config.launch.backend != "local":
        raise ConfigError(f"launch.backend is {config.launch.backend!r}: chaos reaches this host's processes, `local`.")
    name = config.launch.name or time.strftime(f"chaos-{seed}-%Y%m%d-%H%M%S")
    config = config.model_copy(update={"launch": config.launch.model_copy(update={"name": name})})
    injectors = _injectors(kill, config, seed)
    disturbed = config
    for injector in dict.fromkeys(injectors.values()):
        disturbed = injector.changed(disturbed)
    # A placeholder folder: only the names of the roles are needed.
    names = [role.name for role in roles(RunFolder(Path(name)), disturbed, resume=False)]
    faults = plan(seed, kill, names, every_s, for_s)
    restarts = len(faults) * RESTARTS_EACH + SPARE_RESTARTS
    patient = {"restarts": restarts, "restart_window_s": for_s + within_s}
    disturbed = disturbed.model_copy(update={"launch": disturbed.launch.model_copy(update=patient)})
    # Acts like Ctrl-C, so that everything is ended, unmounted and restored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted: dict[str, Any] | None = None
    if compare and config.eval.tasks:
        wanted = _measured(RunFolder.existing(undisturbed) if undisturbed else _undisturbed(config, name, within_s))
    job = Job(disturbed, name, lambda line: print(line, flush=True), injectors)
    print(f"under faults: {job.run.path}, {len(faults)} of them, seed {seed}", flush=True)
    injected: list[Fault] = []
    with job.running():
        try:
            job.begin(within_s)
            injected = job.inject(faults, within_s)
            code, why = job.end()
            broken = [f"exit code {code}: {why}"] if code else list(_broken(job, disturbed, wanted))
            if not injected:
                broken.append(f"it ended before the first fault: raise learner.steps, or lower --every {every_s:g}")
        except RunError as error:
            broken = [str(error)]
    _report(job, seed, injected, faults, broken)
    for line in broken:
        print(f"chaos: BROKEN with --seed {seed}: {line}")
    if not broken:
        print(f"chaos: {len(injected)} faults of {len(faults)}, and all holds (seed {seed})")
    return 1 if broken else 0


def _undisturbed(config: Config, name: str, within_s: float) -> RunFolder:
    job = Job(config, f"{name}-undisturbed", print)
    print(f"undisturbed: {job.run.path}", flush=True)
    with job.running():
        job.begin(within_s)
        job.inject((), within_s)
        code, why = job.end()
    if code:
        raise RunError(f"the undisturbed run failed: {why}")
    return job.run


def _measured(run: RunFolder) -> dict[str, Any]:
    """Its summary. Raises ConfigError when the summary has no success at the end of the run."""
    summary: dict[str, Any] = json.loads(run.summary.read_text()) if run.summary.is_file() else {}
    if summary.get("outcome") != "finished" or summary.get("held_out_success_end") is None:
        raise ConfigError(
            f"--undisturbed is {run.path}, whose outcome is {summary.get('outcome', 'unknown')} and held-out success "
            f"at the end {summary.get('held_out_success_end')}: expected a finished run that was evaluated, or give "
            "--no-compare."
        )
    return summary


def _broken(job: Job, config: Config, wanted: dict[str, Any] | None) -> Iterator[str]:
    """Everything that does not hold for a finished run."""
    if orphans := job.orphans():
        yield f"processes are left: {', '.join(orphans)}"
    account = job.run.path / "audit.json"
    if audit(job.run, format="json", out=account):
        violations = json.loads(account.read_text())["violations"]
        yield f"the audit finds {len(violations)} contradictions, the first: {violations[0]}"
    summary = json.loads(job.run.summary.read_text())
    seen, bound = summary["max_staleness_seen"], config.buffer.most_staleness
    if seen > bound:
        yield f"a trained token was {seen} steps old, buffer.max_staleness is {bound}"
    if summary["steps"] != config.learner.steps:
        yield f"the run finished at step {summary['steps']} of {config.learner.steps}"
    if wanted is not None:
        tasks = config.eval.tasks * config.eval.samples
        if (got := summary["held_out_success_end"]) is None:
            yield "no held-out success was measured at the end"
        elif different := differs(got, wanted["held_out_success_end"], tasks):
            yield different


def _report(job: Job, seed: int, injected: list[Fault], planned: list[Fault], broken: list[str]) -> None:
    if job.run.path.is_dir():
        report = {
            "seed": seed, "planned": len(planned), "injected": [str(f) for f in injected], "resumed": job.resumed,
            "broken": broken,
        }  # fmt: skip
        (job.run.path / "chaos.json").write_text(json.dumps(report, indent=1) + "\n")


def _injectors(kinds: Sequence[str], config: Config, seed: int) -> dict[str, Injector]:
    """The injector of each kind; some kinds share one. Raises ConfigError for a kind that is impossible here."""
    built: dict[str, Injector] = {}
    for kind in kinds:
        if (path := INJECTORS[kind]) not in built:
            built[path] = build(kind, INJECTORS, "--kill", {}, defaults={"config": config, "seed": seed, "kind": kind})
    return {kind: built[INJECTORS[kind]] for kind in kinds}
