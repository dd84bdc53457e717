"""The buffer's series (the table of all series is tracking/series.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from asyncrl.buffer.core import Buffer
from asyncrl.buffer.staleness import staleness
from asyncrl.buffer.tickets.turns import Turns
from asyncrl.tracking.series import DROP_REASONS, RECORD_ENDS, STATES, histogram


def series(buffer: Buffer, counts: Mapping[str, int], commit_seconds: float) -> dict[str, float]:
    """All values now. `counts` are those of the service since its start."""
    ledger = buffer.ledger
    states: Counter[str] = Counter()
    for branch in ledger.history.branches:
        states.update(ledger.account.equation(branch))
    dropped = {reason: states[f"dropped: {reason}"] for reason in DROP_REASONS}
    states["dropped"] = sum(dropped.values())
    taken = buffer.tickets.places.taken()
    values: dict[str, float] = {
        **{f"buffer/groups/{state}": states[state] for state in (*STATES, "issued")},
        **{f"buffer/dropped/{reason}": n for reason, n in dropped.items()},
        "buffer/demonstrations": buffer.demonstrations.drawn,
        "buffer/fill": taken / buffer.rules.capacity,
        "buffer/trajectories": taken,
        "buffer/yielded": buffer.tickets.places.yielded,
        "buffer/leases": len(buffer.leases),
        "buffer/disk_bytes": buffer.database.payloads.disk_bytes,
        "buffer/commit_ms": 1000 * commit_seconds / max(1, counts.get("commits", 0)),
        "buffer/puts": counts.get("puts", 0),
        "buffer/duplicates": counts.get("duplicate", 0),
        "buffer/late": counts.get("late", 0),
        "buffer/refused": counts.get("refused", 0),
        "buffer/wrong_actor": buffer.tickets.validity.refused["wrong_actor"],
        "buffer/old_tokens": buffer.tickets.validity.refused["old_tokens"],
        "buffer/env_failures": counts.get("env_failures", 0),
        "buffer/env_failing": buffer.tickets.failures.budget.share,
        "buffer/reissued": buffer.tickets.queue.reissued,
        "throughput/tokens_wasted/late": counts.get("late_tokens", 0),
        "throughput/tokens_wasted/duplicate": counts.get("duplicate_tokens", 0),
        "throughput/tokens_wasted/turns": buffer.tickets.carried.turns.wasted,
        **recorded(buffer.tickets.carried.turns, counts),
        **{f"throughput/tokens_wasted/{reason}": tokens for reason, tokens in ledger.bias.wasted.items()},
    }
    if buffer.rules.auto is not None:
        values["staleness/target"] = buffer.tickets.bound.admits
    if (slots := buffer.tickets.bound.slots.number) is not None:
        values["throughput/slots_in_force"] = slots
    if buffer.scoring.wanted:
        values["buffer/unscored"] = len(buffer.scoring.waiting())
        values["buffer/scored"] = counts.get("scored", 0)
        values["buffer/scores_late"] = counts.get("scores_late", 0) + counts.get("scores_duplicate", 0)
    for fate, tally in ledger.bias.fates.items():
        if tally.count:
            values[f"buffer/length/{fate}"] = tally.tokens / tally.count
            values[f"buffer/turns/{fate}"] = tally.turns / tally.count
            values[f"buffer/reward/{fate}"] = tally.reward / tally.count
            values[f"buffer/count/{fate}"] = tally.count
            values |= {f"buffer/env_count/{fate}/{env}": n for env, n in tally.envs.items()}
    return values | ages(buffer)


def recorded(turns: Turns, counts: Mapping[str, int]) -> dict[str, float]:
    """Series of recorded turns."""
    return {
        "buffer/recorded/records": turns.recorded,
        "buffer/recorded/revoked": counts.get("turns_revoked", 0),
        "buffer/recorded/full": counts.get("turns_full", 0),
        "buffer/recorded/resumed": turns.resumed,
        "buffer/recorded/carried_tokens": turns.carried_tokens,
        **{f"buffer/recorded/{how}": turns.counts[how] for how in RECORD_ENDS},
    }


def ages(buffer: Buffer) -> dict[str, float]:
    """Histograms of the groups' staleness now: complete ones in the queue, incomplete ones in flight."""
    version = buffer.ledger.history.version
    queue: Counter[int] = Counter()
    flight: Counter[int] = Counter()
    for group in buffer.ledger.live.values():
        if group.state != "assigned":
            (queue if group.state == "waiting" else flight)[max(0, staleness(group, version))] += 1
    return histogram("staleness/in_queue", queue) | histogram("staleness/in_flight", flight)
