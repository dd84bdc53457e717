"""The protocols in which agents send messages: chat completions, and two that are translated into them."""

from asyncrl.actors.endpoint.protocols.chat import CHAT
from asyncrl.actors.endpoint.protocols.messages import MESSAGES
from asyncrl.actors.endpoint.protocols.responses import RESPONSES

__all__ = ["CHAT", "PROTOCOLS"]

PROTOCOLS = (CHAT, RESPONSES, MESSAGES)
