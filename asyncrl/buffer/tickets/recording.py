"""Whether a recorded turn is kept: only of the attempt that holds its ticket, and with versions that it may have."""

from __future__ import annotations

from asyncrl.buffer.client.messages import TurnOutcome
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.rules import Refused
from asyncrl.buffer.tickets.leases import ActiveLease, Leases
from asyncrl.buffer.tickets.turns import Turns
from asyncrl.buffer.tickets.validity import Validity
from asyncrl.trajectory import TicketId
from asyncrl.trajectory.turns import Recorded, RecordedSample
from asyncrl.wire.turns import StoredTurn


class Recording:
    def __init__(self, ledger: Ledger, leases: Leases, validity: Validity, turns: Turns) -> None:
        self._ledger, self._leases, self._validity, self._turns = ledger, leases, validity, turns

    def record(self, actor: str, id: TicketId, attempt: int, turn: StoredTurn) -> TurnOutcome:
        """Raises Refused for a turn that this attempt cannot have recorded; nothing is stored then."""
        lease = self._leases.get(id.group, id.index)
        if lease is None or not lease.is_of((id, attempt), actor):
            return "revoked"
        group = self._ledger.live.get(id.group)
        if lease.eval or group is None or not group.durable:
            raise Refused("not_durable", f"turns of ticket {id} are not recorded: its `durable` is false")
        self._check_versions(lease, turn.record)
        return "stored" if self._turns.record(lease.key, attempt, turn) else "full"

    def _check_versions(self, lease: ActiveLease, record: Recorded) -> None:
        """Raises Refused as `Validity.check_versions` does for the trajectory."""
        if not isinstance(record, RecordedSample) or not len(record.versions):
            return
        self._validity.check_newest(int(record.versions.max()), lease.id)
        if (oldest := int(record.versions.min())) < lease.min_version:
            self._validity.refused["old_tokens"] += 1
            raise Refused(
                "old_tokens",
                f"{record.named} of ticket {lease.id} has a token of version {oldest}; attempt {lease.attempt} at it "
                f"was leased to {lease.actor} for tokens of version {lease.min_version} or later",
            )
