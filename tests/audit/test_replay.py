from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.audit.command import audit
from asyncrl.audit.replay import replay
from asyncrl.buffer.ledger.storage.payloads import checksum
from asyncrl.buffer.record import from_record
from asyncrl.errors import ConfigError, RunError
from asyncrl.run_folder import RunFolder
from tests.audit.mutations import mend
from tests.audit.real_run import SECTIONS, STEPS, make_run
from tests.audit.test_audit import ask, overwrite, sql


def test_the_weights_are_the_same_bit_for_bit(original: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(original) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the payloads of steps 1 to 4 are there"
    assert [line.split()[:2] for line in lines[1:-1]] == [["step", str(n)] for n in range(STEPS + 1)]
    assert all("published: identical" in line for line in lines[1:-1])
    assert ["step-000002: identical" in line for line in lines[1:-1]] == [False, False, True, False, False]
    versions = ask(original, "SELECT digest FROM published")
    assert len(set(versions)) == len(versions) == STEPS + 1, "every step changed the weights"
    assert lines[-1] == "replay: 4 steps, 7 comparisons, every one bit-identical"


def test_from_a_checkpoint_and_up_to_a_step(original: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(original, from_step=2, to_step=3) == 0
    text = capsys.readouterr().out
    assert text.startswith("the payloads of steps 3 to 3 are there\nstep 2      start")
    with pytest.raises(ConfigError, match=r"--from-step is 3, .*expected one of 0, 2, 4"):
        replay(original, from_step=3)
    with pytest.raises(RunError, match="nothing can be replayed from step 4 on: no later step is recorded"):
        replay(original, from_step=4)


def test_a_payload_that_was_changed_is_named(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    [(group,)] = ask(run, "SELECT grp FROM uses JOIN batches USING (serial) WHERE b = 2 AND place = 0")
    overwrite(run, group, 1, 200, b"\xff\xff\xff")
    assert replay(run) == 1
    text = capsys.readouterr().out
    assert f"the payloads of steps 1 to 2 are there; step 3 ends it: the payload of trajectory 0.{group}.1" in text
    assert "replay: DIFFERENT: the payload of" in text


def test_other_data_makes_other_weights(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """One token changed, and every record of it too: no witness but the weights themselves can tell."""
    [(group, b)] = ask(run, "SELECT grp, b FROM uses JOIN batches USING (serial) WHERE b = 2 AND place = 0")
    where = "WHERE grp = ? AND idx = 0"
    segment, start, size = ask(run, f"SELECT segment, start, bytes FROM trajectories {where}", group)[0]
    path = run.buffer / "payloads" / f"{segment:08d}.segment"
    record = bytearray(path.read_bytes()[start : start + size])
    (frames,) = struct.unpack_from("<Q", record)
    header = struct.unpack_from("<Q", record, 8)[0]
    record[8 * (frames + 1) + header + -header % 8] ^= 1
    overwrite(run, group, 0, 0, bytes(record))
    digest, summed = from_record(bytes(record)).digest(), checksum(bytes(record))
    sql(run, f"UPDATE trajectories SET digest = ?, checksum = ? {where}", digest, summed, group)
    assert replay(run) == 1
    text = capsys.readouterr().out
    assert f"step {b + 1}      batch {b}      published: DIFFERENT" in text
    assert text.endswith(f"replay: DIFFERENT from step {b + 1} on\n")


def test_another_model_at_the_start_is_noticed(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run.load_config()
    model = tmp_path / "other"
    model.mkdir()
    for file in Path(config.model.path).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 1e-6}, model / "model.safetensors", {"format": "pt"})
    run.save_config(config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})}))
    assert replay(run) == 1
    assert "replay: DIFFERENT from step 0 on (model.path holds another model" in capsys.readouterr().out
    assert replay(run, from_step=2) == 0, "a checkpoint has weights of its own"


def test_a_checkpoint_that_differs_is_named(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.checkpoints / "step-000004" / "hf" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name, tensor in weights.items() if tensor.dim() == 2)
    weights[name].view(torch.int32)[0, 0] ^= 1
    save_file(weights, file, {"format": "pt"})
    assert replay(run, from_step=2) == 1
    assert "step 4      batch 3      published: identical, step-000004: DIFFERENT" in capsys.readouterr().out


def test_reclaimed_payloads_end_it(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    sql(run, "UPDATE groups SET payload = 0 WHERE number = (SELECT grp FROM uses WHERE serial = 2 AND place = 0)")
    assert replay(run) == 0
    assert "the payloads of steps 1 to 1 are there; step 2 ends it" in capsys.readouterr().out
    sql(run, "UPDATE groups SET payload = 0")
    with pytest.raises(RunError, match=r"nothing can be replayed from step 0 on: the payload of group 0 was reclaimed"):
        replay(run)


OF_A_USER = "def by_number(group):\n    return 1.0 + group.number % 5\n"
CHANGES = {
    "a weight": ("UPDATE replays SET weight = weight * 0.5 WHERE serial = ? AND grp = ?", "weight"),
    "a chance": ("UPDATE replays SET chance = chance * 1.5 WHERE serial = ? AND grp = ?", "chance"),
    "a draw": ("DELETE FROM replays WHERE serial = ? AND grp = ?", "the seed draws"),
    "the candidates": ("UPDATE batches SET candidates = candidates + 1 WHERE serial = ? AND ? >= 0", "candidates"),
}


@pytest.mark.system
def test_a_run_with_replayed_groups_is_trained_again_bit_for_bit_and_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is changed in a recorded draw is named by the audit; another weight makes other weights of the model."""
    (tmp_path / "priorities.py").write_text(OF_A_USER)
    priority = {"replay_priority": f"{tmp_path / 'priorities.py'}:by_number"}
    buffer = SECTIONS["buffer"] | {"replay": 1.0, "max_uses": 3, "max_staleness": 3} | priority
    learner = SECTIONS["learner"] | {"steps": 6, "minibatches": 2}
    run = make_run(tmp_path, sections=SECTIONS | {"learner": learner, "buffer": buffer})
    # The second batch has both groups of the first, whatever the actors were up to.
    serial, group, weight = ask(run, "SELECT serial, grp, weight FROM replays ORDER BY serial, weight")[0]
    assert 0 < weight < 1
    assert audit(run) == 0
    assert replay(run) == 0
    assert "replay: 6 steps" in capsys.readouterr().out
    saved = tmp_path / "saved"
    shutil.copytree(run.buffer, saved)
    for what, (statement, says) in CHANGES.items():
        sql(run, statement, serial, group)
        mend(run.buffer)
        assert audit(run) == 1, what
        text = capsys.readouterr().out
        assert "VIOLATION" in text
        assert "replays: batch" in text, what
        assert says in text, what
        if what == "a weight":
            assert replay(run) == 1
            assert "DIFFERENT" in capsys.readouterr().out
        shutil.rmtree(run.buffer)
        shutil.copytree(saved, run.buffer)
    assert audit(run) == 0
