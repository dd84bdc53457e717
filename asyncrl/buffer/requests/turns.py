"""One recorded turn at the door: read, checked against the run's bounds, kept."""

from __future__ import annotations

import logging
from collections import Counter

from asyncrl.buffer.client.messages import Refusal, TurnOutcome
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.retention import ROOM_FOR_TURNS
from asyncrl.buffer.rules import Refused
from asyncrl.wire import Frame, WireError
from asyncrl.wire.turns import decode_turn

log = logging.getLogger(__name__)


def record_turn(buffer: Buffer, actor: str, frame: Frame, counts: Counter[str]) -> TurnOutcome | Refusal:
    """The outcome of one of several turns in a request. A refused one does not affect those of other attempts."""
    try:
        id, attempt, turn = decode_turn(frame, buffer.limits.record_bytes)
        buffer.limits.check_turn(turn, id)
        outcome = buffer.record_turn(actor, id, attempt, turn)
    except WireError as error:
        counts["refused"] += 1
        log.warning("refused a recorded turn: %s", error)
        return Refusal("malformed", str(error))
    except Refused as error:
        log.warning("refused a recorded turn: %s", error)
        return Refusal(error.code, str(error))
    if outcome == "full" and not counts["turns_full"]:
        log.warning(
            "recorded turns find no room on the disk: the payloads have reached %g of buffer.max_disk_gb. Episodes go "
            "on without recording; one that is interrupted goes on behind its last recorded turn. Raise "
            "buffer.max_disk_gb, or give smaller snapshots (this warning comes once)",
            ROOM_FOR_TURNS,
        )  # fmt: skip
    counts["turns" if outcome == "stored" else f"turns_{outcome}"] += 1
    return outcome
