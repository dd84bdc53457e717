"""The faults that `asyncrl chaos` injects: the table of what begins and ends each kind that plan.py knows.

An injector is built once for all kinds that name it, with those of `config`, `seed` and `kind` (the first of its kinds)
that it has parameters for.
"""

_PROCESSES = "asyncrl.chaos.faults.processes:Processes"
_DISK = "asyncrl.chaos.faults.disk:Disk"

INJECTORS = {
    "actor": _PROCESSES,
    "learner": _PROCESSES,
    "buffer": _PROCESSES,
    "weights": _PROCESSES,
    "scorer": _PROCESSES,
    "stop": _PROCESSES,
    "node": _PROCESSES,
    "env": "asyncrl.chaos.faults.environment:Environments",
    "net": "asyncrl.chaos.faults.network:Relay",
    "disk-full": _DISK,
    "disk-slow": _DISK,
    "clock": "asyncrl.chaos.faults.clock:Clock",
}
