"""Which groups a scorer gets, and what becomes of the scores that it brings. Decides only: time is an argument.

An unscored group is `waiting`, and no batch may take it. It is issued in issue order, under `wait` earliest deadline
first; filters have judged it before. Its age, its places and `buffer.wait_s` go on counting, the last only while a
scorer answers. A lease that is not renewed lapses, and the group is issued again. The first valid scores win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.buffer.client.messages import GroupLease, ScoreOutcome, ScoringReply
from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.records import Batch
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.scoring import rows
from asyncrl.buffer.scoring.clock import AnsweredClock
from asyncrl.buffer.scoring.rows import Scored
from asyncrl.buffer.tickets.queue import IssueQueue
from asyncrl.trajectory import LogHead
from asyncrl.wire import Frame
from asyncrl.wire.teacher_scores import GroupScores

_LIVE = "g.state IN ('in_flight', 'waiting', 'assigned')"

ScoringLease = tuple[int, int]
"""(group, attempt)"""


@dataclass(slots=True)
class _Active:
    attempt: int
    scorer: str
    expires: float


class Scoring:
    def __init__(self, ledger: Ledger, rules: Rules, queue: IssueQueue, now: float) -> None:
        self._ledger, self._rules, self._queue = ledger, rules, queue
        self.wanted = rules.scored
        self.clock = AnsweredClock(rules.lease_s, now)
        self._now = now
        self._scored = rows.read(ledger.db, _LIVE)
        """Scores of all live groups, at least."""
        self._active: dict[int, _Active] = {}
        self._issued = rows.issued(ledger.db)
        for number, attempt, scorer in rows.outstanding(ledger.db):
            self._active[number] = _Active(attempt, scorer, now + rules.lease_s)
        self.teacher = ledger.db.get(rows.TEACHER) or ""
        self._logs: dict[str, LogHead] = {}
        self.why_silent = ""
        """What the scorer that asked last says of its teacher; empty: it answers."""

    # What the rest of the buffer asks

    def ready(self, group: Group) -> bool:
        """Whether a batch may take this complete group as far as scores go."""
        return not self.wanted or group.number in self._scored

    def of(self, number: int) -> Scored | None:
        """The scores of a live group, or of one that ended."""
        if not self.wanted:
            return None
        return self._scored.get(number) or rows.read(self._ledger.db, "g.number = ?", (number,)).get(number)

    def waiting(self) -> list[Group]:
        """Complete groups without scores."""
        if not self.wanted:
            return []
        return [g for g in self._ledger.live.values() if g.state == "waiting" and g.number not in self._scored]

    def wait_clock(self, now: float) -> float:
        """The time that `buffer.wait_s` counts."""
        self._now = now
        return self.clock(now) if self.wanted else now

    def why_fewer(self) -> str:
        """What the groups without scores wait for; empty: there are none."""
        unscored = len(self.waiting())
        if not unscored:
            return ""
        return f"{unscored} are not scored yet{'' if self.answering else f' ({self.silence})'}"

    @property
    def answering(self) -> bool:
        """Whether a scorer answered lately, as of the last look at the clock."""
        return self.clock.answers(self._now)

    @property
    def silence(self) -> str:
        """Why no scorer answers."""
        return self.why_silent or "no scorer has asked for groups lately"

    @property
    def leases(self) -> dict[str, int]:
        """How many groups each scorer holds."""
        held = [active.scorer for active in self._active.values()]
        return {scorer: held.count(scorer) for scorer in sorted(set(held))}

    def fix(self, batch: Batch) -> None:
        """Records the scores that a new batch takes."""
        for number in batch.groups if self.wanted else ():
            scored = self.of(number)
            if scored is not None:
                rows.use(self._ledger.db, batch.serial, number, scored.digest)

    def reload(self) -> None:
        """After a fork groups of the batches that were left wait again, with their scores; after a loss on the disk
        some have none any more."""
        self._scored = rows.read(self._ledger.db, _LIVE)

    # Scorers

    def extend(self, seconds: float) -> None:
        """Gives every scorer so much more time."""
        for active in self._active.values():
            active.expires += seconds

    def joined(self, scorer: str) -> None:
        """A new process under this name: the groups of its predecessor are issued again."""
        for number, active in list(self._active.items()):
            if active.scorer == scorer:
                self._end(number, "lapsed")

    def logged(self, scorer: str, head: LogHead) -> None:
        """The log of a scorer has reached this line."""
        if self._logs.get(scorer) != head:
            self._logs[scorer] = head
            values = (scorer, head.line, head.digest)
            self._ledger.db.write("INSERT OR REPLACE INTO score_logs VALUES (?, ?, ?)", values)

    def renew(
        self, now: float, scorer: str, held: Sequence[ScoringLease], returned: Sequence[ScoringLease], silent: str
    ) -> list[ScoringLease]:
        """Renews the leases of a scorer, and takes back those that it returns. Returns those that it holds no longer.
        `silent`: why its teacher does not answer; empty if it does."""
        self._now, self.why_silent = now, silent
        if silent:
            self.clock.silent(now, scorer)
        else:
            self.clock.heard(now, scorer)
        for number, attempt in returned:
            if self._is_of(number, attempt, scorer):
                self._end(number, "returned")
        revoked = []
        for number, attempt in held:
            if self._is_of(number, attempt, scorer) and self._is_free(number):
                self._active[number].expires = now + self._rules.lease_s
            else:
                revoked.append((number, attempt))
        return revoked

    def issue(self, now: float, scorer: str, credits: int) -> ScoringReply:
        """At most `credits` groups; with fewer, why there are no more. The trajectories are read by the caller."""
        if not self.wanted:
            raise Refused("no_scores", "learner.teacher.scored_by is learner in this run: it takes no scores")
        candidates = [g for g in self.waiting() if g.number not in self._active]
        if self._rules.over_age == "wait":
            candidates.sort(key=lambda g: (self._queue.last_version(g), g.number))
        leases = []
        for group in candidates[:credits]:
            attempt = rows.begin(self._ledger.db, group.number, scorer, self._issued)
            self._issued += 1
            self._active[group.number] = _Active(attempt, scorer, now + self._rules.lease_s)
            digests = tuple(r.digest for r in group.trajectories)
            leases.append(GroupLease(group.branch, group.number, attempt, digests))
        why = "" if len(leases) == credits else "every complete group is scored, or is being scored"
        return ScoringReply(tuple(leases), why)

    def accept(self, scores: GroupScores, record: Frame) -> ScoreOutcome:
        """The first valid scores of a group win. Raises Refused."""
        group = self._ledger.load(scores.group)
        if group is None or group.branch != scores.branch:
            if scores.branch < self._ledger.history.branch:
                return "late"  # this part of history was lost with its host
            raise Refused("unknown_group", f"group {scores.branch}.{scores.group} was never issued")
        if rows.scorer_of(self._ledger.db, scores.group, scores.attempt) != scores.scorer:
            raise Refused(
                "wrong_scorer", f"{scores.scorer} brings scores of group {scores.group}, which it was not given"
            )
        digest = scores.digest()
        return self._late_or_duplicate(group, scores, digest) or self._store(group, scores, digest, record)

    def _late_or_duplicate(self, group: Group, scores: GroupScores, digest: str) -> ScoreOutcome | None:
        """None: the first scores of the group, which needs them. Equal numbers under another attempt are late."""
        stored, present = self.of(scores.group), tuple(r.digest for r in group.trajectories)
        if stored is not None and (stored.digest, stored.attempt) == (digest, scores.attempt):
            return "duplicate"
        needed = stored is None and group.state == "waiting" and present == scores.trajectories
        if needed and not rows.is_lost(self._ledger.db, scores.group, scores.attempt):
            return None
        if stored is None or stored.attempt != scores.attempt:
            rows.end(self._ledger.db, scores.group, scores.attempt, "late")
        if self._is_of(scores.group, scores.attempt, scores.scorer):
            del self._active[scores.group]
        return "late"

    def _store(self, group: Group, scores: GroupScores, digest: str, record: Frame) -> ScoreOutcome:
        self._check(group, scores)
        location = self._ledger.db.payloads.append(record)
        if not self.teacher:
            self.teacher = scores.teacher
            self._ledger.db.set(rows.TEACHER, scores.teacher)
        self._scored[group.number] = rows.insert(self._ledger.db, scores, digest, location)
        active = self._active.pop(group.number, None)
        if active is not None and active.attempt != scores.attempt:
            rows.end(self._ledger.db, group.number, active.attempt, "revoked")
        rows.end(self._ledger.db, group.number, scores.attempt, "scored")
        return "stored"

    def _check(self, group: Group, scores: GroupScores) -> None:
        """Raises Refused for scores that do not fit the group, and for those of another teacher."""
        if self.teacher and scores.teacher != self.teacher:
            raise Refused(
                "another_teacher",
                f"the scores of group {group.number} are of the teacher {scores.teacher[:12]}, and this run learns "
                f"from {self.teacher[:12]}: serve the first one again, or begin another run",
            )
        if scores.k < self._rules.score_k:
            raise Refused(
                "bad_scores",
                f"the scores of group {group.number} have {scores.k} words a token, learner.teacher.k is "
                f"{self._rules.score_k}",
            )
        tokens = tuple(r.policy_tokens for r in group.trajectories)
        if (brought := tuple(len(each) for each in scores.scores)) != tokens:
            raise Refused(
                "bad_scores",
                f"the scores of group {group.number} are of {list(brought)} tokens, its trajectories have "
                f"{list(tokens)} sampled ones",
            )

    def tick(self, now: float) -> None:
        """Ends the leases that were not renewed in time, and those of groups that need no scores any more."""
        self._now = now
        for number, active in list(self._active.items()):
            if not self._is_free(number):
                self._end(number, "revoked")
            elif active.expires <= now:
                self._end(number, "lapsed")
        if len(self._scored) > 4 * len(self._ledger.live) + 1024:
            self._scored = {n: scored for n, scored in self._scored.items() if n in self._ledger.live}

    def _is_free(self, number: int) -> bool:
        """Whether the group still waits for scores."""
        group = self._ledger.live.get(number)
        return group is not None and group.state == "waiting" and number not in self._scored

    def _is_of(self, number: int, attempt: int, scorer: str) -> bool:
        active = self._active.get(number)
        return active is not None and (active.attempt, active.scorer) == (attempt, scorer)

    def _end(self, number: int, how: str) -> None:
        active = self._active.pop(number)
        rows.end(self._ledger.db, number, active.attempt, how)
