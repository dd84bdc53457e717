from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.redaction import redact
from asyncrl.run_folder import SOCKET_PATH_BYTES, RunFolder, replace


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "a-run", Config())
    yield folder
    folder.remove_temporary()


def test_a_run_comes_back_from_its_folder(run: RunFolder) -> None:
    again = RunFolder.existing(run.path)
    assert again.load_config() == Config()
    assert (again.id, again.sockets, again.shm) == (run.id, run.sockets, run.shm)


def test_every_value_of_a_config_survives_the_folder(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "learner": {"lr": 1e-6, "corrections": [{"name": "tis", "cap": 5.0}], "betas": [0.8, 0.9]},
            "buffer": {"fsync": "off", "filters": ["zero_variance"]},
            "env": {"options": {"text": "on", "number": 1e-7, "none": None}},
            "launch": {"name": "2026-11-20", "seed": 3},
        }
    )
    run = RunFolder.create(tmp_path / "run", config)
    assert run.load_config() == config
    run.remove_temporary()


@pytest.mark.parametrize("text", ["learner: {nonsense: 1}", "{", "- 1"])
def test_a_config_of_another_state_of_the_code_is_told(run: RunFolder, text: str) -> None:
    run.config.write_text(text)
    with pytest.raises(RunError, match=r"config\.yaml cannot be read"):
        run.load_config()


@pytest.mark.parametrize("text", ["[1, 2]", '{"a": 1}', "3"])
def test_a_record_that_another_program_wrote_is_told(run: RunFolder, text: str) -> None:
    own = (run.path / "run.json").read_text()
    (run.path / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run\.json holds no record of a run: another program wrote it"):
        run.record()
    (run.path / "run.json").write_text(own)


def test_a_folder_without_its_configuration_is_told(run: RunFolder) -> None:
    run.config.unlink()
    with pytest.raises(RunError, match=r"config\.yaml is missing, .*: copy the whole run folder"):
        run.load_config()


def test_a_user_without_a_name_has_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    run = RunFolder.create(tmp_path / "run", Config())
    assert run.record()["user"] == str(os.getuid())
    run.remove_temporary()


def test_only_the_owner_reads_sockets_and_weights(run: RunFolder) -> None:
    for folder in (run.sockets, run.shm):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()


def test_a_socket_s_path_fits(run: RunFolder) -> None:
    address = str(run.address("launcher"))
    assert address.startswith("ipc://")
    assert len(os.fsencode(address.removeprefix("ipc://"))) <= SOCKET_PATH_BYTES


def test_a_deep_folder_for_temporary_files_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    run = RunFolder.create(tmp_path / "run", Config())
    assert len(os.fsencode(str(run.address("launcher")))) <= SOCKET_PATH_BYTES + len("ipc://")
    run.remove_temporary()


def test_a_folder_holds_one_run(run: RunFolder) -> None:
    with pytest.raises(RunError, match=r"already holds a run.*launch\.name.*--resume"):
        RunFolder.create(run.path, Config())


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        RunFolder.existing(tmp_path)


def test_a_new_launch_of_a_run_leaves_nothing_of_the_old_one(run: RunFolder) -> None:
    old = (run.id, run.sockets, run.shm)
    (run.shm / "weights").write_text("x")
    run.open()
    assert not old[1].exists()
    assert not old[2].exists()
    assert run.id != old[0]
    assert run.sockets.is_dir()
    assert run.shm.is_dir()


def test_one_launcher_at_a_time(run: RunFolder) -> None:
    with run.locked(), pytest.raises(RunError, match="another launcher"), run.locked():
        pass
    with run.locked():
        pass


def test_notes_add_up(run: RunFolder) -> None:
    run.note(processes={"launcher": [1, 2.0]})
    run.note(python="3.11")
    assert run.record()["processes"] == {"launcher": [1, 2.0]}
    assert run.record()["id"] == run.id


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    replace(tmp_path / "x", "old")
    replace(tmp_path / "x", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "new")]


def test_a_config_that_another_one_replaces_is_kept(run: RunFolder, tmp_path: Path) -> None:
    first = run.load_config()
    second = first.model_copy(update={"buffer": first.buffer.model_copy(update={"max_staleness": 7})})
    run.save_config(first)
    assert run.earlier_configs() == []
    run.save_config(second)
    run.save_config(second)
    assert (run.earlier_configs(), run.load_config()) == ([first], second)
    fork = RunFolder.create(tmp_path / "fork", second)
    fork.inherit_configs(run)
    assert fork.earlier_configs() == [first, second]
    fork.remove_temporary()


def test_secrets_of_an_earlier_config_are_hidden(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that stood in the clear is replaced by the name of a variable with the next `--resume`."""
    for value in ("sk-clear-of-before", "${A_NAME}"):
        run.save_config(Config.model_validate({"env": {"options": {"api_key": value}}}))
    monkeypatch.setattr("asyncrl.redaction._hidden", set())  # of another process, such as that of `asyncrl audit`
    assert run.load_config().env.options == {"api_key": "${A_NAME}"}
    assert len(run.earlier_configs()) == 2
    assert redact("refused: sk-clear-of-before") == "refused: [secret]"
