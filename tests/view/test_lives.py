"""Whether a viewed run lives, asked again and again: a viewer is opened before, between and after its launches."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import pytest

from asyncrl.buffer.client.pages import Page
from asyncrl.errors import RunError
from asyncrl.run_folder import RunFolder
from asyncrl.view import run as run_module
from asyncrl.view import source
from asyncrl.view.run import ViewedRun
from asyncrl.view.source import Finished, Live, Source, Unavailable, open_source
from tests.view.made_run import TEXT, MadeRun


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path / "run", samples=0)
    made.run.open()
    made.step()
    return made


class FakeLive(Finished):
    """Answers from the ledger as a live buffer would, until `away`."""

    live = True
    away = False

    def page(self, group: int, batch: int) -> Page:
        if self.away:
            raise Unavailable("the buffer of the live run does not answer")
        return super().page(group, batch)


@pytest.mark.parametrize(
    ("alive", "lives"),
    [
        ({}, False),
        ({1: "buffer"}, True),
        ({1: "launcher", 2: "actor-0"}, True),  # the buffer crashed, and is about to be started again
        ({2: "actor-0: sandbox"}, False),  # without a launcher nobody starts a buffer
    ],
)
def test_a_run_is_over_when_nobody_lives_who_could_write_its_ledger(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, alive: dict[int, str], lives: bool
) -> None:
    run = made.close()
    monkeypatch.setattr(source, "living", lambda _: alive)
    opened = open_source(run)
    assert isinstance(opened, Live if lives else Finished)
    opened.close()
    run.remove_temporary()


def test_a_run_whose_launcher_still_draws_plots_is_over(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.close()
    monkeypatch.setattr(source, "living", lambda _: {1: "launcher"})
    run.summary.write_text("{}")
    opened = open_source(run)
    assert isinstance(opened, Finished)
    opened.close()
    run.remove_temporary()


def test_a_run_that_may_live_on_another_host_is_not_read_from_its_files(made: MadeRun) -> None:
    run = made.close()
    run.note(host="auto", launched_on="elsewhere")
    with pytest.raises(RunError, match=r"on the host elsewhere.*a live run is viewed on its own host"):
        open_source(run)
    run.note(launched_on=platform.node())
    opened = open_source(run)  # here its processes can be seen, and there are none
    assert isinstance(opened, Finished)
    opened.close()
    run.note(launched_on="elsewhere")
    run.summary.write_text("{}")
    opened = open_source(run)
    assert isinstance(opened, Finished)
    opened.close()
    run.remove_temporary()


def test_a_run_that_is_over_may_live_again(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = False
    looks = 0

    def open_(run: RunFolder) -> Source:
        nonlocal looks
        looks += 1
        return (FakeLive if lives else Finished)(run.buffer)

    made.buffer.commit(0.0)
    viewed = ViewedRun(made.run, open_, TEXT)
    before, seen = viewed.revision, viewed.table()
    viewed.refresh()
    assert (viewed.live, viewed.revision, looks) == (False, before, 1), "not at every question"
    monkeypatch.setattr(run_module, "LOOK_S", 0.0)
    viewed._next_look = time.monotonic()
    viewed.refresh()
    assert (viewed.live, viewed.revision, looks) == (False, before, 2), "nothing has changed"
    lives = True
    made.step()
    made.buffer.commit(0.0)
    viewed.refresh()
    assert viewed.live
    assert len(viewed.table()) > len(seen)
    lives = False
    monkeypatch.setattr(FakeLive, "away", True)
    viewed.refresh()
    monkeypatch.setattr(FakeLive, "away", False)
    assert (viewed.live, viewed.trouble) == (False, "")
    viewed.close()
    made.close().remove_temporary()


def test_a_launch_that_began_while_another_one_was_viewed_is_asked(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.buffer.commit(0.0)
    viewed = ViewedRun(made.run, lambda run: FakeLive(run.buffer), TEXT)
    first = viewed._source
    monkeypatch.setattr(first, "away", True)
    viewed.refresh()
    assert (viewed._source, viewed.trouble) == (first, "the buffer of the live run does not answer")
    made.run.open()  # its sockets lie elsewhere
    viewed.refresh()
    assert viewed._source is not first
    assert (viewed.live, viewed.trouble) == (True, "")
    viewed.close()
    made.close().remove_temporary()


def test_a_folder_that_was_removed_is_said(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    viewed = ViewedRun(made.close(), text=TEXT)
    made.run.remove_temporary()
    monkeypatch.setattr(run_module, "LOOK_S", 0.0)
    viewed._next_look = time.monotonic()
    (made.run.path / "run.json").unlink()
    viewed.refresh()
    assert "run.json" in viewed.trouble
    viewed.close()
