"""What was written as a plain function runs in a thread that nobody waits for."""

import asyncio
import subprocess
import sys
import threading
import weakref

import pytest

from asyncrl.process.daemon_threads import running, use_daemon_threads


def test_results_and_exceptions_come_back():
    async def both():
        use_daemon_threads()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return await asyncio.to_thread(int, "12")

    assert asyncio.run(both()) == 12


def test_an_exit_is_an_exception_and_ends_no_event_loop():
    async def ending():
        use_daemon_threads()
        with pytest.raises(RuntimeError, match=r"it called sys.exit\('bye'\)"):
            await asyncio.to_thread(sys.exit, "bye")

    asyncio.run(ending())


@pytest.mark.parametrize("error", [StopIteration(), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
def test_what_no_future_or_no_event_loop_bears_is_an_exception(error):
    def fails():
        raise error

    async def ending():
        use_daemon_threads()
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await asyncio.wait_for(asyncio.to_thread(fails), 10)

    asyncio.run(ending())


def test_a_call_takes_a_thread_that_has_returned_and_waits_for_no_stuck_one(monkeypatch):
    started, start, stuck = [], threading.Thread.start, threading.Event()
    monkeypatch.setattr("threading.Thread.start", lambda self: (started.append(self), start(self)))

    async def calls():
        use_daemon_threads()
        for _ in range(20):
            await asyncio.to_thread(int)
            await asyncio.sleep(0.005)
        assert len(started) <= 3, "a call may come before the thread of the last one is free"
        waiting = [asyncio.ensure_future(asyncio.to_thread(stuck.wait, 30)) for _ in range(8)]
        assert await asyncio.wait_for(asyncio.to_thread(int, "5"), 10) == 5
        assert running() >= 8
        stuck.set()
        assert await asyncio.gather(*waiting) == [True] * 8
        assert len(started) <= 12

    asyncio.run(calls())


def test_a_free_thread_keeps_no_result():
    class Result:
        pass

    async def call():
        use_daemon_threads()
        reference = weakref.ref(await asyncio.to_thread(Result))
        for _ in range(100):
            if reference() is None:
                return True
            await asyncio.sleep(0.01)
        return False

    assert asyncio.run(call())


STUCK = """
import asyncio, time
from asyncrl.process.daemon_threads import running, use_daemon_threads

async def main():
    use_daemon_threads()
    calls = [asyncio.ensure_future(asyncio.to_thread(time.sleep, 600)) for _ in range(50)]
    await asyncio.wait(calls, timeout=0.2)
    print(running())

asyncio.run(main())
"""


def test_calls_that_never_return_keep_no_process_alive():
    """More of them than the default pool has threads."""
    ended = subprocess.run([sys.executable, "-c", STUCK], timeout=30, capture_output=True, text=True, check=True)
    assert ended.stdout == "50\n"
