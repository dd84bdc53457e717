"""Memory that processes share passes no limit, and files are limited and removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rewards.sandbox.boxes import TIGHT, needs_namespaces, run

SHARED = {
    "SysV segments": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p\n"
        "libc.shmdt.argtypes = (ctypes.c_void_p,)\n"
        "for n in range(1, 13):\n"
        "    segment = libc.shmget(0, 32 << 20, 0o1600)\n"
        "    if segment < 0: raise OSError(ctypes.get_errno(), 'shmget')\n"
        "    place = libc.shmat(segment, None, 0); ctypes.memset(place, 1, 32 << 20); libc.shmdt(place)\n"
        "    print(32 * n, flush=True)\n"
    ),
    "memfd": (
        "import os\nheld = []\n"
        "for n in range(1, 25):\n"
        "    fd = os.memfd_create('x'); held.append(fd)\n"
        "    for _ in range(3): os.write(fd, b'x' * (1 << 20))\n"
        "    print(3 * n, flush=True)\n"
    ),
    "anonymous, touched by a child that ended": (
        "import mmap, os\nheld = []\n"
        "for n in range(1, 5):\n"
        "    held.append(mmap.mmap(-1, 30 << 20))\n"
        "    if os.fork() == 0:\n"
        "        for place in range(0, 30 << 20, 4096): held[-1][place] = 1\n"
        "        os._exit(0)\n"
        "    os.wait(); print(30 * n, flush=True)\n"
    ),
    "/dev/zero": (
        "import mmap, os\nheld = []; zero = os.open('/dev/zero', os.O_RDWR)\n"
        "for n in range(1, 5):\n"
        "    held.append(mmap.mmap(zero, 30 << 20))\n"
        "    if os.fork() == 0:\n"
        "        for place in range(0, 30 << 20, 4096): held[-1][place] = 1\n"
        "        os._exit(0)\n"
        "    os.wait(); print(30 * n, flush=True)\n"
    ),
    "message queues": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True); text = ctypes.create_string_buffer(b'\\1' * 9000)\n"
        "for n in range(1, 20001):\n"
        "    queue = libc.msgget(0, 0o600)\n"
        "    if queue < 0: raise OSError(ctypes.get_errno(), 'msgget')\n"
        "    libc.msgsnd(queue, text, 8000, 0o4000)\n"
        "    if n % 1000 == 0: print(n * 8 >> 10, flush=True)\n"
    ),
    "a file system of its own": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.unshare(0x10020000): raise OSError(ctypes.get_errno(), 'unshare')\n"
        "os.mkdir('m')\n"
        "if libc.mount(b'none', b'm', b'tmpfs', 0, None): raise OSError(ctypes.get_errno(), 'mount')\n"
        "for n in range(1, 100):\n"
        "    with open(f'm/{n}', 'wb') as file: file.write(b'x' * (3 << 20))\n"
        "    print(3 * n, flush=True)\n"
    ),
    "files outside its folder": (
        "import os\n"
        "for n in range(1, 50):\n"
        "    for folder in ('/dev/shm', '/var/tmp', '/tmp'):\n"
        "        with open(f'{folder}/asyncrl-left-{n}', 'wb') as file: file.write(b'x' * (3 << 20))\n"
        "    print(9 * n, flush=True)\n"
    ),
}
"""Each prints the MB that it holds, all beyond 60."""


@needs_namespaces
@pytest.mark.parametrize("name", SHARED)
def test_no_kind_of_shared_memory_passes_the_limit(name: str) -> None:
    result = run(SHARED[name], memory_mb=60, processes=32, open_files=64)
    assert result.status == "Failed", result
    assert result.run is not None
    assert max(map(int, result.run.stdout.split()), default=0) <= 60, result


@needs_namespaces
def test_no_kind_of_shared_memory_passes_the_limit_or_stays_under_process_either() -> None:
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from asyncrl.rewards.sandbox import LocalSandbox, Run\n"
        "box = LocalSandbox(isolation='process', memory_mb=60, processes=32, open_files=64, file_mb=4)\n"
        "for code in json.loads(sys.argv[2]):\n"
        "    result = box.run_now(Run(code, run_timeout=10.0))\n"
        "    print(result.status, max(map(int, result.run.stdout.split()), default=0))\n"
        "    print(result.message, result.run.stderr[-200:], file=sys.stderr)\n"
    )
    segments = Path("/proc/sysvipc/shm").read_text()
    user = ["unshare", "-U", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*user, sys.executable, "-c", code, str(Path(__file__).parents[3]), json.dumps(list(SHARED.values()))],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    try:
        left = [path for folder in ("/dev/shm", "/tmp", "/var/tmp") for path in Path(folder).glob("asyncrl-left-*")]
        said = dict(zip(SHARED, (line.split() for line in done.stdout.splitlines()), strict=True))
        assert {name: (status, int(mb) <= 60) for name, (status, mb) in said.items()} == dict.fromkeys(
            SHARED, ("Failed", True)
        ), done
        assert left == []
        assert Path("/proc/sysvipc/shm").read_text() == segments
    finally:
        for folder in ("/dev/shm", "/tmp", "/var/tmp"):
            for path in Path(folder).glob("asyncrl-left-*"):
                path.unlink()


MAPPED = (
    "import mmap, os, time\n"
    "with open('shared', 'w+b') as file:\n"
    "    file.truncate(MB << 20); held = mmap.mmap(file.fileno(), MB << 20)\n"
    "for place in range(0, MB << 20, 4096): held[place] = 1\n"
    "for _ in range(3):\n"
    "    if os.fork() == 0: sum(held[place] for place in range(0, MB << 20, 4096)); time.sleep(0.5); os._exit(0)\n"
    "for _ in range(3): os.wait()\n"
)


@needs_namespaces
@pytest.mark.parametrize(("mb", "message"), [(80, "killed: more than 60 MB of memory"), (35, "")])
def test_what_processes_share_is_counted_once(mb: int, message: str) -> None:
    result = run(MAPPED.replace("MB", str(mb)), memory_mb=60, disk_mb=120, file_mb=100)
    assert result.message == message, result


@needs_namespaces
def test_what_processes_share_is_counted_once_also_while_they_begin_and_end() -> None:
    """Between two readings of /proc a process begins or ends, and the shares of the others change."""
    code = (
        "import mmap, os, time\n"
        "with open('shared', 'w+b') as file:\n"
        "    file.truncate(50 << 20); held = mmap.mmap(file.fileno(), 50 << 20)\n"
        "for place in range(0, 50 << 20, 4096): held[place] = 1\n"
        "end = time.monotonic() + 2\n"
        "while time.monotonic() < end:\n"
        "    for _ in range(3):\n"
        "        if os.fork() == 0: sum(held[place] for place in range(0, 50 << 20, 4096)); os._exit(0)\n"
        "    for _ in range(3): os.wait()\n"
        "print('done')\n"
    )
    result = run(code, memory_mb=90, disk_mb=120, file_mb=100)
    assert (result.message, result.run.stdout) == ("", "done\n"), result


@needs_namespaces
def test_programs_that_share_files_or_end_their_children_work_as_before() -> None:
    code = (
        "import mmap, os, subprocess, threading\n"
        "with open('shared', 'w+b') as file:\n"
        "    file.truncate(4096); held = mmap.mmap(file.fileno(), 4096)\n"
        "    if os.fork() == 0: held[:5] = b'child'; os._exit(0)\n"
        "    os.wait(); print(held[:5])\n"
        "os.mkdir('a'); os.rename('shared', 'a/shared'); os.truncate('a/shared', 1); print(os.listdir('a'))\n"
        "print(subprocess.run(['sh', '-c', 'echo out > /dev/null; cat < /dev/null; echo done'],\n"
        "    capture_output=True).stdout)\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
        "open('/tmp/x', 'w').write('x'); print(open('/dev/zero', 'rb').read(2))\n"
        "import tempfile; tempfile.TemporaryFile().write(b'x')\n"
    )
    result = run(code)
    assert result.run is not None
    assert result.run.stdout.split("\n") == [
        "b'child'", "['shared']", "b'done\\n'", "thread", "b'\\x00\\x00'", ""
    ], result  # fmt: skip


def test_only_what_the_code_itself_left_is_removed(tmp_path: Path) -> None:
    from asyncrl.rewards.sandbox import jail

    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_text("x")
    (tmp_path / "link").symlink_to("/")
    jail._remove_files_of(os.getuid() + 1, [str(tmp_path)])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "inner", "link"]
    jail._remove_files_of(os.getuid(), [str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_machine_whose_system_calls_are_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*names[:4], "riscv64")))
    result = run("print(1)")
    assert (result.status, "not of 'riscv64'" in result.message) == ("SandboxError", True)


@needs_namespaces
def test_a_disk_cannot_be_filled() -> None:
    code = (
        "import os\ntotal = 0\n"
        "for folder in ('.', '/tmp', '/', '/dev', '/usr', '/dev/shm', '/var/tmp'):\n"
        "    for i in range(20):\n"
        "        try:\n"
        "            with open(f'{folder}/f{i}', 'wb') as f:\n"
        "                for _ in range(64): total += f.write(b'x' * (1 << 20)); f.flush()\n"
        "        except OSError as e: last = e\n"
        "print(total >> 20)"
    )
    result = run(code)
    assert result.run is not None
    assert int(result.run.stdout) <= TIGHT["disk_mb"], result
    flood = run("while True: print('x' * 1000)")
    assert flood.run is not None
    assert len(flood.run.stdout) == 1 << 20
    assert flood.status == "Failed"
