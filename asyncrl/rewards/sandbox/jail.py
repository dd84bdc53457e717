"""The isolation of the local sandbox, as a program of its own: `python -I -S jail.py PLAN_FD REPORT_FD`.

    asyncrl ──starts──> supervisor ──forks──> init, pid 1 of its namespace ──forks──> the code, unprivileged
                        waits for init        limits, watches, reports               rlimits, no new privileges

Under `isolation: full` the code sees a root of its own: an in-memory folder with the programs bound read-only, no
network, no other process, nothing of the host's disks. When init ends, the kernel kills every process inside. Each
layer dies with the one to its left (PR_SET_PDEATHSIG). Under `isolation: process` there are only the limits, an
unprivileged user where this runs as root, and the search for child processes to kill. Under both, a filter of system
calls (syscalls.py) refuses all memory that cannot be counted, and Landlock all writing outside the code's folders.

It imports nothing of asyncrl, and only modules that load in milliseconds.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import stat
import sys
import time
from typing import Any, NoReturn

NEW_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # mount, pid, net, ipc, uts
NEW_USER = 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_WRITES = 1 << 1 | 0x1FF << 4 | 1 << 13
"""Opening a file for writing, removing and making entries of a folder, moving them to another folder."""
LANDLOCK_OF_A_FILE = 1 << 1
NOBODY = 65534
FIRST_UID = 2_000_000_000
"""Start of user ids that no machine uses; each jail takes its own, since the kernel counts processes per user."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def main() -> None:
    plan_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(report_fd, False)  # the code must not write the report about itself
    with os.fdopen(plan_fd) as file:
        plan = json.load(file)
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != plan["parent"]:
        return
    uid = _own_user() if os.geteuid() == 0 else None
    try:
        if plan["isolation"] == "full":
            _enter_namespaces(with_user=uid is None)
        init = os.fork()
    except OSError as error:
        _report(report_fd, {"error": f"{error.strerror}: {error.filename}"})
        return
    if init == 0:
        _init(plan, report_fd, uid)
    os.waitpid(init, 0)


def _own_user() -> int | None:
    """A user of this jail's own; None in a container that has no user but root."""
    with open("/proc/self/uid_map") as file:
        end = max(int(first) + int(count) for first, _, count in map(str.split, file))
    if end > FIRST_UID + (1 << 22):  # no process number is larger
        return FIRST_UID + os.getpid()
    return end - 1 - os.getpid() % (end // 2) if end > 2 else None


def _enter_namespaces(*, with_user: bool) -> None:
    outer_uid, outer_gid = os.getuid(), os.getgid()
    _check(_libc.unshare(NEW_NAMESPACES | (NEW_USER if with_user else 0)), "unshare (namespaces)")
    if with_user:
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {outer_uid} 1"),
            ("gid_map", f"{NOBODY} {outer_gid} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as mapping:
                mapping.write(text)


def _init(plan: dict[str, Any], report_fd: int, uid: int | None) -> NoReturn:
    """Run pid 1 of the jail: it cannot be killed from inside, and every process inside ends with it."""
    report: dict[str, Any] = {}
    try:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.setsid()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if the machine runs out of memory, the kernel should kill this first
        full = plan["isolation"] == "full"
        if full:
            _build_root(plan)
        folder = "/sandbox" if full else plan["folder"]
        _write_files(folder, plan["files"], uid)
        started = time.monotonic()
        failed, failing = os.pipe()  # closed unwritten when the code starts
        code = os.fork()
        if code == 0:
            _become(plan, folder, uid, failing)
        os.close(failing)
        report = _watch(code, plan, started)
        _kill_all(full)
        if error := os.read(failed, 1000):
            raise ValueError(f"the code could not be started: {error.decode()}")
        report["files"] = _fetch(folder, plan["fetch_files"], plan["file_mb"] << 20)
        if not full and uid is not None:
            _remove_files_of(uid, plan["shared_folders"])
    except (OSError, ValueError) as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    finally:
        _report(report_fd, report or {"error": "the jail's init failed"})
        os._exit(0)


def _build_root(plan: dict[str, Any]) -> None:
    root = plan["folder"]
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={plan['disk_mb']}m,nr_inodes=8192,mode=755")
    for path in plan["visible"]:
        _show(path, root)
    for name, mode in (("proc", 0o555), ("sandbox", 0o700), ("tmp", 0o777)):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", mode)
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | 8)
    # Not pivot_root: inside a chroot the kernel refuses new user namespaces, and with them half of its attack surface.
    os.chroot(root)
    os.chdir("/")


def _show(path: str, root: str) -> None:
    """Bind `path` of the host read-only at the same place inside."""
    target = root + path
    if os.path.lexists(target) or not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, None, MS_BIND | MS_REC)
    read_only = (ctypes.c_uint64 * 4)(1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, with all below
    result = _libc.syscall(SYS_MOUNT_SETATTR, -100, target.encode(), 0x8000, ctypes.byref(read_only), 32)
    _check(result, f"mount_setattr {path}")


def _write_files(folder: str, files: dict[str, str], uid: int | None) -> None:
    for name, data in files.items():
        path = os.path.normpath(os.path.join(folder, name))
        if not path.startswith(folder + "/"):
            raise ValueError(f"file {name!r} lies outside the sandbox")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
    if uid is not None:
        for parent, _, names in os.walk(folder):
            for path in (parent, *(os.path.join(parent, name) for name in names)):
                os.chown(path, uid, uid)


def _become(plan: dict[str, Any], folder: str, uid: int | None, failing: int) -> NoReturn:
    try:
        os.setsid()
        os.dup2(failing, 3, inheritable=False)
        os.closerange(4, 1 + max(map(int, os.listdir("/proc/self/fd"))))  # all, however many the caller had open
        os.chdir(folder)  # while this user may still enter the parent folders
        mb = 1 << 20
        seconds = math.ceil(plan["timeout"]) + 1
        for what, most in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, 2 * plan["memory_mb"] * mb),
            (resource.RLIMIT_FSIZE, plan["file_mb"] * mb),
            (resource.RLIMIT_NOFILE, plan["open_files"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
        ):
            resource.setrlimit(what, (most, most))
        os.nice(5)
        writable = [folder, *(("/tmp",) if plan["isolation"] == "full" else ())]
        rules = _landlock([*writable, "/dev/null", "/dev/full", "/proc/self"])
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        # After the change of user, since the limit counts that user's processes, which do not include init.
        resource.setrlimit(resource.RLIMIT_NPROC, (plan["processes"], plan["processes"]))
        _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        if rules is not None:
            _check(_libc.syscall(SYS_LANDLOCK_RESTRICT, rules, 0), "landlock")
        _refuse_calls(base64.b64decode(plan["filter"]))
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(plan["command"][0], plan["command"], plan["environment"])
    except BaseException as error:
        os.write(3, f"{type(error).__name__}: {error}".encode())
    os._exit(126)


def _landlock(writable: list[str]) -> int | None:
    """A set of rules by which nothing can be written but what lies in `writable`; None where the kernel has none
    (Linux before 5.19, or switched off)."""
    version = _libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 2:
        return None
    handled = ctypes.c_uint64(LANDLOCK_WRITES)
    rules = _libc.syscall(SYS_LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    _check(rules, "landlock")
    for path in writable:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        may = LANDLOCK_WRITES if os.path.isdir(path) else LANDLOCK_OF_A_FILE
        rule = may.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        _check(_libc.syscall(SYS_LANDLOCK_ADD, rules, 1, rule, 0), f"landlock {path}")
        os.close(place)
    return int(rules)


def _refuse_calls(filter: bytes) -> None:
    """Install the filter of system calls, for this process and all that it starts."""
    steps = ctypes.create_string_buffer(filter, len(filter))
    # struct sock_fprog: the number of steps, and where they are
    program = (ctypes.c_uint64 * 2)(len(filter) // 8, ctypes.addressof(steps))
    _check(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "prctl (seccomp)")


def _watch(code: int, plan: dict[str, Any], started: float) -> dict[str, Any]:
    """Wait until the code ends or exceeds its time or memory."""
    why, status = "", None
    while not why:
        pid, ended = _reap()
        if pid == code:
            status = ended
            break
        if time.monotonic() - started > plan["timeout"]:
            why = "time"
        elif _exceeds(plan["memory_mb"] << 20):
            why = "memory"
        elif pid == 0:
            time.sleep(0.01)
    return {
        "why": why,
        "return_code": -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - started,
    }


def _reap() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _descendants() -> list[int]:
    """The descendants of this process; those whose parent died have become its children."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
    descendants: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - descendants
        descendants |= new
    return sorted(descendants)


def _exceeds(limit: int) -> bool:
    """The processes inside hold more than `limit` bytes. While some begin or end, each is read with another share of
    what they share; a reading above the limit is therefore repeated while they stand still."""
    if _resident() <= limit:
        return False
    stopped = _descendants()
    for pid in stopped:
        _signal(pid, signal.SIGSTOP)
    if _resident() > limit:
        return True  # they are killed where they stand
    for pid in stopped:
        _signal(pid, signal.SIGCONT)
    return False


def _resident() -> int:
    """Bytes of memory of all processes inside: their own, and their shares of what they share. A page of a program or
    of another file on disk is no memory of theirs."""
    return sum(map(_resident_of, _descendants()))


def _resident_of(pid: int) -> int:
    try:
        counts = _counts(f"/proc/{pid}/status", "RssAnon", "RssShmem")
    except OSError:
        return 0  # it ended meanwhile
    if counts["RssShmem"]:
        with contextlib.suppress(OSError):  # a process can close this file to an unprivileged supervisor
            counts |= _counts(f"/proc/{pid}/smaps_rollup", "Pss_Shmem")
    return counts["RssAnon"] + counts.get("Pss_Shmem", counts["RssShmem"])


def _counts(path: str, *names: str) -> dict[str, int]:
    """Bytes by name, from lines like `RssAnon:  12 kB`; 0 for a name that has no line."""
    found = dict.fromkeys(names, 0)
    with open(path) as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) << 10
    return found


def _remove_files_of(uid: int, folders: list[str]) -> None:
    """Remove what the jail's own user left in folders that everybody may write to."""
    for folder in folders:
        for parent, names, files in os.walk(folder, topdown=False):
            for name in (*files, *names):
                path = os.path.join(parent, name)
                with contextlib.suppress(OSError):  # not this user's any more, or not empty
                    status = os.lstat(path)
                    if status.st_uid == uid:
                        (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(path)


def _kill_all(full: bool) -> None:
    """Kill every process of the code. Each round first stops all it sees, so that they cannot fork faster."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        left = _descendants()
        targets = [-1] if full and left else left
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in targets:
                _signal(pid, number)
        while _reap()[0]:
            pass
        if not left:
            return
        time.sleep(0.002)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended meanwhile


def _fetch(folder: str, names: list[str], most: int) -> dict[str, str]:
    contents = {}
    for name in names:
        path = os.path.realpath(os.path.join(folder, name))
        if not path.startswith(folder + "/"):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        with os.fdopen(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                contents[name] = base64.b64encode(file.read(most)).decode()
    return contents


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = (x if x is None else x.encode() for x in (source, target, kind))
    _check(_libc.mount(*encoded, flags, None if data is None else data.encode()), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _report(fd: int, report: dict[str, Any]) -> None:
    os.write(fd, json.dumps(report).encode())


if __name__ == "__main__":
    main()
