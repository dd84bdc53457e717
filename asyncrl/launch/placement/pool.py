"""Which GPUs of one machine each process has. Pure: no driver is asked here.

    learner, learner-1     a GPU each, never two ranks on one (NCCL refuses that)
    actor-0 .. actor-n     free GPUs side by side, as many as the engine's tensor parallel size
    too few for all        actors share: GPUs without a rank first, those with the fewest processes first
    weights.channel cuda_ipc    all on the first GPU, whose memory they exchange weights through
    weights.channel nccl        no engine on rank 0's GPU: both are in a group of NCCL, which refuses that

>>> pool = GpuPool(4)
>>> [pool.take(Demand(role, gpus)) for role, gpus in (("learner", 1), ("actor-0", 2), ("actor-1", 2), ("buffer", 0))]
[(0,), (1, 2), (2, 3), ()]
>>> pool.shared("actor-0"), pool.shared("learner"), pool.unused()
(True, False, [])
"""

from __future__ import annotations

from asyncrl.errors import ConfigError
from asyncrl.launch.placement.demand import Demand

ROUNDING = 1e-6
"""Shares such as 0.1 do not add up to 1 exactly."""


class GpuPool:
    def __init__(self, gpus: int, *, together: bool = False, apart: bool = False) -> None:
        """`together`: learner and engines use one GPU. `apart`: no engine may use rank 0's."""
        self._gpus, self._together, self._apart = gpus, together, apart
        self._of: dict[str, tuple[int, ...]] = {}
        self._amounts: dict[str, float] = {}

    def take(self, demand: Demand) -> tuple[int, ...]:
        """The GPUs of a process, which keeps them over restarts. Raises ConfigError when it cannot be placed."""
        if demand.role not in self._of:
            # On a machine without GPUs all compute on the CPU, except what was promised one.
            wants = demand.gpus > 0 and (self._gpus > 0 or demand.named)
            self._of[demand.role] = self._found(demand) if wants else ()
            self._amounts[demand.role] = min(demand.gpus, 1.0)
        return self._of[demand.role]

    def give(self, role: str) -> None:
        """Takes back the GPUs of a role that is not started again."""
        self._of.pop(role, None)
        self._amounts.pop(role, None)

    def shared(self, role: str) -> bool:
        """Whether another process uses one of the role's GPUs too."""
        mine = set(self._of.get(role, ()))
        return any(mine & set(gpus) for other, gpus in self._of.items() if other != role)

    def unused(self) -> list[int]:
        return [gpu for gpu in range(self._gpus) if not self._on(gpu)]

    def _found(self, demand: Demand) -> tuple[int, ...]:
        if self._together and self._gpus:
            return (0,)
        candidates = self._candidates(demand)
        most = 1.0 + ROUNDING - min(demand.gpus, 1.0)
        room = [gpus for gpus in candidates if all(self._used(gpu) <= most for gpu in gpus)]
        if room:
            return room[0]
        if demand.named or not candidates or demand.kind == "learner":
            raise ConfigError(self._no_room(demand))
        return min(candidates, key=lambda gpus: (self._ranks_on(gpus), sum(len(self._on(gpu)) for gpu in gpus), gpus))

    def _candidates(self, demand: Demand) -> list[tuple[int, ...]]:
        """GPUs side by side that the process may use, with or without room for it."""
        count = max(1, int(demand.gpus))
        found = [tuple(range(at, at + count)) for at in range(self._gpus - count + 1)]
        if demand.kind == "learner":
            return [gpus for gpus in found if not self._ranks_on(gpus)]
        if not (self._apart and demand.kind == "actor"):
            return found
        apart = [gpus for gpus in found if not any("learner" in self._on(gpu) for gpu in gpus)]
        if found and not apart:
            raise ConfigError(self._only_rank_0(demand))
        return apart

    def _on(self, gpu: int) -> list[str]:
        return [role for role, gpus in self._of.items() if gpu in gpus]

    def _used(self, gpu: int) -> float:
        return sum(self._amounts[role] for role in self._on(gpu))

    def _ranks_on(self, gpus: tuple[int, ...]) -> int:
        return sum(role.partition("-")[0] == "learner" for gpu in gpus for role in self._on(gpu))

    def _only_rank_0(self, demand: Demand) -> str:
        return (
            f"weights.channel is nccl, and of the {self._gpus} of this machine {demand.role} finds its "
            f"{demand.gpus:g} only with GPU {list(self._of['learner'])} of the learner's rank 0 among them, which NCCL "
            "refuses (Duplicate GPU detected): set weights.channel to cuda_ipc (one GPU) or shm, or show another GPU "
            "(CUDA_VISIBLE_DEVICES)."
        )

    def _no_room(self, demand: Demand) -> str:
        held = ", ".join(f"{role} {list(gpus)}" for role, gpus in self._of.items() if gpus) or "none is taken"
        remedy = "lower launch.gpus or the number of processes"
        if demand.kind == "learner":
            remedy = "lower learner.ranks, of which each needs a GPU without another rank"
        elif not demand.named:
            remedy = "lower actors.engine_options.tensor_parallel"
        return (
            f"{demand.role} needs {demand.gpus:g} GPU{'s' if demand.gpus > 1 else ''}, and of the {self._gpus} of this "
            f"machine none has room for it ({held}): {remedy}, or show more GPUs (CUDA_VISIBLE_DEVICES)."
        )
