"""The conversation of one episode, and the row that it is rendered into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.actors.episodes.compaction import Compaction
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.episodes.rendering import Rendering
from asyncrl.actors.episodes.rows import OpenRow
from asyncrl.data.base import Message
from asyncrl.rendering.template import warn_of_prefix_break


class Conversation:
    """The messages so far. Its methods raise EpisodeFailed where the chat template refuses them, and PromptTooLong."""

    def __init__(self, rendering: Rendering, progress: Progress) -> None:
        self.messages: list[Message] = []
        """What the policy's next turn is asked with."""
        self._before: list[Message] = []
        """Those that summaries have replaced ..."""
        self._from = 0
        """... and where in `messages` those behind them begin."""
        self._rendering, self._progress = rendering, progress
        self._first: Sequence[Message] = ()
        self._tools: Sequence[Any] = ()

    @property
    def transcript(self) -> list[Message]:
        """All messages of the episode in their order, with the requests for summaries, the summaries and what followed:
        `messages`, where nothing was summed up."""
        return [*self._before, *self.messages[self._from :]]

    async def begin(self, messages: Sequence[Message], tools: Sequence[Any]) -> OpenRow:
        """The first row: the environment's first messages, with the tools of the policy."""
        self._first, self._tools, self.messages = list(messages), tools, list(messages)
        return await self._new_row()

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        """The policy's message, which now ends the conversation."""
        message = self._rendering.parse(sampled_ids)
        self.messages = [*self.messages, message]
        return message

    def read(self, sampled_ids: Sequence[int]) -> Message:
        """The message of sampled ids; the conversation stays as it is."""
        return self._rendering.parse(sampled_ids)

    async def go_on(self, row: OpenRow, messages: Sequence[Message], *, closed: bool) -> OpenRow:
        """The row of the policy's next turn: `row` and the environment's messages, or a new one with the whole
        conversation, where the chat template changes earlier tokens. `closed`: the policy's message is complete."""
        tail = await self._rendering.tail(self.messages, messages, self._tools, row, closed=closed)
        self.messages = [*self.messages, *messages]
        if tail is not None:
            row.context(tail)
            return row
        self._progress.prefix_broke()
        warn_of_prefix_break(messages[0]["role"])
        return await self._new_row()

    async def compact(self, row: OpenRow, summary: Sequence[int], compaction: Compaction) -> OpenRow:
        """The row that goes on from the policy's summary, whose ids end `row`."""
        self._before, self._from = self.transcript, len(self._first)
        self.messages = compaction.summed_up(self._first, self._rendering.parse(summary))
        begun = await self._new_row()
        self._progress.compacted(len(row.ids), len(begun.ids))
        return begun

    async def _new_row(self) -> OpenRow:
        return OpenRow(await self._rendering.initial(self.messages, self._tools))
