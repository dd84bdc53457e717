"""What was written as a plain function runs in a thread that nobody waits for."""

import asyncio
import subprocess
import sys

import pytest

from asyncrl.process.daemon_threads import use_daemon_threads


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
