"""A taskset of the package verifiers (0.4): sums, with a reward for the right answer (configs/verifiers.yaml)."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer == (trace.last_reply or "").strip())


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for a in range(10, 30):
            for b in range(10, 20):
                yield Sum(Data(prompt=f"Work out {a} + {b}", answer=str(a + b)), self.config.task)


__all__ = ["Sums"]
