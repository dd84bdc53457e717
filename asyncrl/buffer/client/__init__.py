"""The one door to the buffer process, for actors and learner: it reaches nothing else of the buffer but the record.

blocking.py, asynchronous.py    the two clients
turns.py                        recorded turns on their way
messages.py                     every request and reply, told once for both ends
retry.py                        when a request is sent again, and a call repeated
errors.py                       how a call ends without its answer
"""

from asyncrl.buffer.client.asynchronous import AsyncBufferClient
from asyncrl.buffer.client.blocking import BufferClient
from asyncrl.buffer.client.errors import BufferRefused, BufferTimeout, LedgerRestored
from asyncrl.buffer.client.messages import BatchReply, EvalReply, EvalSetReply, Start, TicketReply

__all__ = [
    "AsyncBufferClient",
    "BatchReply",
    "BufferClient",
    "BufferRefused",
    "BufferTimeout",
    "EvalReply",
    "EvalSetReply",
    "LedgerRestored",
    "Start",
    "TicketReply",
]
