"""`launch.backend: ray`: Ray chooses the node of each role and notices the loss of a node. No data pass through Ray:
roles speak over ZeroMQ and find each other in the run's folder, which the nodes share.

    Launcher ──start──> Ray ──placement group──> node ──> RoleHost (ray_host.py) ──> the role's process
        ▲                                          │ is lost
        └── ended: killed, "its node is lost" <────┘        the launcher starts it again, Ray finds another node

A block of the learner's ranks shares a node, rank 0 with the weights server (`launch.ranks_per_node`); every other role
is placed by itself. So a lost node takes its blocks with it, and the ranks of the others start again where they were.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.rules.ranks import ranks_per_node
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.placement.resources import resources_of, role_names, sharing_a_host
from asyncrl.launch.processes import Role, alive
from asyncrl.process.logs import RUN_ERROR
from asyncrl.run_folder import RunFolder

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a role that reserves no GPU sees none
try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(
        f"launch.backend is ray, and Ray cannot be imported ({error}): pip install 'asyncrl[ray]'."
    ) from None

from asyncrl.launch.backends.ray_host import RoleHost, sweep

log = logging.getLogger(__name__)

KILL_S = 5.0
"""Seconds after which a process is ended with its host, because the host does not answer."""
SWEEP_S = 15.0
CONNECT_S = 10.0
SPARE_CPUS = 16
"""CPUs for actors added later, in a cluster that is started for this run alone: there they are only counted."""


class Ray:
    """Joins the cluster, or starts one on this machine and ends it with the run."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        """Raises RunError when the cluster cannot be reached."""
        self._run, self._config = run, config
        self._id = run.id
        names = role_names(config)
        self._per_node = ranks_per_node(config)
        self._group_of = {name: group for group in sharing_a_host(names, self._per_node) for name in group}
        self._groups: dict[tuple[str, ...], PlacementGroup] = {}
        self._processes: dict[str, RayProcess] = {}
        try:
            _check_reachable(config.ray.address)
            ray.init(**_cluster(run, config, names), namespace=f"asyncrl-{self._id}", log_to_driver=False)
        except (RayError, ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise RunError(
                f"ray.address is {config.ray.address!r}, and no cluster answers there: {error}. "
                "Start one with `ray start --head`, or leave the field empty."
            ) from error

    def start(self, role: Role, *, again: bool = False) -> RayProcess:
        group = self._group_of.setdefault(role.name, (role.name,))
        place = self._place(group)
        wanted = resources_of(role.name, self._config)
        gpus, cpus = wanted.pop("GPU", 0.0), wanted.pop("CPU", 0.0)
        where = PlacementGroupSchedulingStrategy(place, group.index(role.name))
        passed = {name: os.environ[name] for name in self._config.ray.environment if name in os.environ}
        host = (
            ray.remote(RoleHost)
            .options(
                num_cpus=cpus, num_gpus=gpus, resources=wanted, scheduling_strategy=where,
                max_concurrency=4, max_restarts=0,
            )
            .remote(str(self._run.path), self._id, role, passed, os.getcwd(), again)
        )  # fmt: skip
        process = RayProcess(role, self._run.log(role.name), host, place)
        self._processes[role.name] = process
        return process

    def _place(self, group: tuple[str, ...]) -> PlacementGroup:
        """Where the roles of a group run, all on one node; another one once any of them was lost with that node: Ray
        may not know yet that it is gone, and one that is started there would end when the next of them moves."""
        place = self._groups.get(group)
        if place is None or any(p.lost and p.place is place for p in self._processes.values()):
            if place is not None:
                remove_placement_group(place)
            bundles = [resources_of(name, self._config) or {"CPU": 0.001} for name in group]
            self._groups[group] = place = placement_group(bundles, strategy="STRICT_PACK")
        return place

    def forget(self, name: str) -> None:
        """Returns the resources of a role that is not started again to the cluster."""
        self._processes.pop(name, None)
        if (group := self._group_of.pop(name, None)) is not None and len(group) == 1:
            remove_placement_group(self._groups.pop(group))

    def waits(self) -> str:
        homeless = [name for name, process in self._processes.items() if process.homeless]
        if not homeless:
            return ""
        requests = "; ".join(
            f"{name} ({', '.join(f'{k} {v:g}' for k, v in resources_of(name, self._config).items())})"
            for name in homeless
        )
        together = any(name.startswith("learner") for name in homeless) and self._config.learner.ranks > 1
        block = f"; launch.ranks_per_node: {self._per_node} ranks of the learner share a node" if together else ""
        return f"no node of the cluster has room for {requests}{block}"

    def close(self) -> None:
        shm = str(self._run.shm)
        swept = [
            ray.remote(sweep)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            .remote(self._id, [shm])
            for node in ray.nodes()
            if node["Alive"]
        ]
        for answer in swept:
            try:
                ray.get(answer, timeout=SWEEP_S)
            except (GetTimeoutError, RayError) as error:
                log.warning("a node was not searched for what is left of the run: %s", error)
        for group in self._groups.values():
            remove_placement_group(group)
        ray.shutdown()


class RayProcess:
    """The launcher's handle of the process of one role."""

    def __init__(self, role: Role, log: Path, host: Any, place: PlacementGroup) -> None:
        self.role, self.log, self.place = role, log, place
        self.killed_for = ""
        self.node = ""
        """Address of its node; empty before it is placed."""
        self._host = host
        self._began, self._end = host.began.remote(), host.wait.remote()
        self.local = self.lost = self._host_ended = False
        self._asked, self._placed = time.monotonic(), float("inf")
        self._identity: tuple[int, float] | None = None
        self._code: int | None = None
        self._kill_at = float("inf")

    @property
    def homeless(self) -> bool:
        """Whether it waits for a node."""
        self._look()
        return self._code is None and not self.node

    @property
    def started(self) -> float:
        """For an actor, without which the run continues, the time of its placement; for others that of the request."""
        self._look()
        return self._placed if self.role.kind == "actor" else self._asked

    @property
    def identity(self) -> tuple[int, float] | None:
        self._look()
        return self._identity

    def ended(self) -> int | None:
        if self._code is not None:
            return self._code
        if time.monotonic() > self._kill_at:
            self._end_host()
        if ray.wait([self._end], timeout=0)[0]:
            try:
                self._code, why = ray.get(self._end)
                self.killed_for = self.killed_for or why
            except RayError as error:
                self._code, self.lost, why = _end_of_host(error, self.node, ended=self._host_ended)
                self.killed_for = self.killed_for or why
            self._end_host()
        return self._code

    def stop(self) -> None:
        if self.homeless:
            self._end_host()
        elif self._code is None:
            self._host.stop.remote()

    def kill(self, why: str) -> None:
        if self.ended() is not None:
            return
        self.killed_for = why
        self._host.kill.remote(why)
        self._kill_at = min(self._kill_at, time.monotonic() + (0.0 if self.homeless else KILL_S))

    def _end_host(self) -> None:
        self._host_ended = True
        ray.kill(self._host, no_restart=True)

    def _look(self) -> None:
        if self.node or self._code is not None or not ray.wait([self._began], timeout=0)[0]:
            return
        try:
            pid, created, self.node = ray.get(self._began)
        except RayError:  # `ended` reports it
            return
        self._placed = time.monotonic()
        self._identity = (pid, created) if pid else None
        self.local = alive(pid, created)


def _end_of_host(error: RayError, node: str, *, ended: bool) -> tuple[int, bool, str]:
    """Exit code of the role, whether its node is lost, and why, where `error` came instead of its host's answer.
    `ended`: the host was ended by the launcher; a kill meant for the role alone leaves its host."""
    cannot_start = isinstance(error, RayActorError) and error.actor_init_failed
    if ended or (isinstance(error, RayActorError) and not cannot_start):
        return -9, not ended, f"its node ({node or 'not yet known'}) is lost"
    text = ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]
    if cannot_start:
        remedy = "Every node of the cluster needs asyncrl and what the run uses, for the same Python."
        return RUN_ERROR, False, f"its host cannot start on a node: {text}. {remedy}"
    return 1, False, f"Ray cannot run it ({type(error).__name__}): {text}"


def _check_reachable(address: str) -> None:
    """Raises OSError when nothing listens at `address`, which Ray would report only after minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_S).close()


def _cluster(run: RunFolder, config: Config, names: list[str]) -> dict[str, Any]:
    """The arguments of ray.init."""
    address = config.ray.address or os.environ.get("RAY_ADDRESS", "")
    if address:
        return {"address": address}
    requested = [resources_of(name, config) for name in names]
    cpus = max(os.cpu_count() or 1, int(sum(n.get("CPU", 0.0) for n in requested) + SPARE_CPUS))
    return {
        "address": "local", "num_cpus": cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(run.sockets / "ray"), "object_store_memory": 80 << 20,
    }  # fmt: skip
