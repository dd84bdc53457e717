"""asyncrl outside its repository: a built wheel, in a folder and an environment that know nothing of this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ("asyncrl", "configs", "pyproject.toml", "README.md", "LICENSE")


def pip(python: Path | str, *words: str) -> None:
    done = subprocess.run([python, "-m", "pip", *words, "--quiet"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCE:  # built in a copy, since a build leaves folders in its source
        here = ROOT / name
        if here.is_dir():
            shutil.copytree(here, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(here, folder / name)
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(folder))
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    pip(sys.executable, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def asyncrl(site: Path, here: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The installed command in `here`; the packages that asyncrl needs are those of the tests."""
    environment = os.environ | {"PYTHONPATH": str(site), "HOME": str(here)}
    command = [sys.executable, "-m", "asyncrl", *words]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.system
def test_the_wheel_holds_the_configs_that_need_nothing_else_of_the_repository(wheel: Path) -> None:
    inside = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("asyncrl/configs/")}
    whole = {file.name for file in (ROOT / "configs").glob("*.yaml") if "examples" not in file.read_text()}
    assert inside == whole
    assert "quickstart.yaml" in inside


@pytest.mark.system
def test_what_is_installed_is_what_runs(installed: Path, tmp_path: Path) -> None:
    where = subprocess.check_output(
        [sys.executable, "-c", "import asyncrl; print(asyncrl.__file__)"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)}, text=True, timeout=60,
    )  # fmt: skip
    assert Path(where.strip()) == installed / "asyncrl" / "__init__.py"


@pytest.mark.system
def test_the_quickstart_is_known_by_its_name_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = asyncrl(installed, tmp_path, ["launch", "--config", "quickstart", "--dry-run"])
    assert done.returncode == 0, done.stderr
    assert "groups_per_step: 24" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_config_lists_those_that_are(installed: Path, tmp_path: Path) -> None:
    done = asyncrl(installed, tmp_path, ["launch", "--config", "quickstar", "--dry-run"])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "did you mean quickstart" in done.stderr
    assert "calculator" not in done.stderr  # it needs the repository


@pytest.mark.system
def test_the_wheel_trains_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    small = "--learner.steps 2 --learner.groups-per-step 4 --learner.group-size 4 --eval.tasks 4 --actors.slots 16"
    done = asyncrl(installed, tmp_path, ["launch", "--config", "quickstart", *small.split()])
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("quickstart-")
    assert (run / "checkpoints" / "step-000002" / "hf" / "config.json").is_file()


def python(version: str) -> str:
    """The Python of this version on the PATH. Skips the test where there is none."""
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, timeout=60).returncode:
        pytest.skip(f"no python{version} here")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", ["", "3.12", "3.13"])
def test_an_empty_environment_installs_the_wheel_and_trains(wheel: Path, tmp_path: Path, version: str) -> None:
    made_by = python(version) if version else sys.executable
    subprocess.run([made_by, "-m", "venv", tmp_path / "env"], check=True, timeout=120)
    pip(tmp_path / "env" / "bin" / "python", "install", "-c", str(ROOT / "requirements" / "tested.txt"), str(wheel))
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = "launch --config quickstart --learner.steps 2 --eval.tasks 4"
    done = subprocess.run(
        [tmp_path / "env" / "bin" / "asyncrl", *words.split()],
        cwd=empty, env=environment | {"HOME": str(empty)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((empty / "runs").glob("quickstart-*/checkpoints/step-*"))) >= 1
