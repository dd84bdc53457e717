"""What a real browser shows of 100 random trajectories of the real buffer and learner: against the ledger and its
payloads, and against the numbers that `asyncrl replay` computes again."""

from __future__ import annotations

import random
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.payloads import PayloadFiles, decoded
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.replay import _trainer, rebuilt
from asyncrl.run_folder import RunFolder
from asyncrl.trajectory import Trajectory
from asyncrl.view.run import ViewedRun
from tests.audit.real_run import SECTIONS, make_run
from tests.view.browser import Browser, found
from tests.view.live import WORDS
from tests.view.serving import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(found() is None, reason="no browser here: apt-get install chromium, or set ASYNCRL_BROWSER"),
]

COMPARED = 100
TOKEN = re.compile(
    r"token (\d+)  version (\d+)  behaviour (\S+)  learner (\S+)  difference (\S+)  weight (\S+)  advantage (\S+)  "
    r"carries loss (true|false)$"
)
SAID = """(() => {
  const cells = [...document.querySelectorAll('.r.on > span')].map(e => e.textContent);
  const tokens = [...document.querySelectorAll('.side .toks > [data-t]')].map(e => {
    e.dispatchEvent(new Event('mouseover', {bubbles: true})); return $('info').textContent; });
  return {cells, tokens, facts: document.querySelector('.side dl').textContent};
})()"""
"""The row that is picked, what each token says under the pointer, and what stands above the conversation."""


@dataclass(frozen=True)
class Expected:
    trajectory: Trajectory
    step: int
    batch: int
    staleness: int
    tokens: list[tuple[float, ...] | None]
    """Of each: id, version, behaviour, learner, difference, weight, advantage, carries loss; None: not sampled."""


def expected(run: RunFolder, ledger: LedgerRows) -> dict[tuple[int, int], Expected]:
    """From the ledger and the payloads, trained on again."""
    config, trainer, made = run.load_config(), _trainer(run.load_config()), {}
    with closing(PayloadFiles(run.buffer / "payloads")) as files:
        for batch in ledger.line:
            data = rebuilt(config, ledger, batch, files.read)
            record = trainer.train(data, batch.version).record
            values = [each.tolist() for each in (record.proximal, record.weights, record.advantages)]
            loss, at = (data.mask & record.keep).tolist(), 0
            for group in batch.groups:
                for member in ledger.members[group]:
                    t, tokens = decoded(ledger.groups[group], member, files.read), []
                    for row in t.rows:
                        for i in range(len(row)):
                            learner, weight, advantage = (each[at] for each in values)
                            own, of = float(row.logprobs[i]), (float(row.token_ids[i]), float(row.versions[i]))
                            numbers = (*of, own, learner, learner - own, weight, advantage, float(loss[at]))
                            tokens.append(numbers if row.mask[i] else None)
                            at += 1
                    oldest = min(int(v) for row in t.rows for v in row.versions[row.mask])
                    key = (group, member.index)
                    made[key] = Expected(t, batch.version + 1, batch.b, batch.version - oldest, tokens)
            assert at == len(data.token_ids)
    return made


def agree(shown: str, value: float) -> bool:
    """The page rounds to five places, and what is below a thousandth to three digits."""
    return abs(float(shown) - value) <= (6e-3 * abs(value) if "e" in shown else 5.1e-6)


def test_numbers_in_the_page_are_those_of_the_ledger_and_of_a_replay(tmp_path: Path) -> None:
    sections: dict[str, Any] = SECTIONS | {
        "learner": SECTIONS["learner"] | {"groups_per_step": 8, "group_size": 4},
        "buffer": SECTIONS["buffer"] | {"capacity": 128},
    }
    run = make_run(tmp_path, text=WORDS, sections=sections)
    ledger = read_ledger(run.buffer)
    recomputed = expected(run, ledger)
    chosen = random.Random(0).sample(sorted(recomputed), COMPARED)
    viewed, browser = ViewedRun(run, text=WORDS), Browser(tmp_path / "browser")
    tokens = 0
    try:
        with served(viewed) as server:
            browser.open(server.url)
            for group, index in chosen:
                e = recomputed[group, index]
                browser.js(f"$('right').replaceChildren(); only({{group: {group}}})")
                browser.js(f"document.querySelector('.r[data-id=\"0/{group}.{index}\"]').click()")
                browser.until(f"!!document.querySelector('.side[data-id=\"0/{group}.{index}\"] .toks')")
                said = browser.js(SAID)
                _, step, id, task, env, reward, _, age, stop, turns, length, used, *_ = said["cells"]
                t = e.trajectory
                assert (step, id, task, env) == (str(e.step), f"{group}.{index}", t.task_id, t.env)
                assert (stop, turns, length) == (t.stop_reason, str(t.turns), str(t.num_tokens))
                assert (age, used) == (str(e.staleness), f"batch {e.batch}")
                assert abs(float(reward) - t.reward) <= 5.1e-4
                assert all(name in said["facts"] for name in t.rewards)
                assert len(said["tokens"]) == len(e.tokens)
                for text, values in zip(said["tokens"], e.tokens, strict=True):
                    if values is None:
                        assert text.endswith("sampled no")
                        continue
                    matched = TOKEN.search(text)
                    assert matched is not None, text
                    *numbers, loss = matched.groups()
                    assert all(agree(a, b) for a, b in zip(numbers, values[:-1], strict=True)), (text, values)
                    assert (loss == "true") == bool(values[-1])
                    tokens += 1
            assert browser.errors == []
    finally:
        browser.close()
        viewed.close()
    assert tokens > 10 * COMPARED
    assert np.ptp([e.tokens[-1][5] for e in recomputed.values() if e.tokens[-1]]) > 0, "weights that differ"
