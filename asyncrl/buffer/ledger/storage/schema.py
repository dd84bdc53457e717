"""The ledger's tables: one SQLite file in WAL mode. Payloads are stored in append-only segments (payloads.py).

SQLite writes blobs twice (log, then database): measured on one disk with 52 kB records, 8 per commit, 201 MB/s and
170 us of CPU each under fsync, against 361 MB/s and 55 us for a segment and a row. A ledger without payloads is small:
its snapshot can go into every checkpoint.

Columns named `at` or `..._at` are times of the buffer's clock, in seconds since the epoch. They are metadata: nothing
is decided by them, and where the host's clock was set they may go backwards.
"""

from __future__ import annotations

VERSION = 12
"""Raised with every change of the tables, and of what a digest covers; a ledger of another version is refused."""

READERS = {
    4: "0.1.0 at commit e37eb93",
    5: "0.1.0 at commit 47ec003",
    6: "0.1.0 at commit cdb86a9",
    7: "0.1.0 at commit db09328",
    8: "0.1.0 at commit 88a19f8",
    9: "0.1.0 at commit 99290bb",
    10: "0.1.0 at commit e6f5323",
    11: "0.1.0 at commit 8e0b1dd",
}
"""By version of the tables: the last asyncrl that reads them."""


def refusal(version: int) -> str:
    """Why a ledger of another version of the tables is refused, and what to do.

    >>> print(refusal(5))
    it has version 5 of the tables, this asyncrl reads 12: finish the run with asyncrl 0.1.0 at commit 47ec003.
    """
    reader = READERS.get(version)
    finish = f"asyncrl {reader}" if reader else "the asyncrl that began it"
    return f"it has version {version} of the tables, this asyncrl reads {VERSION}: finish the run with {finish}."


TABLES = """
CREATE TABLE branches (
    branch INTEGER PRIMARY KEY,
    parent INTEGER,                 -- NULL for the first
    fork_batch INTEGER NOT NULL,    -- the first batch number that belongs to this branch
    fork_version INTEGER NOT NULL,
    why TEXT NOT NULL
);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,     -- unique over all branches, in issue order
    branch INTEGER NOT NULL,
    draw INTEGER NOT NULL,          -- 0, 1, 2 ... without gaps; a prompt that was put back keeps its draw
    task INTEGER NOT NULL,          -- index into the task source
    curriculum INTEGER NOT NULL,    -- serial of the state that chose it
    replaces INTEGER,               -- the dropped group whose prompt was put back
    task_id TEXT NOT NULL,
    size INTEGER NOT NULL,
    state TEXT NOT NULL,            -- in_flight, waiting, assigned, trained, dropped
    reason TEXT,                    -- of dropped
    weight REAL NOT NULL DEFAULT 1, -- 0: a filter rejected it, but it was kept to avoid starving the learner
    uses INTEGER NOT NULL DEFAULT 0,        -- in applied batches
    ended_batch INTEGER,            -- a checkpoint at this batch number or later covers the end of the group
    ended_branch INTEGER,           -- on which it ended
    filling INTEGER,                -- of filtered: the batch that was being filled
    put_back INTEGER NOT NULL DEFAULT 0,    -- 1: its prompt waits to be drawn again
    payload INTEGER NOT NULL DEFAULT 1,     -- 0: reclaimed
    measured INTEGER,               -- serial of the first curriculum state that knows its rewards
    durable INTEGER NOT NULL DEFAULT 0,     -- 1: turns of its episodes are recorded
    task_env TEXT NOT NULL DEFAULT '',      -- of a mix: the environment that its task names
    lengths INTEGER,                -- rows of `lengths` that decided `durable`; NULL: buffer.turns is not auto
    ended_at REAL                   -- NULL while live
);
CREATE INDEX groups_live ON groups(state) WHERE state IN ('in_flight', 'waiting', 'assigned');
CREATE INDEX groups_payload ON groups(ended_batch) WHERE payload = 1;
CREATE INDEX groups_stale ON groups(ended_batch) WHERE reason = 'stale';
CREATE INDEX groups_measured ON groups(measured);
CREATE INDEX groups_put_back ON groups(number) WHERE put_back = 1;
CREATE TABLE attempts (
    grp INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    actor TEXT NOT NULL,
    branch INTEGER NOT NULL,        -- on which it was lent: a later branch voids it
    min_version INTEGER NOT NULL,
    ended TEXT,                     -- NULL while leased; else how (Ledger.end_attempt), or lost: the disk lost it
    detail TEXT,
    issued_at REAL NOT NULL,
    ended_at REAL,                  -- NULL while leased
    serial INTEGER NOT NULL,        -- 0, 1, 2 ... in the order of issue
    ended_serial INTEGER,           -- attempts that were issued before it first ended; NULL while leased
    PRIMARY KEY (grp, idx, attempt)
) WITHOUT ROWID;
CREATE TABLE turns (                -- what the attempts at a ticket recorded of their episodes (tickets/turns.py)
    serial INTEGER PRIMARY KEY,     -- 0, 1, 2 ... in the order in which they came
    grp INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    attempt INTEGER NOT NULL,       -- that recorded it
    number INTEGER NOT NULL,        -- of the turn; -1: the reset
    form TEXT NOT NULL,             -- reset, partial, sample, summary, answer
    sampled INTEGER NOT NULL,       -- tokens; 0: of an answer
    oldest INTEGER,                 -- version among them; NULL: there are none
    newest INTEGER,
    tokens TEXT,                    -- digest of the sampled tokens; NULL: an answer
    segment INTEGER NOT NULL,       -- of the payloads; the bytes are needed until it has ended
    start INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    at REAL NOT NULL,
    ended TEXT                      -- NULL while its ticket has it; else how (tickets/turns.py)
);
CREATE INDEX turns_kept ON turns(grp, idx) WHERE ended IS NULL;
CREATE TABLE lengths (              -- how long episodes took, under buffer.turns: auto (tickets/lengths.py)
    serial INTEGER PRIMARY KEY,     -- 0, 1, 2 ... in the order in which they ended
    grp INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    seconds REAL NOT NULL           -- as its actors measured; of one that brought nothing, by the buffer's clock
);
CREATE TABLE trajectories (
    grp INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    actor TEXT NOT NULL,
    digest TEXT NOT NULL,
    segment INTEGER NOT NULL,
    start INTEGER NOT NULL,         -- bytes into the segment
    bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL,      -- of the record in the segment
    versions BLOB NOT NULL,         -- pairs of int64: version, policy tokens of it
    tokens INTEGER NOT NULL,        -- of all rows, context included
    policy_tokens INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    reward REAL NOT NULL,
    env TEXT NOT NULL,
    stop_reason TEXT NOT NULL,
    received_at REAL NOT NULL,
    line INTEGER,                   -- its number in the actor's log; NULL: its actor keeps none
    head TEXT,                      -- of that log, up to this line
    PRIMARY KEY (grp, idx)
) WITHOUT ROWID;
CREATE TABLE batches (
    serial INTEGER PRIMARY KEY,
    b INTEGER NOT NULL,
    branch INTEGER NOT NULL,
    version INTEGER NOT NULL,       -- the learner's when the batch was fixed
    incarnation INTEGER NOT NULL,   -- that fixed it
    outcome TEXT,                   -- NULL while open; applied, guard, poison
    first_uses INTEGER NOT NULL,    -- groups that appear for the first time
    candidates INTEGER NOT NULL DEFAULT 0,  -- used groups among which those in `replays` were drawn
    released INTEGER NOT NULL DEFAULT 0,    -- 1: on a part of history that was left
    fixed_at REAL NOT NULL,
    finished_at REAL,               -- NULL while open
    bound INTEGER NOT NULL DEFAULT 0,       -- S_b: the most steps that a token with loss may be old
    measures TEXT,                  -- JSON: what is known of it when it ends; NULL: the bound was fixed, or poison
    target INTEGER,                 -- under which groups are admitted from its end on; NULL: the bound was fixed
    next_bound INTEGER,             -- of the next batch, as all below
    since INTEGER,                  -- the first group admitted after the target was last lowered
    why TEXT,                       -- the target was changed; empty: it was not
    slots INTEGER,                  -- tickets that an actor may hold from its end on; NULL: launch.tuning is off
    lent INTEGER,                   -- attempts issued before its end, as all below
    slots_why TEXT                  -- the slots were changed; empty: they were not
);
CREATE UNIQUE INDEX batches_line ON batches(b) WHERE released = 0;
CREATE TABLE uses (
    serial INTEGER NOT NULL,
    place INTEGER NOT NULL,
    grp INTEGER NOT NULL,
    PRIMARY KEY (serial, place)
) WITHOUT ROWID;
CREATE INDEX uses_group ON uses(grp);
CREATE TABLE replays (              -- used groups that a batch got beside its new ones (replaying.py)
    serial INTEGER NOT NULL,        -- of the batch
    grp INTEGER NOT NULL,
    chance REAL NOT NULL,           -- of being the first of the candidates that is drawn
    weight REAL NOT NULL,           -- the factor of its loss
    PRIMARY KEY (serial, grp)
) WITHOUT ROWID;
CREATE TABLE retired (              -- used groups that ended while they waited for another use
    serial INTEGER PRIMARY KEY,
    grp INTEGER NOT NULL,
    branch INTEGER NOT NULL,        -- when it ended
    batch INTEGER NOT NULL,         -- how many batches were fixed then: the last one is batch - 1
    why TEXT NOT NULL               -- stale; yielded: to make room for a new group; no_payload: its bytes are gone
);
CREATE TABLE demonstrations (       -- what each batch takes of data.demonstrations, in training order
    serial INTEGER NOT NULL,        -- of the batch
    place INTEGER NOT NULL,
    draw INTEGER NOT NULL,          -- 0, 1, 2 ... along the line of batches, whatever their outcomes
    line INTEGER NOT NULL,          -- the row of the files that the data seed gives for it
    digest TEXT NOT NULL,           -- of the chat
    PRIMARY KEY (serial, place)
) WITHOUT ROWID;
CREATE TABLE scores (               -- what a teacher's server said of a group (scoring/)
    grp INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,       -- the lease that brought them
    scorer TEXT NOT NULL,
    teacher TEXT NOT NULL,          -- its digest
    digest TEXT NOT NULL,           -- of the scores, with those of the trajectories that they are of
    segment INTEGER NOT NULL,       -- as in `trajectories`, beside whose records they are stored
    start INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    line INTEGER,                   -- its number in the scorer's log
    head TEXT,
    received_at REAL NOT NULL
);
CREATE TABLE scorings (             -- leases of groups to scorers
    grp INTEGER NOT NULL,
    attempt INTEGER NOT NULL,       -- 0, 1, 2 ... of the group
    scorer TEXT NOT NULL,
    ended TEXT,                     -- NULL while leased; scored, late, lapsed, returned, revoked; lost: by the disk
    serial INTEGER NOT NULL,        -- 0, 1, 2 ... in the order of issue
    issued_at REAL NOT NULL,
    ended_at REAL,                  -- NULL while leased
    PRIMARY KEY (grp, attempt)
) WITHOUT ROWID;
CREATE TABLE score_uses (           -- the scores with which a batch takes its groups
    serial INTEGER NOT NULL,        -- of the batch
    grp INTEGER NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (serial, grp)
) WITHOUT ROWID;
CREATE TABLE score_logs (           -- how far each scorer's log was when it last asked for groups
    scorer TEXT PRIMARY KEY,
    line INTEGER NOT NULL,
    head TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE incarnations (
    incarnation INTEGER PRIMARY KEY,
    branch INTEGER NOT NULL,        -- it started on
    start_batch INTEGER NOT NULL,
    start_version INTEGER NOT NULL,
    next_batch INTEGER NOT NULL,    -- the batch that it has not finished yet
    version INTEGER NOT NULL,       -- its weights'
    holds INTEGER,                  -- the batch handed to it and not finished: at its death, the suspect
    caused INTEGER NOT NULL DEFAULT 0,      -- 1: it was told to stop or killed on purpose
    settings TEXT NOT NULL          -- JSON: what decides the result of a step (config/resuming.py)
);
CREATE TABLE curriculum (
    serial INTEGER PRIMARY KEY,
    batch INTEGER NOT NULL,         -- the first batch number at which it is in force
    version INTEGER NOT NULL,       -- of the policy then
    state TEXT NOT NULL,            -- JSON
    released INTEGER NOT NULL DEFAULT 0     -- 1: on a part of history that was left
);
CREATE VIEW difficulty AS           -- what was measured per task, trained on or not
    SELECT g.task_id, count(DISTINCT g.number) AS groups, count(*) AS trajectories, avg(t.reward) AS mean_reward
    FROM groups g JOIN trajectories t ON t.grp = g.number WHERE g.reason IS NOT 'discarded_branch' GROUP BY g.task_id;
CREATE TABLE added (                -- rows of data.on_step_end
    serial INTEGER PRIMARY KEY,
    batch INTEGER NOT NULL,         -- the first batch number at which it is there
    task TEXT NOT NULL,             -- JSON
    draw INTEGER,                   -- that it became; NULL: to be drawn
    released INTEGER NOT NULL DEFAULT 0     -- 1: on a part of history that was left
);
CREATE TABLE published (
    branch INTEGER NOT NULL,
    version INTEGER NOT NULL,
    digest TEXT NOT NULL,
    at REAL NOT NULL,
    attempts INTEGER NOT NULL,      -- issued before: the next one may have tokens of this version or later
    PRIMARY KEY (branch, version)
) WITHOUT ROWID;
CREATE TABLE checkpoints (
    serial INTEGER PRIMARY KEY,
    branch INTEGER NOT NULL,
    batch INTEGER NOT NULL,         -- the next batch of a learner that resumes from it
    version INTEGER NOT NULL,
    path TEXT NOT NULL,
    released INTEGER NOT NULL DEFAULT 0,    -- 1: no longer kept for resuming, or on a part of history that was left
    at REAL NOT NULL                -- its announcement, behind the buffer's part of it
);
CREATE TABLE evals (                -- evaluation sets (evaluations/)
    serial INTEGER PRIMARY KEY,
    name TEXT NOT NULL,             -- of the set; with branch and due its identity
    branch INTEGER NOT NULL,
    due INTEGER NOT NULL,           -- the version at which it was due
    on_branch INTEGER NOT NULL,     -- with version: the weights that play it; others than those due if it began again
    version INTEGER NOT NULL,
    state TEXT NOT NULL,            -- open, done, restarted, failed, skipped
    opened_at REAL NOT NULL,
    ended_at REAL,                  -- NULL while open; of skipped at once
    fixed INTEGER                   -- batches that were fixed before it ended; NULL as ended_at
);
CREATE TABLE stops (                -- ends of the run that a result of an evaluation asked for (evaluations/stops.py)
    serial INTEGER PRIMARY KEY,
    branch INTEGER NOT NULL,
    batch INTEGER NOT NULL,         -- there is none of this number on the line, nor behind it
    version INTEGER NOT NULL,       -- of the learner then
    eval INTEGER NOT NULL,          -- serial of the evaluation with the result
    why TEXT NOT NULL,
    fixed INTEGER NOT NULL,         -- batches that were fixed before it
    released INTEGER NOT NULL DEFAULT 0,    -- 1: a later branch voids it (evaluations/choices.py)
    at REAL NOT NULL
);
CREATE TABLE eval_results (
    serial INTEGER NOT NULL,
    task INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    greedy INTEGER NOT NULL,
    reward REAL NOT NULL,
    rewards TEXT NOT NULL,          -- JSON
    digest TEXT NOT NULL,           -- of the trajectory; empty: it failed in its environment
    oldest INTEGER,                 -- versions of its policy tokens; NULL: it failed
    newest INTEGER,
    PRIMARY KEY (serial, task, idx)
) WITHOUT ROWID;
CREATE TABLE eval_measures (        -- what a whole set has measured
    serial INTEGER NOT NULL,
    way TEXT NOT NULL,              -- sampled, greedy
    share REAL NOT NULL,            -- success, with its 95% interval
    low REAL NOT NULL,
    high REAL NOT NULL,
    tasks INTEGER NOT NULL,
    episodes INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    reward REAL NOT NULL,           -- mean, and half its 95% interval
    reward_half REAL NOT NULL,
    pass_at TEXT NOT NULL,          -- JSON: share by k
    PRIMARY KEY (serial, way)
) WITHOUT ROWID;
CREATE TABLE counters (
    branch INTEGER NOT NULL,
    name TEXT NOT NULL,             -- duplicate, late, lost
    value INTEGER NOT NULL,
    PRIMARY KEY (branch, name)
) WITHOUT ROWID;
CREATE TABLE logs (                 -- how far each actor's log was when it last asked for tickets
    actor TEXT PRIMARY KEY,
    line INTEGER NOT NULL,          -- the number of its last line
    head TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE commits (              -- the chain over all changes of the other tables (chain.py)
    seq INTEGER PRIMARY KEY,
    changes BLOB NOT NULL,
    head TEXT NOT NULL
);
CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
