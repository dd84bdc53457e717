"""An honest peer in a process of its own: `python -m tests.honest_client RUN LISTENER REQUEST` asks every tenth of a
second until its standard input ends, and prints a line for each answer: seconds, and the version that it names."""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from asyncrl.run_folder import RunFolder
from asyncrl.sockets import Link
from asyncrl.wire import pack, unpack

ANSWER_MS = 30_000


def main(run: Path, listener: str, request: dict[str, Any]) -> None:
    link: Link[Any] = Link(zmq.Context(), zmq.DEALER, RunFolder(run).address(listener), identity="honest")
    n, version = 0, 0
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        n += 1
        began = time.monotonic()
        link.socket.send(pack(request | {"n": n}))
        answered = 0
        while answered != n:
            if not link.socket.poll(ANSWER_MS):
                sys.exit(f"no answer of {listener} within {ANSWER_MS / 1000:g} s")
            answer = unpack(link.socket.recv_multipart()[0])
            answered = answer["n"]
        version = (answer.get("reply") or {}).get("version", version)
        print(time.monotonic() - began, version, flush=True)
    link.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
