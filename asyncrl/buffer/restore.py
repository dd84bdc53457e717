"""A run goes on without its ledger: on another host, from the copy that its newest checkpoint carries.

What was recorded after that checkpoint is gone, so the learner's next start begins a new branch.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

from asyncrl.buffer.ledger.database import LedgerFailed


def restore(checkpoints: Path, folder: Path) -> Path | None:
    """Fills `folder` from the newest complete checkpoint if it has no ledger; gives the checkpoint.

    None when there is a ledger already, or no checkpoint (a new run). Raises LedgerFailed when it cannot be copied.
    """
    if (folder / "ledger.sqlite").exists():
        return None
    found = [p for p in checkpoints.glob("step-*") if (p / "state.json").is_file() and (p / "buffer").is_dir()]
    if not found:
        return None
    newest = max(found, key=lambda p: (_place(p), p.name))
    unfinished = folder / ".restoring.sqlite"
    try:
        shutil.rmtree(folder / "payloads", ignore_errors=True)
        (folder / "payloads").mkdir(parents=True)
        for segment in sorted((newest / "buffer" / "payloads").iterdir()):
            try:
                os.link(segment, folder / "payloads" / segment.name)
            except OSError:
                shutil.copy2(segment, folder / "payloads" / segment.name)
        shutil.copy2(newest / "buffer" / "ledger.sqlite", unfinished)
        with sqlite3.connect(unfinished) as db:
            db.execute("INSERT OR REPLACE INTO kv VALUES ('restored', ?)", (str(newest),))
        db.close()
        unfinished.rename(folder / "ledger.sqlite")  # last: a ledger that is there is whole
    except (OSError, sqlite3.Error) as error:
        raise LedgerFailed(
            f"{newest}/buffer cannot be restored into {folder}: {error}. Free space or fix the rights."
        ) from error
    return newest


def _place(checkpoint: Path) -> tuple[int, int]:
    state = json.loads((checkpoint / "state.json").read_text())
    return state["branch"], state["batch"]
