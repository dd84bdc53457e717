"""What an attempt at a ticket may bring, and who may bring it.

The audit checks the same of every stored trajectory from the ledger's rows alone (audit/checks/references.py); a test
holds the two equal. Every method raises Refused, and changes nothing but its count.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.buffer.ledger.attempts import leased
from asyncrl.buffer.ledger.group import Group, VersionCounts
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.rules import Refused
from asyncrl.buffer.tickets.leases import Leases
from asyncrl.trajectory import TicketId, Trajectory


class Validity:
    def __init__(self, ledger: Ledger, leases: Leases) -> None:
        self._ledger = ledger
        self._leases = leases
        self.refused: Counter[str] = Counter()
        """wrong_actor, old_tokens: since this process began."""

    def group_of(self, trajectory: Trajectory, group: Group | None) -> Group:
        """The group, unless this ticket cannot have brought the trajectory, or its attempt is of another actor."""
        id = trajectory.id
        if group is None or id.index >= group.size:
            raise Refused("unknown_ticket", f"ticket {id} was never issued")
        if self._leased(id, trajectory.attempt) is None:
            raise Refused("unknown_ticket", f"attempt {trajectory.attempt} at ticket {id} was never issued")
        self.check_actor(id, trajectory.attempt, trajectory.actor, "put")
        if trajectory.task_id != group.task_id:
            raise Refused("bad_trajectory", f"ticket {id} is for task {group.task_id!r}, not {trajectory.task_id!r}")
        if trajectory.stop_reason == "aborted":
            raise Refused("bad_trajectory", f"the episode of ticket {id} was aborted: use fail or release")
        return group

    def check_actor(self, id: TicketId, attempt: int, actor: str, op: str) -> None:
        """Refuses a message about an attempt that was leased to another actor; one about no attempt passes."""
        lent = self._leased(id, attempt)
        if lent is not None and lent[0] != actor:
            self.refused["wrong_actor"] += 1
            raise Refused(
                "wrong_actor",
                f"{op} of ticket {id} came from {actor}, and attempt {attempt} at it was leased to {lent[0]}: an "
                "actor answers for its own tickets only; give every actor another name",
            )

    def check_versions(self, trajectory: Trajectory, versions: VersionCounts) -> None:
        """Refuses tokens that are newer than the learner, or older than the weights that the attempt had to hold."""
        id, oldest = trajectory.id, versions[0][0]
        self.check_newest(versions[-1][0], id)
        lent = self._leased(id, trajectory.attempt)
        if lent is not None and oldest < lent[1]:
            self.refused["old_tokens"] += 1
            raise Refused(
                "old_tokens",
                f"ticket {id} has a token of version {oldest}; attempt {trajectory.attempt} at it was leased to "
                f"{lent[0]} for tokens of version {lent[1]} or later: load `min_version` before sampling",
            )

    def check_newest(self, newest: int, id: TicketId) -> None:
        """Refuses tokens that nobody can have sampled by now. `id`: the ticket."""
        reached = self._ledger.history.recorded_version
        if newest > reached + 1:
            raise Refused("bad_trajectory", f"ticket {id} has a token of version {newest}, the learner is at {reached}")

    def _leased(self, id: TicketId, attempt: int) -> tuple[str, int] | None:
        """The actor of an attempt and the oldest version that its tokens may have."""
        lease = self._leases.get(id.group, id.index)
        if lease is not None and (lease.id, lease.attempt) == (id, attempt):
            return lease.actor, lease.min_version
        return leased(self._ledger.db, id, attempt)
