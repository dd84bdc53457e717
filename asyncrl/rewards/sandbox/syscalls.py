"""The filter of system calls for untrusted code, as a BPF program for seccomp: a pure function of the machine.

Memory that no process has mapped (a SysV segment, a memfd, a page of a shared mapping that the kernel has taken out of
the page table, a message in a queue, a file system of the code's own) appears in no count that an unprivileged
supervisor can read. The code therefore cannot create any: these calls answer that they do not exist, and a shared
mapping must be one of a file, which the limits for files bound.
"""

from __future__ import annotations

import struct

_LOAD, _EQUAL, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x45, 0x54, 0x06
"""Operations of BPF: load a word; jump if equal, or if any bit is set; mask the word; return."""
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16
"""Where the kernel puts the call's number, the machine and the arguments (8 bytes each)."""
_SHARED_ANONYMOUS = 0x01 | 0x20
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000
"""Bit in the number of each call of x86-64's second interface, whose numbers are others."""

_REFUSED = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "vmsplice": (278, 75), "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fspick": (433, 433),
    # Its flags lie in memory, which a filter cannot read; the C library then uses clone.
    "clone3": (435, 435),
}  # fmt: skip
"""Numbers on x86-64 and on aarch64. All but the last make memory that is not counted, or would allow making it."""
_MMAP, _CLONE = (9, 222), (56, 220)
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def program(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`. Raises ValueError for a machine whose numbers are unknown."""
    if machine not in MACHINES:
        raise ValueError(f"the local sandbox knows the system calls of {', '.join(MACHINES)}, not of {machine!r}")
    column = list(MACHINES).index(machine)
    steps = [_step(_LOAD, _MACHINE), _step(_EQUAL, MACHINES[machine], 1, 0), _step(_RETURN, _KILL)]
    steps += [_step(_LOAD, _NUMBER)]
    if machine == "x86_64":
        steps += [_step(_ANY_BIT, _X32, 0, 1), _step(_RETURN, _ERROR | _ENOSYS)]
    for numbers in _REFUSED.values():
        steps += [_step(_EQUAL, numbers[column], 0, 1), _step(_RETURN, _ERROR | _ENOSYS)]
    steps += [  # mmap with flags, its argument 3, that ask for memory both shared and anonymous
        _step(_EQUAL, _MMAP[column], 0, 5), _step(_LOAD, _ARGUMENTS + 8 * 3), _step(_AND, _SHARED_ANONYMOUS),
        _step(_EQUAL, _SHARED_ANONYMOUS, 0, 1), _step(_RETURN, _ERROR | _EPERM), _step(_RETURN, _ALLOW),
    ]  # fmt: skip
    steps += [
        _step(_EQUAL, _CLONE[column], 0, 3), _step(_LOAD, _ARGUMENTS), _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _step(_RETURN, _ERROR | _EPERM), _step(_RETURN, _ALLOW),
    ]  # fmt: skip
    return b"".join(steps)


def _step(operation: int, value: int, jump_if: int = 0, jump_else: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, jump_if, jump_else, value)
