"""The proof that processes which meet as ranks have the run's key. Pure: what carries the messages is an argument.

    rank r ── 32 random bytes, its challenge to s ──> rank s       for each pair, both ways
    rank r <── HMAC(key, "s answers r", both challenges) ── rank s

Every rank compares the answer of every other one. What was recorded at an earlier meeting is no answer to a new
challenge, and an answer that is sent back to its author names the wrong rank.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Sequence

CHALLENGE_BYTES = 32
Exchange = Callable[[Sequence[bytes]], list[bytes]]
"""Sends message r to rank r, and gives what each rank has sent here, in rank order. All messages have one length."""


class NotOfThisRunError(RuntimeError):
    """A process in a rank's place does not have the run's key. Not for good: all ranks are started again."""


def prove(exchange: Exchange, key: bytes, rank: int, size: int, random: Callable[[int], bytes] = os.urandom) -> None:
    """Proves to every other rank that this one has `key`, and demands the same of each. Raises NotOfThisRunError."""
    mine = [random(CHALLENGE_BYTES) for _ in range(size)]
    theirs = exchange(mine)
    for other, challenge in enumerate(theirs):
        if len(challenge) != CHALLENGE_BYTES:
            raise NotOfThisRunError(_forged(other, rank))
    answers = exchange([answer(key, rank, other, theirs[other], mine[other]) for other in range(size)])
    refuse_forged(key, rank, mine, theirs, answers)


def answer(key: bytes, by: int, to: int, challenge: bytes, own: bytes) -> bytes:
    """The answer of rank `by` to the challenge of rank `to`; `own`: its challenge to that rank."""
    return hmac.digest(key, b"rank %d answers rank %d " % (by, to) + challenge + own, "sha256")


def refuse_forged(
    key: bytes, rank: int, mine: Sequence[bytes], theirs: Sequence[bytes], answers: Sequence[bytes]
) -> None:
    """Raises NotOfThisRunError, naming the first rank whose answer is wrong. `mine`, `theirs`: the challenges."""
    for other, given in enumerate(answers):
        if not hmac.compare_digest(given, answer(key, other, rank, mine[other], theirs[other])):
            raise NotOfThisRunError(_forged(other, rank))


def _forged(other: int, rank: int) -> str:
    return (
        f"the process that came as rank {other} of the learner does not have this run's key: rank {rank} exchanges "
        "nothing with it. Something else than the run reaches its ports: keep them to the nodes."
    )
