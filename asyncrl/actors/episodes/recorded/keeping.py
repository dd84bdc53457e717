"""Records the turns of one ticket in the buffer, however often that restarts."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Keep
from asyncrl.actors.episodes.recorded.recording import Revoked
from asyncrl.buffer.client import BufferRefused
from asyncrl.buffer.client.retry import Buffer, Calls
from asyncrl.trajectory import Lease, Ticket
from asyncrl.trajectory.turns import Recorded
from asyncrl.wire.turns import Unrecordable

OVER = ("unknown_ticket", "wrong_actor", "old_tokens")
"""Codes of refusals after which the buffer expects no failure: this actor does not hold the attempt, or the buffer has
ended it."""


def keeping(ticket: Ticket, buffer: Buffer, calls: Calls, stored: Callable[[Lease, Recorded], None]) -> Keep | None:
    """What records the turns of `ticket`; None: they are not durable. `stored` is told of each that the buffer has."""
    if not ticket.durable:
        return None

    async def keep(record: Recorded) -> bool:
        try:
            outcome = await calls.until_answered("turn", lambda: buffer.turn(ticket.id, ticket.attempt, record))
        except Unrecordable as error:
            raise EpisodeFailed("env_error", f"what the environment gave cannot be recorded: {error}") from error
        except BufferRefused as refused:
            # An invalid turn counts as a failure of its environment: retried, but not for ever.
            raise EpisodeFailed("" if refused.code in OVER else "env_error", str(refused)) from refused
        if outcome == "revoked":
            raise Revoked(f"{record.named} of {ticket.id}, attempt {ticket.attempt},")
        if outcome == "stored":
            stored((ticket.id, ticket.attempt), record)
        return outcome == "stored"

    return keep
