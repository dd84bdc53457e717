"""How a call to the buffer ends without its answer."""

from __future__ import annotations

from asyncrl.errors import RunError
from asyncrl.sockets import Endpoint


class BufferTimeout(RunError):
    """No answer in time."""

    @classmethod
    def after(cls, waited_s: float, op: str, address: Endpoint | str) -> BufferTimeout:
        return cls(f"the buffer at {address} did not answer {op} within {waited_s:.1f} s: see logs/buffer.log for why.")


TOO_LARGE = "too_large"
"""Code of a refusal that the client itself gives: the record would not pass the buffer's socket."""


class BufferRefused(RunError):
    """The buffer answered with an error; `code` says which: stale_incarnation, stale_branch, unknown_ticket,
    wrong_actor, old_tokens, too_large, bad_trajectory, malformed, unknown_checkpoint, not_fixed, conflict,
    payload_lost ..."""

    def __init__(self, op: str, code: str, message: str) -> None:
        super().__init__(f"the buffer refused {op}: {message} ({code})")
        self.code = code


class LedgerRestored(Exception):
    """The buffer's host was lost: the learner ends, and its next start resumes from the checkpoint. Not a RunError:
    those end the run."""
