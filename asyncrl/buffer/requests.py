"""One request, one answer: what a message asks of the core, checked field by field, and what the reply holds.

Every method raises WireError for a malformed request and Refused for one that cannot be met.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.buffer.client import messages
from asyncrl.buffer.client.messages import flag, held, integer, pair, seconds, text
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.payloads import PayloadLost
from asyncrl.buffer.record import from_record
from asyncrl.buffer.rules import Refused
from asyncrl.wire import Frame, WireError, ticket_id

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
"""How long a request may be held, whatever it asks for."""
Header = Mapping[str, Any]
Answer = tuple[dict[str, Any], Sequence[Frame]]
"""Fields of the reply's header, and its buffers."""


class Answers:
    def __init__(
        self, buffer: Buffer, counts: Counter[str], clock: Callable[[], float], checkpoints: Path | None
    ) -> None:
        self._checkpoints = checkpoints.resolve() if checkpoints is not None else None
        self._buffer = buffer
        self._counts = counts
        self._clock = clock
        self.ops: dict[str, Callable[[Header, Sequence[Frame]], Answer]] = {
            "hello": self._hello,
            "renew": self._renew,
            "put": self._put,
            "fail": self._fail,
            "release": self._release,
            "start": self._start,
            "finished": self._finished,
            "published": self._published,
            "evaluate": self._evaluate,
            "evaluation": self._evaluation,
            "status": self._status,
            "caused": self._caused,
            "stop": self._stop,
        }

    # Requests that may have to wait

    def admit(self, header: Header) -> float:
        """Checks a request that may be held; gives for how many seconds."""
        if header["op"] == "tickets":
            text(header, "actor", 256), pair(header, "held"), integer(header, "credits")
            self._buffer.renew(self._clock(), header["actor"], held(header, "leased"))
        elif header["op"] == "checkpointed":
            integer(header, "incarnation"), integer(header, "version"), integer(header, "batch")
            self._check_folder(text(header, "path"))
            return float("inf")  # it ends by itself
        else:
            self._buffer.batches.check(integer(header, "incarnation"))
            integer(header, "b")
            if not integer(header, "dp_rank") < integer(header, "dp_size", 1):
                raise WireError(f"dp_rank is {header['dp_rank']}, expected less than dp_size = {header['dp_size']}")
        return min(seconds(header, "wait_s"), MAX_WAIT_S)

    def tickets(self, header: Header, last_chance: bool) -> Answer | None:
        """None: there is none yet, and it may wait."""
        lent, why = self._buffer.lend(self._clock(), header["actor"], pair(header, "held"), header["credits"])
        if not lent and not last_chance and not self._buffer.stopping:
            return None
        return messages.encode_tickets(lent, why)

    def batch(self, header: Header, last_chance: bool) -> Answer | None:
        """None: it cannot be filled yet, and may wait."""
        buffer = self._buffer
        answer = buffer.batch(self._clock(), header["incarnation"], header["b"])
        if answer.state == "waiting" and not last_chance and not buffer.stopping:
            return None
        try:
            share = buffer.share(answer, header["dp_rank"], header["dp_size"])
        except PayloadLost as error:
            raise Refused("payload_lost", str(error)) from error
        batch = answer.batch
        fields = {
            "state": answer.state,
            "why": answer.why,
            "failed": answer.failed,
            "groups": list(batch.groups) if batch else [],
            "digests": [digest for _, digest, _ in share],
            "weights": [weight for _, _, weight in share],
            "version": batch.version if batch else buffer.ledger.history.version,
            "branch": buffer.ledger.history.branch,
            "mask_before": buffer.mask_before(batch.version) if batch else None,
            "checkpoint": buffer.checkpoint_wanted,
        }
        return fields, [record for record, _, _ in share]

    def checkpointed(self, header: Header, last_chance: bool) -> Answer | None:
        """None: the ledger's copy is being written."""
        numbers = header["incarnation"], header["version"], header["batch"]
        written = self._buffer.checkpointed(self._clock(), *numbers, Path(header["path"]), wait=last_chance)
        return ({}, ()) if written else None

    def _check_folder(self, path: str) -> None:
        """What comes from a socket names no folder but one of the run's checkpoints."""
        if "\0" in path or self._checkpoints is None or self._checkpoints not in Path(path).resolve().parents:
            raise Refused("bad_checkpoint", f"{path[:200]!r} is no folder below {self._checkpoints}")

    # Requests that are answered at once

    def _hello(self, header: Header, _: Sequence[Frame]) -> Answer:
        role, who = text(header, "role", 64), text(header, "who", 256)
        if role == "actor":
            self._buffer.joined(who)
        log.info("%s joined as %s", who, role)
        history = self._buffer.ledger.history
        about = {"branch": history.branch, "version": history.version, "published": history.published}
        return {"about": about}, ()

    def _renew(self, header: Header, _: Sequence[Frame]) -> Answer:
        revoked = self._buffer.renew(self._clock(), text(header, "actor", 256), held(header, "leases"))
        return {"revoked": [[[id.branch, id.group, id.index], attempt] for id, attempt in revoked]}, ()

    def _put(self, header: Header, buffers: Sequence[Frame]) -> Answer:
        if not 0 < len(buffers) <= messages.MAX_PUTS:
            raise WireError(f"put carries 1 to {messages.MAX_PUTS} records, got {len(buffers)} buffers")
        return {"outcomes": [self._put_one(record) for record in buffers]}, ()

    def _put_one(self, record: Frame) -> str | dict[str, str]:
        """What is wrong with one record is no matter of those that came with it."""
        try:
            trajectory = from_record(record)
            outcome = self._buffer.put(trajectory, record)
        except WireError as error:
            self._counts["refused"] += 1
            log.warning("refused a record: %s", error)
            return {"code": "malformed", "message": str(error)}
        except Refused as error:
            return {"code": error.code, "message": str(error)}
        self._counts["puts" if outcome == "stored" else outcome] += 1
        if outcome != "stored":
            self._counts[f"{outcome}_tokens"] += trajectory.num_policy_tokens
        return outcome

    def _fail(self, header: Header, _: Sequence[Frame]) -> Answer:
        id, reason, detail = ticket_id(header.get("id")), text(header, "reason"), text(header, "detail")
        self._buffer.fail(id, integer(header, "attempt"), reason, detail)
        self._counts["env_failures"] += 1
        return {}, ()

    def _release(self, header: Header, buffers: Sequence[Frame]) -> Answer:
        leases = held(header, "leases")
        prefixes = messages.prefixes(header, buffers, len(leases))
        self._buffer.release(text(header, "actor", 256), leases, prefixes=prefixes)
        return {}, ()

    def _start(self, header: Header, _: Sequence[Frame]) -> Answer:
        branch = None if header.get("branch") is None else integer(header, "branch")
        batch, version = integer(header, "batch"), integer(header, "version")
        started = self._buffer.start(batch, version, branch, flag(header, "fresh"), flag(header, "caused"))
        log.info("learner incarnation %d at batch %d, version %d", started.incarnation, batch, version)
        names = ("incarnation", "branch", "batch", "version", "published")
        return {name: getattr(started, name) for name in names}, ()

    def _finished(self, header: Header, _: Sequence[Frame]) -> Answer:
        outcome = text(header, "outcome")
        if outcome not in ("applied", "guard"):
            raise WireError(f"outcome is {outcome!r}, expected applied or guard")
        version = self._buffer.finished(
            integer(header, "incarnation"), integer(header, "b"), "applied" if outcome == "applied" else "guard"
        )
        return {"version": version}, ()

    def _published(self, header: Header, _: Sequence[Frame]) -> Answer:
        incarnation, branch = integer(header, "incarnation"), integer(header, "branch")
        self._buffer.published(incarnation, branch, integer(header, "version"), text(header, "digest"))
        return {}, ()

    def _evaluate(self, header: Header, _: Sequence[Frame]) -> Answer:
        self._buffer.evaluate(pair(header, "version"), text(header, "label", 256))
        return {}, ()

    def _evaluation(self, header: Header, _: Sequence[Frame]) -> Answer:
        return messages.encode_evaluation(self._buffer.evaluation(text(header, "label", 256))), ()

    def _status(self, header: Header, _: Sequence[Frame]) -> Answer:
        status = self._buffer.status()
        status["service"] = dict(self._counts)
        return {"status": status}, ()

    def _caused(self, header: Header, _: Sequence[Frame]) -> Answer:
        self._buffer.caused()
        return {}, ()

    def _stop(self, header: Header, _: Sequence[Frame]) -> Answer:
        self._buffer.stop()
        return {}, ()
