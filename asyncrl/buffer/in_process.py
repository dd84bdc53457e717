"""The buffer inside this process: its real core and ledger behind the client's methods, without sockets or real time.

    with InProcessBuffer.of(config) as buffer:
        incarnation = buffer.start(0, 0, None).incarnation
        buffer.published(incarnation, 0, 0, "digest")
        for ticket in buffer.tickets("actor-0", (0, 0), 8, [], 0.0).tickets:
            buffer.put(play(ticket))
        batch = buffer.batch(incarnation, 0, 0, 1, 0.0)

Every request passes through the same structures and handlers as in the buffer process and is committed before its
reply. A request that would be held lets its `wait_s` pass on the virtual clock and is then answered as it stands, since
no other process can change anything meanwhile.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.buffer.client import codec
from asyncrl.buffer.client.blocking import BlockingBuffer
from asyncrl.buffer.client.messages import Request
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.requests.handlers import Answer, Requests
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.tasks.sources import open_curriculum, open_held_out, open_source
from asyncrl.config import Config
from asyncrl.data.base import Curriculum, TaskSource
from asyncrl.data.demonstrations import Demonstrations, open_demonstrations
from asyncrl.wire import Frame, WireError

T = TypeVar("T")
MEMORY = Path("/dev/shm")


class VirtualClock:
    """Time that passes only by `advance`, from 0 on; the ledger's times are read from it as well."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class InProcessBuffer(BlockingBuffer, AbstractContextManager["InProcessBuffer"]):
    def __init__(
        self,
        rules: Rules,
        source: TaskSource,
        *,
        folder: Path | None = None,
        clock: VirtualClock | None = None,
        curriculum: Curriculum | None = None,
        checkpoints: Path | None = None,
        held_out: Mapping[str, TaskSource] | None = None,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        """
        Args:
            folder: holds the ledger, and continues the one that is there; None: in memory, gone at `close`.
            clock: advanced by the caller, so that leases lapse, and by requests that wait.
            held_out: the sources of held-out sets that have one of their own.
            checkpoints: the folder below which checkpoints may be written, and where the numbers of branches are
                noted; None: nowhere.
        """
        super().__init__("in-process")
        self.clock = clock or VirtualClock()
        self._open = ExitStack()
        if folder is None:
            memory = tempfile.TemporaryDirectory(prefix="asyncrl-buffer-", dir=MEMORY if MEMORY.is_dir() else None)
            folder = Path(self._open.enter_context(memory))
        database = Database(folder, "off", wall_clock=self.clock)
        self._open.callback(database.close)
        beside: dict[str, Any] = {"held_out": held_out, "demonstrations": demonstrations, "checkpoints": checkpoints}
        self.core = Buffer(database, rules, source, self.clock.now, curriculum, **beside)
        self._requests = Requests(self.core, Counter(), self.clock, checkpoints)
        self.core.commit(self.clock.now)

    @classmethod
    def of(cls, config: Config, **options: Any) -> InProcessBuffer:
        """The buffer of a run with this config. Raises ConfigError."""
        source, held_out = open_source(config), open_held_out(config)
        given: dict[str, Any] = {"held_out": held_out, "demonstrations": open_demonstrations(config)}
        return cls(Rules.of(config), source, curriculum=open_curriculum(config, source), **given, **options)

    def close(self) -> None:
        self._open.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Request[T], frames: Sequence[Frame] = ()) -> T:
        answer = Answer()
        try:
            answer = self._answer(self.core.limits.decode([codec.encode_request(request, 0), *frames]), frames)
            header = codec.encode_reply(0, answer.reply)
        except WireError as error:
            header = codec.encode_refusal(0, "malformed", str(error))
        except Refused as error:
            header = codec.encode_refusal(0, error.code, str(error))
        self.core.commit(self.clock.now)
        return codec.decode_reply(request, codec.decode_header(header), answer.frames)

    def _answer(self, request: Request[Any], frames: Sequence[Frame]) -> Answer:
        handler = self._requests.handlers[type(request)]
        self.core.tick(self.clock.now)
        handler.check(request)
        answer = handler.answer(request, frames, False)
        if answer is None:
            wait_s = handler.may_wait(request) if handler.may_wait is not None else 0.0
            self.clock.advance(wait_s if wait_s < float("inf") else 0.0)
            self.core.tick(self.clock.now)
            answer = handler.answer(request, frames, True)
        assert answer is not None, f"{request.op} must be answered at once"
        return answer
