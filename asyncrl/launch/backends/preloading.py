"""`python -m asyncrl.launch.backends.preloading FD LIFELINE MODULE ...`: the process that preloaded.py describes. It is
bound to its launcher before it imports anything, and by the kernel alone: with a thread it could not fork."""

import sys

from asyncrl.process import lifeline

if __name__ == "__main__":
    lifeline.arm(int(sys.argv[2]))
    from asyncrl.launch.backends.preloaded import serve

    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
