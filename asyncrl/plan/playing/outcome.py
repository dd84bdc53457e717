"""What a play comes to: a tally while it runs, and its outcome. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.records import Batch
from asyncrl.buffer.rules import Rules
from asyncrl.plan.playing.world import Played
from asyncrl.plan.setting import Setting


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of the measured steps. Seconds are those of the virtual clock; shares are of its time, or of slots and
    time."""

    steps: int
    step_s: float
    tokens_per_s: float
    """Policy tokens that carried loss."""
    generated_per_s: float
    """Policy tokens stored."""
    learner_waits: float
    """For a batch."""
    slots_idle: float
    """Without a ticket."""
    staleness_mean: float
    """Over the tokens that carried loss."""
    staleness_max: int
    dropped: float
    """Share of the groups that ended."""
    late: float
    """Share of the generated policy tokens that came too late."""
    length_bias: float
    """Mean policy tokens per trained trajectory over those per generated one, minus 1."""
    live_trajectories: int
    """Most that were in flight or waiting at once."""
    live_bytes: float
    """Bytes of their payloads."""
    bytes_per_step: float
    """Payloads stored per training step."""
    refused: int
    batches: tuple[tuple[int, ...], ...]
    """Group numbers of every batch, the first ones too."""
    stuck: str = ""
    """Why nothing happened any more; empty: it ran to its end."""


@dataclass(slots=True)
class _Sums:
    """Counted since the first measured step."""

    since: float = 0.0
    waited: float = 0.0
    busy: float = 0.0
    available: float = 0.0
    trained: int = 0
    trained_trajectories: int = 0
    trained_all: int = 0
    """Policy tokens of trained trajectories, masked ones too."""
    aged: float = 0.0
    oldest: int = 0
    stored: int = 0
    stored_trajectories: int = 0
    late: int = 0
    bytes: int = 0
    steps: int = 0
    live: int = 0


class Tally:
    def __init__(self, rules: Rules, setting: Setting, warm_up: int) -> None:
        self._rules, self._setting, self._warm_up = rules, setting, warm_up
        self._sums = _Sums()
        self._measuring = False
        self._slots, self._playing, self._at = 0, 0, 0.0
        self._unmeasured: dict[str, int] = {}
        """Ended groups by state, before the first measured step."""
        self._batches: list[tuple[int, ...]] = []
        self.refused = 0

    @property
    def steps(self) -> int:
        """Measured so far, from one fixed batch to the next."""
        return self._sums.steps

    # What happens

    def slots(self, now: float, more: int) -> None:
        self._pass(now)
        self._slots += more

    def playing(self, now: float, more: int) -> None:
        self._pass(now)
        self._playing += more

    def put(self, outcome: str, played: Played) -> None:
        sums, tokens = self._sums, sum(count for _, count in played.versions)
        sums.bytes += played.bytes
        if outcome == "stored":
            sums.stored += tokens
            sums.stored_trajectories += 1
        else:
            sums.late += tokens

    def fixed(self, now: float, asked_at: float, batch: Batch, groups: Sequence[Group]) -> None:
        self._batches.append(tuple(batch.groups))
        if batch.version < self._warm_up:
            return
        self._pass(now)
        if not self._measuring:
            self._measuring, self._sums = True, _Sums(since=now)
            return
        sums = self._sums
        sums.steps += 1
        sums.waited += now - asked_at
        least = batch.version - batch.bound if self._rules.over_age == "mask" else 0
        for group in groups:
            for received in group.trajectories:
                sums.trained_trajectories += 1
                sums.trained_all += received.policy_tokens
                for version, count in received.versions:
                    if version >= least:
                        sums.trained += count
                        sums.aged += count * (batch.version - version)
                        sums.oldest = max(sums.oldest, batch.version - version)

    def live(self, trajectories: int, ended: dict[str, int]) -> None:
        """After a batch is fixed: the trajectories in flight or waiting, and how groups have ended so far."""
        if not self._sums.steps:
            self._unmeasured = ended
        self._sums.live = max(self._sums.live, trajectories)

    def _pass(self, now: float) -> None:
        passed, self._at = now - self._at, now
        self._sums.busy += passed * self._playing
        self._sums.available += passed * self._slots

    # What it comes to

    def outcome(self, core: Buffer, now: float, stuck: str = "") -> Outcome:
        self._pass(now)
        sums = self._sums
        seconds = max(now - sums.since, 1e-9)
        ended = ended_groups(core)
        trained = ended["trained"] - self._unmeasured.get("trained", 0)
        dropped = ended["dropped"] - self._unmeasured.get("dropped", 0)
        each = sums.bytes / max(1, sums.stored_trajectories)
        generated = sums.stored / max(1, sums.stored_trajectories)
        mean = sums.trained_all / max(1, sums.trained_trajectories)
        return Outcome(
            steps=sums.steps,
            step_s=seconds / max(1, sums.steps),
            tokens_per_s=sums.trained / seconds,
            generated_per_s=sums.stored / seconds,
            learner_waits=min(1.0, sums.waited / seconds),
            slots_idle=1 - sums.busy / max(sums.available, 1e-9),
            staleness_mean=sums.aged / max(1, sums.trained),
            staleness_max=sums.oldest,
            dropped=dropped / max(1, trained + dropped),
            late=sums.late / max(1, sums.late + sums.stored),
            length_bias=mean / generated - 1 if generated and mean else 0.0,
            live_trajectories=sums.live,
            live_bytes=sums.live * each,
            bytes_per_step=sums.bytes / max(1, sums.steps),
            refused=self.refused,
            batches=tuple(self._batches),
            stuck=stuck,
        )


def ended_groups(core: Buffer) -> dict[str, int]:
    """Groups that have ended, by state."""
    counts = core.ledger.account.equation(core.ledger.history.branch)
    dropped = sum(n for name, n in counts.items() if name.startswith("dropped"))
    return {"trained": counts.get("trained", 0), "dropped": dropped}
