"""What a plan varies, and the buffer's rules under it. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from asyncrl.buffer.rules import Rules
from asyncrl.config import Config
from asyncrl.config.demonstrations import supervised
from asyncrl.config.loading import sentence
from asyncrl.config.rules.gpus import engine_gpus
from asyncrl.errors import ConfigError
from asyncrl.plan.times import Domain

FIELDS = {
    "actors": "actors.count",
    "slots": "actors.slots",
    "groups_per_step": "learner.groups_per_step",
    "max_staleness": "buffer.max_staleness",
    "every": "weights.every",
    "sampler": "buffer.sampler",
    "tuning": "launch.tuning",
    "ranks": "learner.ranks",
}
"""The config's field of each dimension."""
TUNED = ("slots", "max_staleness")
"""What `launch.tuning: auto` chooses."""
TUNED_AFTER = 20
"""Training steps after which it counts as chosen."""


@dataclass(frozen=True, slots=True)
class Setting:
    actors: int
    slots: int
    """Slots of one actor."""
    groups_per_step: int
    max_staleness: int
    every: int
    sampler: str
    tuning: str = "off"
    """Under auto, `slots` and `max_staleness` are the limits."""
    ranks: int = 1

    @classmethod
    def of(cls, config: Config, slots: int | None = None, bound: int | None = None) -> Setting:
        """`slots`, `bound`: what `actors.slots: auto` and `buffer.max_staleness: auto` came to. It has them fixed."""
        given, fixed = config.actors.slots, config.buffer.max_staleness
        if fixed == "auto":
            fixed = config.buffer.staleness_limit if bound is None else bound
        return cls(
            max(1, config.actors.count - config.actors.eval),
            given if isinstance(given, int) else slots or config.actors.most_slots,
            config.learner.groups_per_step, fixed, config.weights.every, config.buffer.sampler,
            ranks=config.learner.ranks,
        )  # fmt: skip

    def tuned(self, config: Config) -> Setting:
        """The same under `launch.tuning: auto`."""
        most, limit = config.actors.max_slots, config.buffer.staleness_limit
        return replace(self, tuning="auto", slots=most, max_staleness=limit)

    def as_set(self, config: Config) -> Setting:
        """The same, under `launch.tuning: auto` where the config has that."""
        return self.tuned(config) if config.launch.tuning == "auto" else self

    @property
    def warm_up(self) -> int:
        """Training steps that are played before the first that counts."""
        return TUNED_AFTER if self.tuning == "auto" else 2 * self.max_staleness + 4

    def value(self, name: str) -> Any:
        """What the config has for a dimension."""
        return "auto" if self.tuning == "auto" and name in TUNED else getattr(self, name)

    def __str__(self) -> str:
        usual = {"tuning": "off", "ranks": 1}
        shown = [name for name in FIELDS if getattr(self, name) != usual.get(name)]
        return ", ".join(f"{FIELDS[name]} {self.value(name)}" for name in shown)

    def changes(self, base: Setting) -> dict[str, Any]:
        """The config's fields in which it differs from another."""
        return {field: self.value(n) for n, field in FIELDS.items() if self.value(n) != base.value(n)}


def config_with(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values by field path; `buffer.capacity` grows where they need it. Raises ConfigError."""
    values = config.model_dump()
    for path, value in changes.items():
        section, _, name = path.partition(".")
        values[section][name] = value
    bound = values["buffer"]["max_staleness"]
    bound = bound if isinstance(bound, int) else config.buffer.staleness_limit
    needed = (bound + 1) * config.learner.group_size * values["learner"]["groups_per_step"]
    if changes:
        values["buffer"]["capacity"] = max(values["buffer"]["capacity"], needed)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(sentence(error, values, set(), None)) from error


def refuse_supervised(config: Config) -> None:
    """Raises ConfigError for a run that trains on demonstrations alone."""
    if supervised(config):
        raise ConfigError(
            "learner.loss is sft, under which nothing is generated and nobody waits for anybody: plan needs a run with "
            "groups, so give it one with a policy loss."
        )


def rules_of(config: Config, setting: Setting) -> Rules:
    """The buffer's rules under a setting. Evaluations and limits of the disk are not played, and no lease lapses, since
    no process dies. Raises ConfigError."""
    changes = setting.changes(Setting.of(config, setting.slots).as_set(config))
    if config.buffer.max_staleness == "auto" and setting.tuning == "off":
        changes[FIELDS["max_staleness"]] = setting.max_staleness
    if "actors.count" in changes:
        changes["actors.count"] += config.actors.eval
    rules = Rules.of(config_with(config, changes))
    return replace(
        rules, steps=1 << 30, slots=max(rules.slots, setting.slots), eval_sets=(), eval_every=0, eval_reserved=0,
        lease_s=1e12, max_disk_bytes=float("inf"), stop_on_failures=False, stop_if_all_fail=False,
        batch_retries=1 << 30, group_scored=False, scored=False,
    )  # fmt: skip


def domains(config: Config, cores: int) -> list[Domain]:
    """Which roles share cores: of `launch.cpus`, where given, else all of this host's `cores`. Roles on GPUs and on
    several hosts share none, but those that share a GPU."""
    if config.launch.backend != "local" or config.launch.host:
        return []
    shares = config.launch.gpus.get("actor", 1.0), config.launch.gpus.get("learner", 1.0)
    if config.weights.channel == "cuda_ipc" or all(0 < share < 1 for share in shares):
        return [Domain(1.0, frozenset({"actor", "learner"}))]
    if config.actors.engine != "hf":
        return []
    pinned = config.launch.cpus
    roles = {"learner", "buffer", *(role for role in pinned if role.startswith("actor"))}
    roles |= set() if any(role.startswith("actor") for role in roles) else {"actor"}
    found: list[tuple[set[int], set[str]]] = []
    for role in sorted(roles):
        own, members = set(pinned.get(role, range(cores))), {role}
        for other in [each for each in found if each[0] & own]:
            found.remove(other)
            own, members = own | other[0], members | other[1]
        found.append((own, members))
    return [Domain(float(len(own)), frozenset(members)) for own, members in found]


def splits(config: Config, gpus: int) -> list[tuple[int, int]]:
    """How so many GPUs may be divided: (actors, ranks of the learner), each using all of them. Numbers of ranks are
    powers of two, eighths of the GPUs, and the present one. Raises ConfigError."""
    actor = config.launch.gpus.get("actor", float(engine_gpus(config)))
    rank = config.launch.gpus.get("learner", 1.0)
    if min(actor, rank) < 1:
        raise ConfigError(
            f"--gpus is {gpus}, and in the run an actor has {actor:g} GPUs and a rank of the learner {rank:g}: what "
            "they would do on GPUs of their own is not in its record. Give a run whose roles have whole GPUs."
        )
    tried = {1 << k for k in range(gpus.bit_length())} | {gpus * k // 8 for k in range(1, 8)} | {config.learner.ranks}
    left = {ranks: int(gpus - ranks * rank) for ranks in sorted(tried) if ranks}
    found = [(rest // int(actor), ranks) for ranks, rest in left.items() if rest > 0 and rest % int(actor) == 0]
    if not found:
        raise ConfigError(
            f"--gpus is {gpus}, which cannot be divided: an actor has {actor:g}, a rank of the learner {rank:g}."
        )
    return found


def host_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
