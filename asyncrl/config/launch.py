"""How a run is launched and watched: the part of the configuration that decides nothing about learning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.config.sections import Section


class TrackingConfig(Section):
    sinks: tuple[str, ...] = ("jsonl",)
    """Sinks of the metrics, besides the screen: jsonl, wandb, trackio, tensorboard or `package.module:Name`."""
    project: str = "asyncrl"
    """Project name in wandb or trackio."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """offline: the records stay in the run folder and can be sent later with `wandb sync`."""
    system_s: float = Field(2.0, gt=0)
    """Seconds between samples of CPU and memory per process."""
    trace_every: int = Field(0, ge=0)
    """One training step in so many keeps what `asyncrl trace` shows of each process; 0: at least the
    last 50."""
    rollouts: int = Field(2, ge=0)
    """Groups of each training step that are kept as samples, with their text and what the loss made of every token, in
    `RUN/rollouts` (docs/how-to/view.md); 0: none."""
    rollouts_mb: float = Field(256.0, gt=0)
    """Bound on the size of all samples; past it sampled steps are removed, evenly over the run. Those of `held_out`
    have a bound of this size of their own."""
    held_out: int = Field(4, ge=0)
    """Tasks of each held-out set, the first ones, whose answers are kept at every evaluation, in
    `RUN/rollouts/held_out` (docs/how-to/view.md); 0: none."""


class RayConfig(Section):
    address: str = ""
    """Address of a running cluster, `host:port` or `auto`. Empty: the cluster that RAY_ADDRESS names, as within
    `ray job submit`, else one on this machine, for this run alone."""
    cpus: dict[str, float] = Field(default_factory=dict)
    """CPUs reserved on its node for one process of a role (`actor-0`) or kind of role (`actor`, `learner`, `buffer`,
    `weights`); 1 for roles not named."""
    resources: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Custom resources of nodes required by a role or kind: `{buffer: {fast_disk: 1}}` keeps it on such nodes."""
    environment: tuple[str, ...] = ("ASYNCRL_LOG", "HF_HOME", "HF_HUB_OFFLINE", "PYTHONPATH")
    """Environment variables that the launcher passes to roles on other nodes. No secrets: the cluster sees them."""


class LaunchConfig(Section):
    name: str | None = None
    """Name of the run; default: the config's name and the time."""
    runs_dir: str = "runs"
    """Folder of the run folders."""
    backend: Literal["local", "ray"] = "local"
    """Where processes are started: `local`, as subprocesses on this machine, or `ray`, on the nodes of a Ray cluster
    (docs/how-to/cluster.md)."""
    gpus: dict[str, float] = Field(default_factory=dict)
    """GPUs reserved for and visible to one process of a role (`actor-0`) or kind of role: a number, or a share of one.
    Default: one for each rank of the learner, and for an actor its engine's `tensor_parallel`; under `ray` only where
    the configuration says that the run has GPUs (docs/how-to/gpus.md). 0: it computes on the CPU."""
    ranks_per_node: int | None = Field(None, ge=1)
    """Ranks of the learner that share a node under `ray`: so many successive ones are placed together, the next ones
    together wherever there is room. Default: as few nodes as hold them, with at most 8 on each, evenly."""
    memory_check: Literal["refuse", "warn", "off"] = "refuse"
    """Before a run on GPUs starts, its planned memory is compared with the card's: refuse above 1.15 of it and warn
    above 0.9, only warn, or do not compute it (docs/how-to/gpus.md)."""
    host: str = ""
    """Empty: sockets are files of this host that only its owner can reach (ipc). Else the address of this host on which
    roles listen, encrypted and for this run's keys only (tcp with CURVE); `auto`: the address others reach it by."""
    cpus: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """CPU cores of a role (`actor-0`) or kind of role (`actor`, `learner`, `buffer`); others use all cores."""
    try_reset: bool = True
    """Before anything starts, reset the environment once with the first task of each source, in a process of its own,
    and close it again: what fails there would fail in every episode."""
    restarts: int = Field(3, ge=0)
    """Restarts of one process allowed within `restart_window_s`; past it the run ends."""
    restart_window_s: float = Field(600.0, gt=0)
    """Window of the restart budget, in seconds."""
    start_s: float = Field(180.0, gt=0)
    """Seconds in which a process must report that it is ready."""
    stop_s: float = Field(20.0, gt=0)
    """Seconds that a process has to stop by itself before it is killed."""
    tuning: Literal["off", "auto"] = "off"
    """auto: the bound on staleness and the slots of the actors are chosen together while the run goes on
    (docs/how-to/planning.md). Sets `buffer.max_staleness` and `actors.slots` to auto: those that the file does not set;
    as a flag, those that no flag sets."""
    stall_s: float = Field(120.0, gt=0)
    """Seconds without progress after which the run reports who waits for whom, and writes every process's stacks."""
    on_stall: Literal["warn", "restart", "abort"] = "warn"
    """What follows after `stall_s`: continue, restart the roles that the others wait for (within their budget), or end
    the run."""
    seed: int | None = None
    """Sets `data.seed`, `actors.seed` and `learner.seed` together: those that the file does not set; as a flag, those
    that no flag sets."""
