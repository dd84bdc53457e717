"""`asyncrl doctor`: each judgement with and without its cause, and the command in an empty folder."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.doctor import machine, model, packages
from asyncrl.doctor.finding import Finding
from asyncrl.model import QUICKSTART
from tests.cli.test_cli import call

GB = 1 << 30
NOW = 1_800_000_000.0
RAY = {"launch": {"backend": "ray", "host": "auto"}, "weights": {"channel": "zmq"}}


def of(engine: str, **sections: Any) -> Config:
    return Config.model_validate({"actors": {"engine": engine}, **sections})


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (machine.system("linux", True), "ok", "Linux"),
        (machine.system("darwin", False), "fix", "runs on Linux"),
        (machine.processor(2), "ok", "2"),
        (machine.processor(1), "note", "share it"),
        (machine.memory(8 * GB), "ok", "8.0 GB"),
        (machine.memory(GB), "note", "close something"),
        (machine.shared_memory(GB, GB // 4), "ok", "1.0 GB"),
        (machine.shared_memory(GB, GB), "fix", "--shm-size"),
        (machine.shared_memory(None, GB), "note", "run folder"),
        (machine.disk("runs", 50 * GB, 20), "ok", "50.0 GB"),
        (machine.disk("runs", 10 * GB, 20), "note", "buffer.max_disk_gb (20)"),
        (machine.disk("runs", GB // 100, 20), "fix", "name another folder"),
        (machine.disk("runs", None, 20), "fix", "cannot be read"),
        (machine.open_files(65536), "ok", "65536"),
        (machine.open_files(resource.RLIM_INFINITY), "ok", "without a limit"),
        (machine.open_files(1024), "note", "ulimit -H -n"),
        (machine.temporary("/no/such/folder"), "fix", "TMPDIR"),
        (machine.address(""), "ok", "can be bound"),
        (machine.address("127.0.0.1"), "ok", "can be bound"),
        (machine.address("192.0.2.1"), "fix", "192.0.2.1 (launch.host)"),  # an address that no machine has
        (machine.clock(NOW, NOW - 9, True, True), "ok", "synchronised"),
        (machine.clock(NOW, NOW + 3600, True, False), "fix", "2027-01-15 08:00 UTC"),
        (machine.clock(NOW, NOW, False, True), "note", "run NTP"),
        (machine.clock(NOW, NOW, False, False), "ok", "not synchronised"),
        (packages.python((3, 11, 7), "/bin/python"), "ok", "3.11.7"),
        (packages.python((3, 9, 0), "/bin/python"), "fix", "3.11 or newer"),
        (packages.packages({"torch": None, "transformers": "5"}), "fix", "torch not installed"),
        (packages.engines(of("vllm"), ["sglang"]), "fix", "is 'vllm', which is not installed here: pip"),
        (packages.engines(of("vllm", **RAY), []), "ok", "takes vllm, on nodes of the Ray cluster"),
        (packages.engines(of("vlllm"), []), "fix", "is 'vlllm': expected one of hf, vllm"),
        (packages.engines(of("hf"), []), "ok", "takes hf"),
        (packages.engines(of("mine.py:Engine"), []), "ok", "takes mine.py:Engine"),
    ],
)
def test_each_judgement_names_the_remedy(finding: Finding, level: str, words: str) -> None:
    assert finding.level == level
    assert words in finding.text


@pytest.mark.parametrize(
    ("gpus", "torch", "devices", "level", "words"),
    [
        (None, "2.13.0", 0, "ok", "none"),
        ([], "2.13.0", 0, "fix", "driver"),
        (["H100, 580, 81559 MiB"], "2.13.0+cpu", 0, "fix", "a CPU build"),
        (["H100", "H100"], "2.13.0", 1, "fix", "sees 1 of 2"),
        (["H100, 580, 81559 MiB"], "2.13.0", 1, "ok", "H100"),
    ],
)
def test_gpus_that_torch_does_not_see(gpus: list[str] | None, torch: str, devices: int, level: str, words: str) -> None:
    (finding,) = packages.gpu(gpus, torch, devices)
    assert finding.level == level
    assert words in finding.text


def test_the_kernels_clock_status_is_read() -> None:
    """Whatever it is: the call works on this system, and gives no guess."""
    assert machine._synchronised() in (True, False, None)


def templated(folder: Path, template: str) -> Config:
    shutil.copytree(QUICKSTART, folder)
    (folder / "chat_template.jinja").write_text(template)
    return Config.load(None, {"model.path": str(folder)})


def test_the_chat_template_is_rendered(tmp_path: Path) -> None:
    assert model.template(Config()).level == "ok"
    refusing = model.template(templated(tmp_path / "a", "{{ raise_exception('no users here') }}"))
    assert refusing.level == "fix"
    assert "no users here" in refusing.text
    # Earlier results are dropped.
    each = "{% if loop.last or m.role != 'tool' %}{{ m.role + m.content }}<|im_end|>{% endif %}"
    rewriting = "{% for m in messages %}" + each + "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    changing = model.template(templated(tmp_path / "b", rewriting))
    assert changing.level == "note"
    assert "second tool result" in changing.text


def test_a_sound_machine_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "doctor")
    looked = {line[6:17].strip() for line in out.splitlines()[:-1]}
    assert looked == {
        "python", "packages", "gpus", "engines", "system", "cores", "memory", "/dev/shm", "disk", "ledger",
        "open files", "sockets", "ports", "clock", "config", "model", "template",
    }  # fmt: skip
    assert code == ("fix " in out)
    assert list(tmp_path.iterdir()) == []


def test_what_is_to_mend_stands_last_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    words = ["--model.path", "./model", "--launch.host", "192.0.2.1"]
    code, out, _ = call(capsys, "doctor", "--config", "quickstart", *words)
    assert code == 1
    last = out.splitlines()
    assert last[-1] == "2 to fix"
    assert [line.split()[1] for line in last[-3:-1]] == ["ports", "config"]
