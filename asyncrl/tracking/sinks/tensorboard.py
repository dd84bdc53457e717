"""Writes records as TensorBoard's event files, into `tensorboard/` of the run folder; torch is not needed.

Imported only when the sink is used: `pip install 'asyncrl[tensorboard]'`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event as Written
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from asyncrl.tracking.state import Event, Record

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder


class TensorBoard:
    """One file of events for every start of the run. TensorBoard reads a folder's files as one run."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._writer = EventFileWriter(str(run.path / "tensorboard"))
        self._begun = False

    def record(self, record: Record) -> None:
        step, now = int(record["step"]), time.time()
        if not self._begun:
            # After a resume, steps may be done again: TensorBoard then discards the earlier points from `step` on.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Written(wall_time=now, step=step, session_log=start))
            self._begun = True
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if name != "step" and math.isfinite(value)
        ]
        self._writer.add_event(Written(wall_time=now, step=step, summary=Summary(value=values)))

    def event(self, event: Event) -> None:
        """Do nothing: events stay in events.jsonl, since TensorBoard shows numbers over steps."""

    def close(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()
