"""The one door to the buffer process, for actors and learner."""

from asyncrl.buffer.client.blocking import (
    AsyncBufferClient,
    BatchReply,
    BufferClient,
    BufferRefused,
    BufferTimeout,
    EvalReply,
    EvalResult,
    LedgerRestored,
    Start,
    TicketReply,
)

__all__ = [
    "AsyncBufferClient",
    "BatchReply",
    "BufferClient",
    "BufferRefused",
    "BufferTimeout",
    "EvalReply",
    "EvalResult",
    "LedgerRestored",
    "Start",
    "TicketReply",
]
