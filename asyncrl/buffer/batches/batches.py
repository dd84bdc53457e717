"""The learner's side of the buffer: which groups make batch b, and what its outcome means.

A batch is fixed at its first request and recorded; every repeated request gets the same answer, after a crash of any
process. A learner that resumes redoes the recorded batches; if it does not, or a batch ends otherwise, history forks.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from asyncrl.buffer.batches.disk_losses import DiskLosses
from asyncrl.buffer.batches.redone import changed_since, first_in_doubt
from asyncrl.buffer.client.messages import BatchState, Outcome, Start, Told
from asyncrl.buffer.evaluations.stops import Stops
from asyncrl.buffer.ledger.fork import fork
from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.records import NOTHING, Batch, Draw, Incarnation, one
from asyncrl.buffer.ledger.replays import record
from asyncrl.buffer.replaying import draw, seed_of
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.scoring.scoring import Scoring
from asyncrl.buffer.selection import choose
from asyncrl.buffer.staleness import verdict
from asyncrl.buffer.tasks.demonstrations import DemonstrationDraws
from asyncrl.buffer.tasks.drawing import TaskDraws
from asyncrl.buffer.tickets.tickets import Tickets


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    state: BatchState
    why: str = ""
    batch: Batch | None = None
    failed: bool = False
    """True with state `ended` if the run failed."""


class Batches:
    def __init__(
        self,
        ledger: Ledger,
        rules: Rules,
        tickets: Tickets,
        draws: TaskDraws,
        losses: DiskLosses,
        stops: Stops,
        demonstrations: DemonstrationDraws,
        scoring: Scoring,
    ) -> None:
        self._ledger = ledger
        self._scoring = scoring
        self._demonstrations = demonstrations
        self._draws = draws
        self._losses, self._stops = losses, stops
        self._rules = rules
        self._tickets = tickets
        self._served = False
        """The current incarnation got a batch from this process. Otherwise it died with the whole run, or at its start,
        and no batch is suspected."""
        self.restored = ledger.db.get("restored")
        """The checkpoint from which the ledger was copied, while no learner has started on it."""

    # A learner starts

    def start(self, b: int, version: int, branch: int | None, fresh: bool, caused: bool) -> Start:
        """A new incarnation that holds the weights of `version` and wants batch b next.

        branch: that of its checkpoint; None: the initial weights. fresh: recorded batches from b on are not redone.
        A branch begins too if they would give other weights now, under changed settings of the training step.
        caused: the last incarnation ended on purpose. Its batch is then not suspected, nor if the buffer died as well.
        Raises Refused, and changes nothing, for a point that is not on the recorded line, and if the disk lost what it
        needs.
        """
        history = self._ledger.history
        if not history.on_line(branch or 0, b) or history.version_before(b) != version:
            raise Refused(
                "unknown_checkpoint",
                f"the learner resumes at batch {b}, version {version}, branch {branch}, which is not a point of the "
                f"ledger's history ({len(history.line)} batches, version {history.recorded_version}, "
                f"branch {history.branch}): "
                "resume from another checkpoint, or restore the ledger that lies in this one (buffer/)",
            )
        self._losses.check(b, fresh or self.restored is not None)
        for key in self._losses.record(b):
            self._tickets.queue.add(key)
        self._scoring.reload()
        first = history.current is None
        if not first and (caused or not self._served):
            history.caused()
        self._served = False
        suspect = self._suspect()
        otherwise = changed_since(history.line, history.incarnations, b, self._rules.settings)
        history.start(b, version, self._rules.settings)
        why = self._why_branch(b, fresh and not first, otherwise)
        if why:
            self._fork(b, version, why)
        elif suspect is not None and b <= suspect < len(history.line):
            self._end(suspect, "poison")
        self._tickets.sweep()
        published = -1 if history.published is None else history.published
        return Start(history.incarnations[-1].incarnation, history.branch, b, version, published, why)

    def _why_branch(self, b: int, fresh: bool, otherwise: str) -> str:
        """Why the start at batch b begins a branch; empty: it does not."""
        restored, self.restored = self.restored, None
        if restored is not None:
            self._ledger.db.unset("restored")
            return f"the ledger was restored from {restored}"
        return f"a fresh start at batch {b}" if fresh else otherwise

    @property
    def not_begun(self) -> str:
        """Why nothing may happen before a learner starts; empty once it has."""
        if self.restored is not None:
            return f"the ledger was restored from {self.restored}"
        return "the disk lost trajectories of the ledger" if self._losses.pending else ""

    def _suspect(self) -> int | None:
        """The batch that was open when too many learners in a row died."""
        died = [i for i in self._ledger.history.incarnations if not i.caused]
        if not died or died[-1].holds is None:
            return None
        b = died[-1].holds
        return b if self._ledger.history.deaths_in_a_row(b) >= self._rules.batch_retries else None

    def check(self, incarnation: int) -> Incarnation:
        """Raises Refused for an earlier incarnation, and for one that trained on what the ledger lost."""
        if self.not_begun:
            raise Refused("ledger_restored", f"{self.not_begun}: the learner must restart")
        current = self._ledger.history.current
        if current is None or current.incarnation != incarnation:
            now = "none has started" if current is None else f"{current.incarnation} is the current one"
            raise Refused("stale_incarnation", f"incarnation {incarnation} of the learner is fenced off: {now}")
        return current

    # It asks for a batch

    def batch(self, now: float, incarnation: int, b: int) -> BatchAnswer:
        current, history = self.check(incarnation), self._ledger.history
        if b > current.next_batch:
            return BatchAnswer("waiting", f"batch {current.next_batch} is not finished")
        if b < len(history.line):
            return self._recorded(current, history.line[b])
        if (ended := self._ended(b, current.version)) is not None:
            return ended
        groups, why = self._choose(now, b, current.version)
        if groups is None:
            if self._disk_is_full_for_good():
                return BatchAnswer("ended", self._disk_message(), failed=True)
            return BatchAnswer("waiting", why)
        batch = self._fix(b, current.version, groups, self._replayed(b, current.version), self._tickets.bound.holds)
        self._hand_out(b, current.version)
        return BatchAnswer("ready", "", batch)

    def _recorded(self, current: Incarnation, batch: Batch) -> BatchAnswer:
        """The answer for a batch that was fixed before."""
        is_next = batch.b == current.next_batch
        if batch.outcome in ("guard", "poison"):
            if is_next:
                self._ledger.history.move(batch.b + 1, batch.version_after, None)
            return BatchAnswer("skipped", f"batch {batch.b} was skipped: {batch.outcome}", batch)
        if is_next:
            self._hand_out(batch.b, current.version)
        return BatchAnswer("ready", "", batch)

    def _hand_out(self, b: int, version: int) -> None:
        self._ledger.history.move(b, version, b)
        self._served = True

    def _ended(self, b: int, version: int) -> BatchAnswer | None:
        """Why there will be no batch b, if so."""
        rules, skipped = self._rules, self._ledger.history.skipped_in_a_row()
        if why := self._stops.recorded(b):
            return BatchAnswer("ended", why)
        if skipped > rules.max_skipped:
            why = f"{skipped} batches in a row were skipped, learner.max_skipped is {rules.max_skipped}"
            return BatchAnswer("ended", why, failed=True)
        if version >= rules.steps:
            return BatchAnswer("ended", f"all {rules.steps} training steps are done")
        if self._tickets.filtering.starved:
            return BatchAnswer("ended", self._tickets.filtering.starved)
        if self._tickets.failures.verdict:
            return BatchAnswer("ended", self._tickets.failures.verdict, failed=True)
        why = self._stops.decide(b, version)
        return BatchAnswer("ended", why) if why else None

    def _choose(self, now: float, b: int, version: int) -> tuple[list[Group] | None, str]:
        """The groups of batch b; or None, and what is missing."""
        rules = self._rules
        missing = self._tickets.missing(
            self._scoring.wait_clock(now), version, lambda group: self._usable(group, version)
        )
        if missing:
            return None, f"{len(missing)} groups would be over age without this batch: {_names(missing)}"
        must = [group for group in self._tickets.queue.due(version) if self._usable(group, version)]
        complete = self._complete()
        candidates: list[Group] = []
        if complete >= rules.groups_per_step:  # the batch is asked for after every put: do not check each group in vain
            new_only = rules.replay is not None
            live = (g for g in self._ledger.live.values() if not (new_only and g.uses))
            candidates = [g for g in live if self._usable(g, version) and g not in must]
            complete = len(must) + len(candidates)
        if complete < rules.groups_per_step:
            return None, f"{complete} of {rules.groups_per_step} groups are complete{self._why_fewer(version)}"
        rng = Random(f"{rules.data_seed}/{self._ledger.history.branch}/{b}")
        chosen = choose(rules.sampler, candidates, version, rules.groups_per_step - len(must), rng)
        return sorted([*must, *chosen], key=lambda g: g.number), ""

    def _complete(self) -> int:
        """Complete groups, with scores where servers give them; under replay the new ones only, since used ones come on
        top."""
        used = 0 if self._rules.replay is None else sum(g.uses > 0 for g in self._ledger.live.values())
        return self._ledger.account.count("waiting") - used - len(self._scoring.waiting())

    def _replayed(self, b: int, version: int) -> Draw:
        """The used groups that batch b gets beside its new ones."""
        rules = self._rules
        if rules.replay is None:
            return NOTHING
        used = [group for group in self._ledger.live.values() if group.uses and self._usable(group, version)]
        rng = Random(seed_of(rules.data_seed, self._ledger.history.branch, b))
        return draw(rules.replay, used, version, rng)

    def _fix(self, b: int, version: int, groups: list[Group], replay: Draw, bound: int) -> Batch:
        """Fixes batch b: these groups and those of the draw, in issue order, under this bound on staleness."""
        added = [self._ledger.live[number] for number in replay.numbers]
        batch = self._ledger.fix(b, version, sorted([*groups, *added], key=lambda group: group.number))
        record(self._ledger.db, batch, replay)
        self._tickets.bound.fixed(batch, bound)
        self._demonstrations.fix(batch)
        self._scoring.fix(batch)
        return batch

    def _usable(self, group: Group, version: int) -> bool:
        rules = self._rules
        return (
            group.state == "waiting"
            and self._scoring.ready(group)
            and verdict(group, version, self._tickets.bound.holds, rules.over_age, rules.mask_min_kept) == "eligible"
        )

    def _why_fewer(self, version: int) -> str:
        ledger = self._ledger
        parts = [f"{ledger.account.count('in_flight')} are in flight"]
        if ledger.history.recorded_version > version:
            ahead = sum(g.state == "waiting" and (g.newest or 0) > version for g in ledger.live.values())
            parts.append(f"{ahead} are ahead of version {version}")
        if unscored := self._scoring.why_fewer():
            parts.append(unscored)
        if ledger.history.published is None:
            parts.append("no weights are published on this branch yet, so no ticket is issued")
        return "; " + "; ".join(parts)

    # It reports an outcome

    def finished(self, incarnation: int, b: int, outcome: Outcome, told: Told | None = None, idle: float = 0.0) -> int:
        """Returns the version after batch b. A repeat changes nothing; another outcome than the recorded one forks.
        `idle`: share of the slots that admission left without a ticket."""
        current, history = self.check(incarnation), self._ledger.history
        if b >= len(history.line) or b > current.next_batch:
            raise Refused("not_fixed", f"batch {b} is not open: the learner stands at batch {current.next_batch}")
        if b < current.next_batch:
            if history.line[b].outcome != outcome:
                raise Refused("conflict", f"batch {b} is recorded as {history.line[b].outcome}, not {outcome}")
            return history.line[b].version_after
        self._end(b, outcome, told, idle)
        history.move(b + 1, history.line[b].version_after, None)
        self._tickets.sweep()
        return history.version

    def published(self, incarnation: int, branch: int, version: int, digest: str) -> int:
        """Weights of this version are published. Returns the branch: a new one if they have another digest than before,
        because steps were redone and gave other weights."""
        current, history = self.check(incarnation), self._ledger.history
        if branch != history.branch:
            raise Refused("stale_branch", f"weights of branch {branch} were published, the branch is {history.branch}")
        if version > current.version:
            raise Refused(
                "not_finished", f"version {version} was published before batch {current.next_batch} is finished"
            )
        on_branch = "SELECT version, digest FROM published WHERE branch = ?"
        before = dict(self._ledger.db.read(on_branch, (branch,)))
        if before.get(version, digest) == digest:
            history.publish(version, digest, self._ledger.attempts)
        else:
            self._redone_otherwise(current, version, before, digest)
        return history.branch

    def _redone_otherwise(self, current: Incarnation, version: int, published: dict[int, str], digest: str) -> None:
        """Begins a branch at the first redone batch in doubt, with the same batches and outcomes up to now."""
        history = self._ledger.history
        where = "SELECT start_batch FROM incarnations WHERE incarnation = ?"
        start = one(self._ledger.db, where, (current.incarnation,))
        if version == history.version_before(start):
            raise Refused(
                "other_weights",
                f"version {version} was published with the digest {published[version]} and has {digest} now, without a "
                "training step in between: the checkpoint, or the model at model.path, holds other weights than it "
                "did. Put back what was there, or begin a new run from these weights",
            )
        why = f"version {version} was published with the digest {published[version]}, and was redone as {digest}"
        redone = history.line[first_in_doubt(history.line, list(published), start, version) : current.next_batch]
        self._fork(redone[0].b, redone[0].version, why)
        for batch in redone:
            self._again(batch)
            if batch.outcome is not None:
                self._end(batch.b, batch.outcome)
                self._tickets.bound.taken_over(history.line[batch.b], batch)
        self._tickets.sweep()

    def _again(self, batch: Batch) -> None:
        """Fixes the same groups on the branch that has just begun, with the weights that they had."""
        new = [self._ledger.live[number] for number in batch.groups if number not in batch.replay.numbers]
        self._fix(batch.b, batch.version, new, batch.replay, batch.bound)

    def _end(self, b: int, outcome: Outcome, told: Told | None = None, idle: float = 0.0) -> None:
        """Records an outcome, and what follows for the bound on staleness. If the batch ended otherwise before, a new
        branch begins with the same groups."""
        ledger, batch = self._ledger, self._ledger.history.line[b]
        if batch.outcome == outcome:
            return
        if batch.outcome is not None:
            self._fork(b, batch.version, f"batch {b} was {batch.outcome} and is now {outcome}")
            self._again(batch)
        groups = [ledger.live[number] for number in batch.groups]
        ledger.finish(b, outcome, {g.number for g in groups if g.uses + 1 < self._rules.max_uses})
        batch = ledger.history.line[b]
        self._draws.finished(b, batch.version_after)
        self._tickets.bound.ended(batch, told, idle, self._tickets.queue.last_version)

    def _fork(self, b: int, version: int, why: str) -> None:
        fork(self._ledger, b, version, why)
        self._draws.forked(b)
        self._stops.forked(b)
        self._tickets.forked(version)
        self._scoring.reload()

    # The disk

    def _disk_is_full_for_good(self) -> bool:
        full = self._ledger.db.payloads.disk_bytes >= self._rules.max_disk_bytes
        return full and not self._ledger.account.count("in_flight")

    def _disk_message(self) -> str:
        used = self._ledger.db.payloads.disk_bytes / 1e9
        return (
            f"the payloads take {used:.3f} GB, buffer.max_disk_gb is {self._rules.max_disk_bytes / 1e9:g}, and nothing "
            f"can be released: raise buffer.max_disk_gb above {used:.3f}, or lower learner.checkpoint_every"
        )


def _names(groups: list[Group]) -> str:
    names = [f"group {g.number}" for g in groups[:5]]
    return ", ".join(names) + (", ..." if len(groups) > 5 else "")
