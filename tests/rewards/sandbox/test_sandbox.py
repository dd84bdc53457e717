"""Hostile code is contained, reported, and nothing of it is left running."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.rewards.sandbox import HttpSandbox, LocalSandbox, Run
from asyncrl.rewards.sandbox.server import make_server
from tests.rewards.sandbox.boxes import TIGHT, needs_namespaces, run


@needs_namespaces
def test_code_runs_with_its_input_and_files_and_gives_some_back() -> None:
    code = "import sys\nprint(sys.stdin.read() + open('data/in.txt').read())\nopen('out.txt', 'w').write('made')"
    result = run(code, stdin="a", files={"data/in.txt": b"b"}, fetch_files=("out.txt", "none", "/etc/passwd", "../x"))
    assert (result.status, result.run and result.run.stdout, result.files) == ("Success", "ab\n", {"out.txt": b"made"})
    failed = run("import sys\nprint('x', file=sys.stderr)\nsys.exit(3)")
    assert failed.run is not None
    assert (failed.status, failed.run.status, failed.run.return_code) == ("Failed", "Finished", 3)
    assert failed.run.stderr == "x\n"
    shell = run("echo $((1 + 1))", language="bash")
    assert shell.run is not None
    assert shell.run.stdout == "2\n"
    assert run("", language="cobol").status == "SandboxError"
    assert "outside the sandbox" in run("", files={"../x": b""}).message


HOSTILE = {
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "killed after 1.0 s"),
    "fork bomb in bash": ("b() { b | b & }; b; wait; sleep 60", "killed after 1.0 s"),
    "memory bomb": ("x = bytearray(10**10)", "exit code 1"),
    "memory bomb by children": (
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0: x = b'x' * (60 << 20); time.sleep(60)\n"
        "time.sleep(60)",
        "more than 128 MB of memory",
    ),
    "infinite loop": ("while True: pass", "killed after 1.0 s"),
    "sleeps with signals ignored": (
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(60)",
        "killed after 1.0 s",
    ),
    "children that outlive it": (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0: time.sleep(600)\n        os._exit(0)\nprint('over', flush=True)\nos._exit(0)",
        "",
    ),
}


@needs_namespaces
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_is_contained_and_reported(name: str) -> None:
    code, message = HOSTILE[name]
    began = time.monotonic()
    seconds = 1.0 if "after" in message else 10.0
    result = run(code, seconds=seconds, language="bash" if "bash" in name else "python")
    assert message in result.message, result
    assert result.status == ("Failed" if message else "Success"), result
    assert result.run is not None
    assert result.run.status == ("TimeLimitExceeded" if "after" in message else "Finished")
    assert time.monotonic() - began < 60, "a bound on a busy machine; the limit itself is told in the message"


@needs_namespaces
def test_the_code_cannot_reach_its_parents_or_anybody_else() -> None:
    code = (
        "import os, signal\n"
        "print('pids', sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))\n"
        "for pid in (os.getppid(), 1, PARENT):\n"
        "    try: os.kill(pid, signal.SIGKILL); print('sent', pid == PARENT)\n"
        "    except OSError as e: print(type(e).__name__)\n"
        "try: print(open('/proc/1/environ').read())\n"
        "except OSError as e: print(type(e).__name__)\n"
        "try: print(os.listdir('/proc/1/root'))\n"
        "except OSError as e: print(type(e).__name__)\n"
        "import time; time.sleep(0.1); print('alive')"
    )
    result = run(code.replace("PARENT", str(os.getpid())))
    assert result.run is not None
    assert result.run.stdout.splitlines()[0] == "pids [1, 2]", result
    assert "sent True" not in result.run.stdout
    assert result.run.stdout.splitlines()[-3:] == ["PermissionError", "PermissionError", "alive"]


@needs_namespaces
def test_the_run_folder_and_home_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "run" / "config.yaml"
    secret.parent.mkdir()
    secret.write_text("secret")
    secret.chmod(0o644)
    code = (
        "import os\n"
        f"for path in ({str(secret)!r}, {str(Path(__file__))!r}, '/etc/passwd', '/proc/1/root{secret}'):\n"
        "    try: print('read', open(path).read()[:9])\n"
        "    except OSError as e: print(type(e).__name__)\n"
        "print(sorted(os.environ))\n"
        "print(len([n for n in os.listdir('/proc/self/fd') if int(n) > 2]))\n"
        "for call in (lambda: os.chroot('.'), lambda: os.setuid(0), lambda: os.open('/usr/x', os.O_CREAT)):\n"
        "    try: call(); print('did')\n"
        "    except OSError as e: print('refused')\n"
        "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000), ctypes.CDLL(None).unshare(0x20000))\n"
    )
    result = run(code)
    assert result.run is not None
    assert "read" not in result.run.stdout, result
    assert "did" not in result.run.stdout
    assert result.run.stdout.count("refused") == 3
    assert "ASYNCRL" not in result.run.stdout
    assert result.run.stdout.splitlines()[5] == "1", "the folder that is being listed, nothing inherited"
    assert result.run.stdout.splitlines()[-1] == "-1 -1", "no namespaces of its own"


@needs_namespaces
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code = (
            "import socket\n"
            f"for place in (('127.0.0.1', {listening.getsockname()[1]}), ('10.255.255.1', 80)):\n"
            "    try: socket.create_connection(place, timeout=2); print('connected')\n"
            "    except OSError as e: print(e.errno)\n"
            "print(socket.if_nameindex())"
        )
        result = run(code)
    assert result.run is not None
    assert "connected" not in result.run.stdout, result
    assert result.run.stdout.splitlines()[-1] == "[(1, 'lo')]"


@needs_namespaces
@pytest.mark.parametrize("isolation", ["full", "process", "root of one user"])
def test_the_limits_hold_for_a_user_without_privileges_too(isolation: str) -> None:
    user, isolation = ("0", "full") if isolation == "root of one user" else ("1000", isolation)
    bomb, *others = (HOSTILE[name][0] for name in ("fork bomb", "memory bomb by children", "children that outlive it"))
    played = [("print(1)", 10.0), (bomb, 1.0), *((code, 10.0) for code in others)]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from asyncrl.rewards.sandbox import LocalSandbox, Run\n"
        f"box = LocalSandbox(isolation={isolation!r}, memory_mb=128, processes=12, open_files=32, file_mb=4)\n"
        f"for code, seconds in {played!r}:\n"
        "    result = box.run_now(Run(code, run_timeout=seconds))\n"
        "    print(result.status, result.message)\n"
    )
    # A root's files can be read by a user that is root outside and has no privileges inside.
    command = ["unshare", "-U", f"--map-user={user}", f"--map-group={user}"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*command, sys.executable, "-c", code, str(Path(__file__).parents[3])],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    said = [line.strip() for line in done.stdout.splitlines()]
    # The kernel counts no processes of who is root outside: there, memory is what ends a fork bomb.
    assert said[1] in ("Failed killed after 1.0 s", "Failed killed: more than 128 MB of memory"), done
    assert [said[0], *said[2:]] == ["Success", "Failed killed: more than 128 MB of memory", "Success"], done


@needs_namespaces
def test_a_jail_dies_with_whoever_asked_for_it() -> None:
    code = (
        "import sys\nfrom asyncrl.rewards.sandbox import LocalSandbox, Run\n"
        "LocalSandbox(memory_mb=128, processes=8).run_now(\n"
        "    Run('import time\\nwhile True: time.sleep(1)', run_timeout=300))\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": "/tmp"})
    try:
        deadline = time.monotonic() + 60
        below: list[psutil.Process] = []
        while len(below) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
            below = psutil.Process(asking.pid).children(recursive=True)
        assert len(below) == 3, "supervisor, init, code"
    finally:
        asking.kill()
        asking.wait()
    _, left = psutil.wait_procs(below, timeout=10)
    assert left == []


@needs_namespaces
def test_the_contract_over_http() -> None:
    server = make_server(LocalSandbox(**TIGHT), "127.0.0.1", 0, concurrency=2)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        remote = HttpSandbox(url, retries=0)
        asked = Run("print(open('f').read() + input())", stdin="b", files={"f": b"a"}, fetch_files=("f",))
        result = asyncio.run(remote.run(asked))
        assert (result.status, result.files, result.run and result.run.stdout) == ("Success", {"f": b"a"}, "ab\n")
        assert asyncio.run(remote.run(Run("raise ValueError"))).status == "Failed"
        with urllib.request.urlopen(f"{url}/v1/ping", timeout=10) as answer:
            assert json.loads(answer.read()) == "pong"
        refused = asyncio.run(remote.run(Run("1", run_timeout=10**6)))
        assert refused.status == "SandboxError"
        assert "run_timeout is 1000000.0" in refused.message
        huge, deep = b"1" + b"0" * 400, b"[" * 100_000
        for body, said in (
            (b"{", "Expecting"),
            (b'{"code": 1}', "expected a JSON object with `code`"),
            (b'{"code": "", "run_timeout": %s}' % huge, "run_timeout is 1000"),
            (b'{"code": "", "run_timeout": -%s}' % huge, "run_timeout is -1000"),
            (b'{"code": "", "run_timeout": NaN}', "run_timeout is nan"),
            (b'{"code": "", "run_timeout": Infinity}', "run_timeout is inf"),
            (b'{"code": "", "memory_limit_MB": %s}' % huge, "memory_limit_MB is 1000"),
            (b'{"code": "\\ud800"}', "code is"),
            (b'{"code": "", "stdin": "\\ud800"}', "stdin is"),
            (deep, "recursion"),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(f"{url}/run_code", body, timeout=10)
            assert (error.value.code, said in error.value.read().decode()) == (422, True), body[:80]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    gone = asyncio.run(remote.run(Run("1")))
    assert gone.status == "SandboxError"
    assert "gave no answer in 1 attempts" in gone.message


@needs_namespaces
def test_the_report_is_out_of_reach_of_the_code_also_where_the_caller_has_many_files_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asyncrl.rewards.sandbox import local

    made = local._memory

    def high(text: str = "") -> Any:
        with made(text) as file:
            number = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, first)
        return os.fdopen(number, "w+b")

    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The highest numbers that this system gives, which are those just below 1,024 on some.
    may = 6000 if most[1] == resource.RLIM_INFINITY else min(6000, most[1])
    first = may - 24
    resource.setrlimit(resource.RLIMIT_NOFILE, (may, most[1]))
    monkeypatch.setattr(local, "_memory", high)
    try:
        result = run("import os\nprint(sorted(map(int, os.listdir('/proc/self/fd'))))")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert result.run is not None
    assert max(json.loads(result.run.stdout)) < first, result
