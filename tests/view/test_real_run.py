"""The viewer of a run of the real buffer and learner: against the ledger, against a replay, and while it goes on."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.payloads import PayloadFiles, decoded
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.replay import _trainer, rebuilt
from asyncrl.launch.run import open_run
from asyncrl.run_folder import RunFolder
from asyncrl.view import source
from asyncrl.view.run import ViewedRun
from asyncrl.view.source import Finished, Live
from asyncrl.view.table import COLUMNS
from tests.audit.real_run import STEPS, fake_actor, make_run
from tests.buffer.processes import BufferProcess
from tests.view.live import LIVE, WORDS, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Every group is sampled."""
    return make_run(tmp_path_factory.mktemp("viewed"), text=WORDS)


@pytest.fixture(scope="module")
def ledger(run: RunFolder) -> LedgerRows:
    return read_ledger(run.buffer)


def test_the_numbers_are_those_of_the_ledger_and_its_payloads(run: RunFolder, ledger: LedgerRows) -> None:
    viewed = ViewedRun(run, text=WORDS)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in viewed.table()]
    assert {(row["group"], row["index"]) for row in rows} == set(ledger.trajectories)
    with closing(PayloadFiles(run.buffer / "payloads")) as files:
        for (group, index), stored in ledger.trajectories.items():
            t = decoded(ledger.groups[group], stored, files.read)
            shown = viewed.show(group, index)
            assert (shown["digest"], shown["rewards"]) == (stored.digest, dict(t.rewards))
            for made, row in zip(shown["rows"], t.rows, strict=True):
                assert made["ids"] == row.token_ids.tolist()
                assert np.array_equal(np.float32(made["logprobs"]), row.logprobs)
                assert made["versions"] == row.versions.tolist()
    viewed.close()


def test_what_the_loss_made_of_each_token_is_what_a_replay_makes_of_it(run: RunFolder, ledger: LedgerRows) -> None:
    viewed = ViewedRun(run, text=WORDS)
    config = run.load_config()
    trainer = _trainer(config)
    compared = 0
    with closing(PayloadFiles(run.buffer / "payloads")) as files:
        for batch in ledger.line:
            data = rebuilt(config, ledger, batch, files.read)
            record = trainer.train(data, batch.version).record
            at = 0
            for group in batch.groups:
                for member in ledger.members[group]:
                    for row in viewed.show(group, member.index, batch.serial)["rows"]:
                        tokens = slice(at, at + len(row["ids"]))
                        sampled = data.sampled[tokens].numpy()
                        for name, values in (
                            ("learner", record.proximal), ("weights", record.weights), ("advantages", record.advantages)
                        ):  # fmt: skip
                            assert np.array_equal(np.float32(row[name])[sampled], values[tokens].numpy()[sampled])
                        assert row["loss"] == (data.mask[tokens] & record.keep[tokens]).tolist()
                        at += len(row["ids"])
                        compared += int(sampled.sum())
            assert at == len(data.token_ids)
    viewed.close()
    assert len(ledger.line) == STEPS
    assert compared > 200


def test_a_user_reads_the_samples(run: RunFolder, ledger: LedgerRows) -> None:
    read = list(open_run(run.path).rollouts())
    assert [r.step for r in read] == sorted(r.step for r in read)
    assert {(r.group, r.index) for r in read} == {
        (g, t.index) for batch in ledger.line for g in batch.groups for t in ledger.members[g]
    }


def files_open(path: Path) -> list[str]:
    """Files below `path` that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:
            continue
    return [name for name in found if name.startswith(str(path))]


@pytest.mark.system
def test_a_live_run_is_asked_and_goes_on_when_the_viewer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer's process is real; the actor and the learner are made up. Its files are not opened while it lives."""
    process = BufferProcess(tmp_path / "run", **LIVE)
    monkeypatch.setattr(source, "living", lambda run: {1: "buffer"} if process.process else {})
    monkeypatch.setattr(source, "ANSWER_S", 10.0)
    process.start()
    try:
        client, incarnation = process.learner()
        with fake_actor(process.run, "actor-0"):
            train(client, incarnation, 0)
            viewed = ViewedRun(process.run, text=WORDS)
            assert isinstance(viewed._source, Live)
            assert viewed.live
            first = viewed.table()
            assert len(first) >= 4
            assert files_open(process.run.buffer) == []
            train(client, incarnation, 1)
            train(client, incarnation, 2)
            viewed.refresh()
            assert viewed.about()["steps"] == 3
            assert len(viewed.table()) > len(first)
            for group, index in viewed.keys()[:8]:
                assert viewed.show(group, index)["from"] == "payload"
            viewed.close()
            train(client, incarnation, 3)  # nobody looks any more, and the run goes on
            viewed = ViewedRun(process.run, text=WORDS)
            refused = client.status()["service"].get("refused", 0)
            assert refused == 0
        process.kill()
        process.process = None
        viewed.refresh()  # it takes what the ledger has
        assert not viewed.live
        assert isinstance(viewed._source, Finished)
        assert viewed.trouble == ""
        rows = {(row[0], row[1]) for row in viewed.table()}
        assert rows == set(read_ledger(process.run.buffer).trajectories)
        viewed.close()
    finally:
        process.close()


@pytest.mark.system
def test_readers_are_refused_when_they_ask_for_too_much(tmp_path: Path) -> None:
    """And whoever plays or trains is not."""
    from asyncrl.buffer.client import BufferRefused
    from asyncrl.buffer.client.pages import PER_S

    process = BufferProcess(tmp_path / "run")
    process.start()
    try:
        process.learner()
        reader, other = process.client("reader"), process.client("other")
        codes: list[str] = []
        over = threading.Event()
        begun = time.monotonic()

        def ask() -> None:
            while (asked_s := time.monotonic() - begun) < 2.0 or ("busy" not in codes and asked_s < 60.0):
                try:
                    reader.page(0, 0)
                    codes.append("")
                except BufferRefused as error:
                    codes.append(error.code)
            over.set()

        thread = threading.Thread(target=ask)
        thread.start()
        while not over.is_set():
            assert other.status()["branch"] == 0
        thread.join(60)
        assert set(codes) == {"", "busy"}
        assert codes.count("") <= (time.monotonic() - begun + 1) * PER_S + 1
    finally:
        process.close()


def test_a_run_whose_buffer_does_not_answer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = BufferProcess(tmp_path / "run")
    monkeypatch.setattr(source, "living", lambda run: {1: "buffer"})
    monkeypatch.setattr(source, "ANSWER_S", 0.2)
    with pytest.raises(Exception, match="the buffer of the live run does not answer"):
        ViewedRun(process.run)
    process.close()
